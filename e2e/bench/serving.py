"""What the server on the CPU promises beside throughput, measured, each beside its bar.

    python -m e2e.bench.serving [--only start,prefix,cache,memory,idle,step] [--json FILE]

- start: seconds from the start of `busload serve` until it is ready, which takes a real first token; files in the page
  cache, byte code there, as in an image.
- prefix: time to first token of a request that shares its first 1,024 tokens with one before it, against that one's.
- cache: what the prefix cache costs when nothing is ever found: CPU time of the scheduler with it and without it, per
  request of 128 tokens in and out, against the time the engine takes for such a request at batch 8.
- memory: resident memory of both processes, all of the KV pool written, against weights + KV pool.
- idle: CPU time of both processes while nothing is asked, over 20 s.
- step: from `e2e.bench.cpu_step`: share of the read bandwidth at batch 1, prefill of 2,048 tokens, and batch 8 at
  context 4,096 against context 256.

SmolLM2-135M-Instruct in Q4_1. Exit code 0: all bars hold; 1: one does not.
"""

import argparse
import asyncio
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from busload_runtime.bench.client import Client, Request, Target
from busload_runtime.bench.lengths import Lengths
from busload_runtime.bench.loops import Ending, closed_loop
from busload_runtime.bench.options import BenchOptions
from busload_runtime.bench.outcome import Outcome
from busload_runtime.bench.run import measure
from busload_runtime.bench.workload import Workload
from busload_runtime.contract import Limits
from busload_runtime.engine.plan import Sampled
from busload_runtime.engine.request import Request as EngineRequest
from busload_runtime.engine.scheduler import Scheduler
from e2e.bench import machine
from e2e.bench.server import BusloadServer, serve

_SPARE_BYTES = 150e6
_PREFIX = 1024


@dataclass(frozen=True)
class Bar:
    """One measured figure. `passed` is None where the machine has no bar of its own."""

    name: str
    measured: str
    bar: str
    passed: bool | None

    def __str__(self) -> str:
        verdict = {True: "pass", False: "FAIL", None: "no bar"}[self.passed]
        return f"{self.name:<52} {self.measured:<34} {self.bar:<34} {verdict}"


def main() -> int:
    options = _arguments()
    print(machine.describe(), flush=True)
    busy = machine.busy_share()
    bars: list[Bar] = []
    for name in options.only:
        for bar in CHECKS[name]():
            print(bar, flush=True)
            bars.append(bar)
    if said := machine.warning(busy):
        print(f"warning: {said}")
    if options.json:
        document = {"machine": asdict(machine.describe()), "busy": busy, "bars": [asdict(bar) for bar in bars]}
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return 0 if all(bar.passed is not False for bar in bars) else 1


def start() -> list[Bar]:
    seconds = []
    for _ in range(4):  # the first one fills the page cache, and compiles where need be
        with serve() as server:
            seconds.append(server.started_in)
    median = statistics.median(seconds[1:])
    return [Bar("start to first token", f"{median:.2f} s (best {min(seconds):.2f} s)", "< 3 s", median < 3)]


def prefix() -> list[Bar]:
    # Another seed each time: a server under test may have been asked before.
    rng = random.Random()
    pairs: list[tuple[float, float]] = []
    with serve("--batch-size=8") as server:
        for _ in range(7):
            shared = _tokens(rng, _PREFIX)
            first, second = (_ask_one_by_one(server, shared + _tokens(rng, 16)) for _ in range(2))
            assert second.cached_tokens == _PREFIX, f"{second.cached_tokens} of {_PREFIX} tokens were found"
            pairs.append((_first_token(first), _first_token(second)))
    ratios = [second / first for first, second in pairs[1:]]
    median = statistics.median(ratios)
    seconds = " -> ".join(f"{statistics.median(times) * 1e3:.0f} ms" for times in zip(*pairs[1:], strict=True))
    return [Bar(f"TTFT with {_PREFIX:,} shared tokens", f"{median:.1%} ({seconds})", "< 10% of without", median < 0.1)]


def cache() -> list[Bar]:
    with serve("--batch-size=8") as server:
        options = BenchOptions(
            Target(server.url, server.model), Lengths(128, 128), Lengths(128, 128), concurrencies=(8,), requests=24
        )
        (level,) = asyncio.run(measure(options, Workload(replace(options, seed=random.randrange(2**32)))))
    request = level.seconds / len(level.outcomes)
    with_cache, without = _scheduling_seconds(Scheduler), _scheduling_seconds(_WithoutPrefixCache)
    cost = max(with_cache - without, 0.0)
    measured = f"{cost / request:.2%} ({cost * 1e6:.0f} us of {request * 1e3:.1f} ms a request)"
    return [Bar("prefix cache at 0% hits, of a request's time", measured, "< 1%", cost / request < 0.01)]


class _WithoutPrefixCache(Scheduler):
    """Neither looks for blocks nor makes them findable."""

    def _cached_blocks(self, request: EngineRequest) -> list[Any]:
        return []

    def _publish(self, request: EngineRequest, end: int) -> None:
        request.published = end // self.block_size


def _scheduling_seconds(kind: type[Scheduler], requests: int = 64) -> float:
    """CPU seconds of scheduling per request of 128 tokens in and out at batch 8; the best of five runs."""
    limits = Limits(
        max_sequence_length=512, batch_size=8, kv_cache_percent=90, token_budget=512, max_queued_requests=requests,
        max_queued_tokens=requests * 128,
    )  # fmt: skip
    best = float("inf")
    for _ in range(5):
        rng = random.Random(1)
        # Smaller than what all requests write, so that blocks with content are given up for new ones too.
        scheduler = kind(limits, 32, 256)
        waiting = [EngineRequest(number, _tokens(rng, 128), max_tokens=128) for number in range(requests)]
        begin = time.process_time()
        for request in waiting:
            scheduler.add(request)
        while scheduler.has_work:
            plan = scheduler.plan(0.0)
            drawn = [Sampled(chunk.request_id, 5) for chunk in plan.chunks if chunk.sampling is not None]
            scheduler.commit(plan, drawn)
        best = min(best, time.process_time() - begin)
    return best / requests


def memory() -> list[Bar]:
    # So little memory that a short load writes all of the pool.
    with serve("--batch-size=8", "--memory=420000000", "--max-sequence-length=1024") as server:
        series = _metrics(server)
        pool_tokens = series["busload_kv_blocks"] * series["busload_kv_block_size_tokens"]
        pool = pool_tokens * series["busload_kv_bytes_per_token"]
        requests = -(-int(pool_tokens * 1.2) // 520)
        asyncio.run(_ask(server, requests, 512, 8, concurrency=8))
        resident = {name: _resident(pid) for name, pid in server.processes().items()}
    weights = series["busload_weight_bytes"]
    spare = sum(resident.values()) - weights - pool
    each = ", ".join(f"{name} {size / 1e6:.0f}" for name, size in resident.items())
    measured = f"{sum(resident.values()) / 1e6:.0f} MB ({each})"
    bar = f"<= {weights / 1e6:.0f} + {pool / 1e6:.0f} + {_SPARE_BYTES / 1e6:.0f} MB"
    return [Bar("resident memory, weights + KV pool + 150 MB", measured, bar, spare <= _SPARE_BYTES)]


def idle(seconds: float = 20.0) -> list[Bar]:
    with serve("--batch-size=8") as server:
        asyncio.run(_ask(server, 8, 64, 16, concurrency=8))
        time.sleep(2)
        pids = server.processes().values()
        before = sum(map(_cpu_seconds, pids))
        time.sleep(seconds)
        share = (sum(map(_cpu_seconds, pids)) - before) / seconds
    return [Bar(f"CPU while idle, over {seconds:.0f} s", f"{share:.2%} of a core", "< 1%", share < 0.01)]


def step() -> list[Bar]:
    short = _cpu_step("--context=256", "--batches=1,8", "--prefill=2048")
    long = _cpu_step("--context=4096", "--batches=8", "--prefill=")
    by_name = {result["name"]: result for result in short["results"]}
    prefill = 2048 / by_name["prefill 2048"]["median"]
    wanted = 2500 if "avx512_vnni" in machine.describe().instructions and short["isa"].startswith("avx512") else 900
    if short["isa"] == "portable":
        wanted = 0
    share = by_name["decode 1"]["share"]
    kept = by_name["decode 8"]["median"] / long["results"][0]["median"]
    return [
        Bar("decode at batch 1, share of read bandwidth", f"{share:.0%}", ">= 85%", share >= 0.85),
        Bar(
            f"prefill of 2,048 tokens ({short['isa']})",
            f"{prefill:,.0f} tok/s",
            f">= {wanted:,} tok/s" if wanted else "-",
            prefill >= wanted if wanted else None,
        ),
        Bar("batch 8 at context 4,096, speed kept from 256", f"{kept:.0%}", ">= 60%", kept >= 0.6),
    ]


CHECKS: dict[str, Callable[[], list[Bar]]] = {
    "start": start, "prefix": prefix, "cache": cache, "memory": memory, "idle": idle, "step": step,
}  # fmt: skip


def _cpu_step(*arguments: str) -> dict[str, Any]:
    """What `e2e.bench.cpu_step` measures."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-m", "e2e.bench.cpu_step", *arguments, f"--json={file.name}"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=900)
        document: dict[str, Any] = json.loads(file.read())
    return document


def _tokens(rng: random.Random, count: int) -> list[int]:
    return rng.choices(range(1000, 40000), k=count)


def _ask_one_by_one(server: BusloadServer, prompt: list[int]) -> Outcome:
    """One request, alone."""

    async def ask() -> Outcome:
        client = Client(Target(server.url, server.model))
        outcome = Outcome(0.0)
        await client.send(Request(prompt, len(prompt), 2), client.now(), outcome)
        await client.close()
        return outcome

    return _succeeded(asyncio.run(ask()))


async def _ask(server: BusloadServer, requests: int, input_tokens: int, output_tokens: int, concurrency: int) -> None:
    rng = random.Random()
    prompts = (Request(_tokens(rng, input_tokens), input_tokens, output_tokens) for _ in range(requests))
    outcomes: list[Outcome] = []
    client = Client(Target(server.url, server.model))
    await closed_loop(client, prompts, concurrency, None, Ending(), outcomes)
    await client.close()
    for outcome in outcomes:
        _succeeded(outcome)


def _succeeded(outcome: Outcome) -> Outcome:
    if not outcome.ok:
        raise SystemExit(f"error: a request failed, so nothing was measured: {outcome.error}")
    return outcome


def _first_token(outcome: Outcome) -> float:
    assert outcome.time_to_first_token is not None
    return outcome.time_to_first_token


def _metrics(server: BusloadServer) -> dict[str, float]:
    with urllib.request.urlopen(server.url.removesuffix("/v1") + "/metrics", timeout=10) as answer:
        lines = [line for line in answer.read().decode().splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def _resident(pid: int) -> float:
    """Proportional resident bytes: pages that both processes share count once in all."""
    found = re.search(r"^Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), flags=re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024.0


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=_checks, default=list(CHECKS), help=f"of {','.join(CHECKS)} (default: all)")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _checks(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in CHECKS:
            raise argparse.ArgumentTypeError(f"{name!r} is no check; known are {', '.join(CHECKS)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
