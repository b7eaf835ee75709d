"""What a streamed token costs outside of the model: CPU time of the HTTP process, and of the engine around a step.

    python -m e2e.bench.serving_overhead [--model M] [--executor cpu] [--batches 1,8,32] [--part engine|http|all]

- engine: microseconds of CPU per step of the real step loop with an executor that computes nothing, in steady decoding:
  `step` is scheduler, statistics and outputs alone, `loop` also receives and sends over a real socket (its sending
  thread included).
- http: `busload serve` under a load of streams. CPU of the HTTP process, all its threads, per token and per request:
  the same requests are sent with one output token and with many, and the difference goes to the tokens.

Both are CPU time, so what else runs on the machine adds little; each is repeated and the best counts.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from busload_runtime.contract import Limits
from busload_runtime.engine.link import Link
from busload_runtime.engine.loop import Engine
from busload_runtime.engine.memory import Budget, MemoryPlan
from busload_runtime.engine.messages import Submit, ToEngine
from busload_runtime.engine.plan import Plan, Sampled
from busload_runtime.engine.process import serve
from busload_runtime.executors.contract import DeviceMemory

_PROMPT_TOKENS = 128
_BLOCK_TOKENS = 32


class _NoModel:
    """An executor that computes nothing and draws token 1."""

    block_size = _BLOCK_TOKENS
    bytes_per_block = 1 << 15
    weight_bytes = 1 << 27
    vocab_size = 49152
    context_length = 1 << 20
    copy_bandwidth = 1e9
    device_memory: DeviceMemory | None = None

    def activation_bytes(self, token_budget: int, batch_size: int) -> int:
        return 1

    def reserve(self, max_blocks: int) -> None: ...
    def resize(self, num_blocks: int) -> None: ...

    def run(self, plan: Plan) -> Sequence[Sampled]:
        return [Sampled(chunk.request_id, 1) for chunk in plan.chunks if chunk.sampling is not None]


def _engine(batch: int, steps: int) -> tuple[Engine, list[ToEngine]]:
    """An engine, and the requests that keep a batch decoding for so many steps."""
    executor = _NoModel()
    memory = MemoryPlan(
        Budget(1 << 33, "bench"), 0, 0, _BLOCK_TOKENS, executor.bytes_per_block, 1 << 20, executor.activation_bytes
    )
    engine = Engine(executor, memory, Limits(1 << 16, batch, 100, 1 << 14, 0, 0))
    requests: list[ToEngine] = [
        Submit(request_id, [1 + request_id] * _PROMPT_TOKENS, steps, stop_token_ids=[0], temperature=0.0)
        for request_id in range(batch)
    ]
    return engine, requests


def step_seconds(batch: int, steps: int) -> float:
    """CPU seconds of one decoding step without the executor's and the link's share."""
    engine, requests = _engine(batch, steps + 1)
    for request in requests:
        assert isinstance(request, Submit)
        engine.submit(request)
    engine.step()
    begin = time.process_time()
    for _ in range(steps):
        engine.step()
    used = time.process_time() - begin
    assert not engine.has_work, "the batch ends with the last step"
    return used / steps


class _Done(Exception):
    """The measured loop has nothing left to do."""


class _ScriptedLink(Link):
    """A real link whose first messages are given; ends the loop once there is no work."""

    def __init__(self, connection: socket.socket, engine: Engine, script: list[ToEngine]) -> None:
        super().__init__(connection)
        self._script, self._engine = script, engine

    def receive(self, seconds: float) -> list[ToEngine]:
        received = super().receive(0.0)
        if self._script:
            received, self._script = self._script, []
        elif not self._engine.has_work:
            raise _Done
        return received


def loop_seconds(batch: int, steps: int) -> float:
    """CPU seconds of one turn of the engine process's loop, receiving and sending included."""
    ours, theirs = socket.socketpair()
    with theirs:
        reader = multiprocessing.get_context("spawn").Process(target=_read_all, args=(theirs,), daemon=True)
        reader.start()
    link = _ScriptedLink(ours, *_engine(batch, steps))
    begin = time.process_time()
    try:
        serve(link, link._engine)
    except _Done:
        used = time.process_time() - begin
    link.close()
    reader.join(10)
    return used / steps


def _read_all(connection: socket.socket) -> None:
    """The other end of the socket, in a process of its own, until it is closed."""
    with connection:
        while connection.recv(1 << 16):
            pass


# The HTTP process.


@dataclass(frozen=True, slots=True)
class Load:
    """What one round of streams took."""

    tokens: int
    cpu_seconds: float
    wall_seconds: float


def cpu_seconds(pid: int) -> float:
    """CPU time of a process, all threads, in the scheduler's nanoseconds (/proc/PID/task/*/schedstat)."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


async def _stream(host: str, port: int, body: dict[str, object]) -> int:
    """One request; the output tokens it was charged for. Hardly parses, so that the client costs little."""
    content = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 20)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nConnection: close\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    writer.write(head.encode() + content)
    answer = await reader.read()
    writer.close()
    found = re.search(rb'"completion_tokens":(\d+)', answer)
    if found is None or b"[DONE]" not in answer:
        raise RuntimeError(f"the stream did not end well: {answer[-500:]!r}")
    return int(found[1])


async def _round(port: int, pid: int, model: str, concurrency: int, max_tokens: int) -> Load:
    async def one() -> int:
        prompt = [random.randrange(100, 40_000) for _ in range(_PROMPT_TOKENS)]
        options = {"stream": True, "ignore_eos": True, "stream_options": {"include_usage": True}}
        body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **options}
        return await _stream("127.0.0.1", port, body)

    cpu, wall = cpu_seconds(pid), time.perf_counter()
    tokens = sum(await asyncio.gather(*(one() for _ in range(concurrency))))
    return Load(tokens, cpu_seconds(pid) - cpu, time.perf_counter() - wall)


def measure_http(options: argparse.Namespace) -> list[dict[str, float]]:
    command = "from busload_operator.cli import main; main()"
    flags = [f"--model={options.model}", f"--executor={options.executor}", "--port=0", "--served-model-name=bench"]
    flags += [f"--batch-size={max(options.batches)}", *options.serve_flags.split()]
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "log"
        with log.open("w") as stderr:
            process = subprocess.Popen([sys.executable, "-c", command, "serve", *flags], stderr=stderr)
        try:
            port = _wait_for_port(process, log)
            return [_http_level(options, port, process.pid, concurrency) for concurrency in options.batches]
        finally:
            process.terminate()
            process.wait(30)


def _wait_for_port(process: "subprocess.Popen[bytes]", log: Path) -> int:
    while process.poll() is None:
        if found := re.search(r"is ready after .* at http://[^/]*:(\d+)/v1", log.read_text()):
            return int(found[1])
        time.sleep(0.05)
    raise SystemExit(f"busload serve did not start:\n{log.read_text()}")


def _http_level(options: argparse.Namespace, port: int, pid: int, concurrency: int) -> dict[str, float]:
    results = []
    for _ in range(options.repeats):
        short = asyncio.run(_round(port, pid, "bench", concurrency, 1))
        long = asyncio.run(_round(port, pid, "bench", concurrency, options.tokens))
        results.append(
            {
                "concurrency": concurrency,
                "us_per_token": (long.cpu_seconds - short.cpu_seconds) / (long.tokens - short.tokens) * 1e6,
                "us_per_request": short.cpu_seconds / concurrency * 1e6,
                "share_of_a_core": long.cpu_seconds / long.wall_seconds,
                "tokens_per_second": long.tokens / long.wall_seconds,
            }
        )
    best = min(results, key=lambda result: result["us_per_token"])
    tokens = sorted(result["us_per_token"] for result in results)
    print(
        f"http, concurrency {concurrency:3}: {tokens[0]:6.1f} us a token (median {tokens[len(tokens) // 2]:.1f}), "
        f"{best['us_per_request']:.0f} us a request, {best['share_of_a_core']:.1%} of a core "
        f"at {best['tokens_per_second']:.0f} tok/s",
        flush=True,
    )
    return best


def measure_engine(options: argparse.Namespace) -> list[dict[str, float]]:
    results = []
    for batch in options.batches:
        steps = 4000 // (1 + batch // 8)
        step = min(step_seconds(batch, steps) for _ in range(options.repeats)) * 1e6
        loop = min(loop_seconds(batch, steps) for _ in range(options.repeats)) * 1e6
        print(f"engine, batch {batch:3}: step {step:6.1f} us, loop {loop:6.1f} us", flush=True)
        results.append({"batch": batch, "us_per_step": step, "us_per_loop": loop})
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bundled:smollm2-135m-instruct")
    parser.add_argument("--executor", default="cpu")
    parser.add_argument("--serve-flags", default="", help="more flags for `busload serve`, in one string")
    parser.add_argument("--batches", type=_numbers, default=[1, 8, 32], help="batch sizes and concurrencies")
    parser.add_argument("--tokens", type=int, default=128, help="output tokens of a long stream")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--part", choices=("engine", "http", "all"), default="all")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(f"{os.cpu_count()} CPUs, load average {os.getloadavg()[0]:.1f}")
    results = {}
    if options.part != "http":
        results["engine"] = measure_engine(options)
    if options.part != "engine":
        results["http"] = measure_http(options)
    if options.json:
        options.json.write_text(json.dumps(results))


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",") if word]


if __name__ == "__main__":
    main()
