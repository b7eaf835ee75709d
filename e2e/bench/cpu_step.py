"""Times of one engine step on the CPU: decode at several batch sizes, prefill, and how near the memory limit they are.

`python -m e2e.bench.cpu_step [--model M] [--context N] [--batches 1,8,32] [--prefill 128,512,2048] [--isa avx2]
[--threads N] [--phases] [--json FILE]`
The step is called as the engine calls it, with greedy sampling; no scheduler and no HTTP. `--phases` builds an engine
that counts, and prints where a step's time goes (median, mean of the threads): CPU time of the work, which the
neighbours on the machine hardly change, and time without work.

Between decode steps all threads read memory once, so that the share of the read bandwidth compares medians of the same
seconds: bandwidth, too, is what neighbours leave.
"""

import argparse
import ctypes
import json
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from busload_kernels.cpu import library as native
from busload_runtime.engine.plan import Chunk, Plan, SamplingParams
from busload_runtime.executors.cpu import CpuExecutor
from busload_runtime.model.load import load_weights

_GREEDY = SamplingParams(temperature=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="bundled:smollm2-135m-instruct")
    parser.add_argument("--context", type=int, default=256, help="tokens in the cache of each decoding request")
    parser.add_argument("--batches", type=_numbers, default=[1, 8, 32])
    parser.add_argument("--prefill", type=_numbers, default=[128, 512, 2048])
    parser.add_argument("--seconds", type=float, default=3.0, help="per measurement")
    parser.add_argument("--isa", help="instruction set (default: the best)")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--phases", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.phases:
        os.environ["BUSLOAD_CPU_PROFILE"] = "1"
    begin = time.perf_counter()
    executor = CpuExecutor(load_weights(options.model), options.threads, options.isa)
    loaded = time.perf_counter() - begin
    per_request = -(-max([options.context + 1, *options.prefill]) // executor.block_size)
    blocks = per_request * max([1, *options.batches])
    executor.reserve(blocks)
    executor.resize(blocks)
    reader = _Reader(executor.threads)
    read = max(reader.bandwidth() for _ in range(50))
    print(
        f"{executor.isa}, {executor.threads} threads, loaded in {loaded:.2f} s, load average {os.getloadavg()[0]:.1f}; "
        f"weights {executor.weight_bytes / 1e6:.1f} MB; "
        f"read {read / 1e9:.1f} GB/s, copy {executor.copy_bandwidth / 1e9:.1f} GB/s"
    )
    results: list[dict[str, Any]] = []
    for batch in options.batches:
        plan = _decode(executor, batch, options.context, per_request)
        moved = executor.weight_bytes + batch * options.context * executor.bytes_per_block / executor.block_size
        results.append(_measure(executor, f"decode {batch}", plan, batch, options.seconds, moved, reader))
    for length in options.prefill:
        plan = Plan((Chunk(0, _tokens(executor, length), 0, tuple(range(-(-length // 32))), _GREEDY),))
        results.append(_measure(executor, f"prefill {length}", plan, length, options.seconds))
    if options.json:
        options.json.write_text(json.dumps({"isa": executor.isa, "threads": executor.threads, "results": results}))


def _decode(executor: CpuExecutor, batch: int, context: int, per_request: int) -> Plan:
    """`batch` requests that each have `context` tokens in the cache, scattered over it."""
    table = np.random.default_rng(0).permutation(per_request * batch).reshape(batch, per_request)
    chunks = []
    for request, blocks in enumerate(table.tolist()):
        prompt = Chunk(request, _tokens(executor, context, request), 0, tuple(blocks), None)
        executor.run(Plan((prompt,)))
        chunks.append(Chunk(request, (request + 1,), context, tuple(blocks), _GREEDY))
    return Plan(tuple(chunks))


def _tokens(executor: CpuExecutor, count: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, executor.vocab_size, count).tolist())


class _Reader:
    """Reads memory with `threads` threads."""

    _BYTES = 2**26

    def __init__(self, threads: int) -> None:
        self._library, self._threads = native.load(), threads
        self._buffer = self._library.bl_map(self._BYTES)
        ctypes.memset(self._buffer, 1, self._BYTES)

    def bandwidth(self) -> float:
        """Bytes per second of one pass."""
        return float(self._library.bl_bandwidth(self._buffer, self._BYTES, self._threads, 0.0, 0))


def _measure(
    executor: CpuExecutor,
    name: str,
    plan: Plan,
    tokens: int,
    seconds: float,
    moved: float | None = None,
    reader: _Reader | None = None,
) -> dict[str, Any]:
    """Runs `plan` for about `seconds`. Median and best: what else runs on the machine only ever adds time. The `moved`
    bytes of a step are compared with what `reader` reads in between."""
    times: list[float] = []
    reads: list[float] = []
    profiles: list[dict[str, NDArray[np.float64]]] = []
    executor.run(plan)
    executor.take_profile()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        begin = time.perf_counter()
        executor.run(plan)
        times.append(time.perf_counter() - begin)
        profiles.append(executor.take_profile())
        if reader is not None:
            reads.append(reader.bandwidth())
    median, best = statistics.median(times), min(times)
    line = (
        f"{name:>14}: median {median * 1e3:8.3f} ms {tokens / median:8.0f} tok/s   "
        f"best {best * 1e3:8.3f} ms {tokens / best:8.0f} tok/s"
    )
    share = moved / median / statistics.median(reads) if moved is not None else None
    if moved is not None:
        line += f"   {moved / median / 1e9:5.1f} GB/s, {share:.0%} of the read bandwidth"
    print(line, flush=True)
    phases = {phase: np.median([one[phase].mean(axis=0) for one in profiles], axis=0) for phase in profiles[0]}
    for phase, (busy, idle) in phases.items():
        print(f"{phase:>24}: busy {busy * 1e3:8.3f} ms   waiting or without a core {idle * 1e3:7.3f} ms", flush=True)
    return {
        "name": name,
        "steps": len(times),
        "median": median,
        "best": best,
        "tokens": tokens,
        "moved": moved,
        "share": share,
        "phases": {phase: spent.tolist() for phase, spent in phases.items()},
    }


def _numbers(text: str) -> Sequence[int]:
    return [int(word) for word in text.split(",") if word]


if __name__ == "__main__":
    main()
