"""Continuous against static batching: same model, same executor, same scheduler; only the rule of admission differs.

- continuous: a request enters the running batch as soon as another one leaves it.
- static: a batch of requests is admitted when the batch before it has wholly ended; requests that have ended cost it
  nothing. The ratio is what admission alone buys.
- padded: static batching as it is usually done (a rectangular batch, as in transformers' generate): rows that have
  ended are computed on until the longest one ends. Only wanted tokens count.

    python -m e2e.bench.static_batching        # 11,000 steps of a real model: some 15 minutes on two free cores
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import count, pairwise
from pathlib import Path
from typing import Protocol

from busload_runtime.contract import Limits
from busload_runtime.engine.plan import Plan, Sampled
from busload_runtime.engine.request import Request
from busload_runtime.engine.scheduler import Scheduler
from busload_runtime.executors.contract import Executor
from busload_runtime.executors.create import NAMES, create_executor

# Lengths at cumulative shares, of the 2,026 ShareGPT-like requests of vllm-project/aibrix (eight minutes up
# and down in benchmarks/scenarios/autoscaling, Apache-2.0). What lies beyond the 99th percentile is left at it.
_SHARES = (0.0, 0.05, 0.25, 0.50, 0.75, 0.90, 0.95, 0.99, 1.0)
_OUTPUT_TOKENS = (1, 6, 16, 34, 82, 179, 266, 559, 559)
_PROMPT_TOKENS = (16, 74, 165, 263, 378, 525, 648, 789, 789)


@dataclass(frozen=True, slots=True)
class Length:
    prompt: int
    output: int


def one_long_beside_seven_short(groups: int) -> list[Length]:
    """In each group of eight one request draws 800 tokens and seven draw 40."""
    return [Length(16, 800 if place == 0 else 40) for _ in range(groups) for place in range(8)]


def mix(requests: int, seed: int, long_prompts: bool) -> list[Length]:
    """Output lengths at evenly spaced shares of the quantiles above, shuffled: a fair sample even when small.

    Prompts have 32 tokens, or lengths from their own quantiles.
    """
    shares = [(place + 0.5) / requests for place in range(requests)]
    outputs = [_at_share(_OUTPUT_TOKENS, share) for share in shares]
    prompts = [_at_share(_PROMPT_TOKENS, share) if long_prompts else 32 for share in shares]
    shuffle = random.Random(seed).shuffle
    shuffle(outputs)
    shuffle(prompts)
    return [Length(prompt, output) for prompt, output in zip(prompts, outputs, strict=True)]


def _at_share(lengths: Sequence[int], share: float) -> int:
    """The length at a cumulative share, linear between the known quantiles."""
    steps = zip(pairwise(_SHARES), pairwise(lengths), strict=True)
    low, high, first, last = next((*s, *n) for s, n in steps if share <= s[1])
    return round(first + (last - first) * (share - low) / (high - low))


WAYS = ("padded", "static", "continuous")
Maker = Callable[[int, int], Request]
"""Makes a request of so many random prompt tokens that draws so many."""
_STEPS_PER_LINE = 500  # of progress on stderr

WORKLOADS: dict[str, tuple[str, Callable[[], list[Length]]]] = {
    "long": (
        "3 x (one request of 800 tokens beside seven of 40), prompts of 16",
        lambda: one_long_beside_seven_short(3),
    ),
    "mix": (
        "64 requests, outputs as in the AIBrix trace (median 34, p95 266), prompts of 32",
        lambda: mix(64, 1, False),
    ),
    "mix-prompts": ("the same outputs, prompts as in the trace too (median 263)", lambda: mix(64, 1, True)),
}


class Clocked(Protocol):
    """Who computes the steps, and the clock that sees how long they take."""

    block_size: int
    vocab_size: int

    def run(self, plan: Plan) -> Sequence[Sampled]: ...
    def now(self) -> float: ...
    def processor_seconds(self) -> float: ...


class Measured:
    """A real executor on the real clock."""

    def __init__(self, executor: Executor, num_blocks: int) -> None:
        executor.reserve(num_blocks)
        executor.resize(num_blocks)
        self.block_size = executor.block_size
        self.vocab_size = executor.vocab_size
        self.run = executor.run
        self.now = time.perf_counter
        self.processor_seconds = time.process_time


class StepLaw:
    """No model: a step takes a + b * requests + c * KV tokens + d * prompt tokens, on a clock of its own.

    The constants are of the order of the reference executor with SmolLM2-135M on two cores. For a quick look only.
    """

    block_size = 16
    vocab_size = 49152
    _A, _B, _C, _D = 0.05, 0.003, 2e-6, 0.004

    def __init__(self) -> None:
        self._clock = 0.0

    def run(self, plan: Plan) -> Sequence[Sampled]:
        kv_tokens = sum(chunk.length_after for chunk in plan.chunks)
        prompt_tokens = plan.num_tokens - sum(len(chunk.tokens) == 1 for chunk in plan.chunks)
        self._clock += self._A + self._B * len(plan.chunks) + self._C * kv_tokens + self._D * prompt_tokens
        return [Sampled(chunk.request_id, 1) for chunk in plan.chunks if chunk.sampling is not None]

    def now(self) -> float:
        return self._clock

    def processor_seconds(self) -> float:
        return self._clock


@dataclass(frozen=True, slots=True)
class Run:
    seconds: float
    processor_seconds: float
    tokens: int
    steps: int

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def serve(
    executor: Clocked, lengths: Sequence[Length], limits: Limits, num_blocks: int, way: str, make: Maker, name: str
) -> Run:
    """All requests are there at the start; this is the only place where the three ways differ."""
    scheduler = Scheduler(limits, executor.block_size, num_blocks)
    together = len(lengths) if way == "continuous" else limits.batch_size
    started, processor, tokens = executor.now(), executor.processor_seconds(), 0

    def so_far() -> Run:
        seconds, used = executor.now() - started, executor.processor_seconds() - processor
        return Run(seconds, used, tokens, scheduler.counters.steps)

    for first in range(0, len(lengths), together):
        group = lengths[first : first + together]
        longest = max(length.output for length in group)
        left: dict[int, int] = {}
        for length in group:
            request = make(length.prompt, longest if way == "padded" else length.output)
            left[request.request_id] = length.output
            scheduler.add(request)
        while scheduler.has_work:
            plan = scheduler.plan(executor.now())
            for drawn in scheduler.commit(plan, executor.run(plan)):
                # Beyond what the request wanted there is only padding.
                tokens += left[drawn.request_id] > 0
                left[drawn.request_id] -= 1
            if scheduler.counters.steps % _STEPS_PER_LINE == 0:
                _progress(name, so_far())
    _progress(name, so_far())
    return so_far()


@dataclass(frozen=True, slots=True)
class Way:
    """One way of batching. Medians over the repeats; `ratio` is the median of continuous over this in each repeat."""

    tokens_per_second: float
    steps: int
    ratio: float
    ratios: list[float]
    processor_ratio: float
    """The same per processor second instead of second: steadier when others use the machine."""


@dataclass(frozen=True, slots=True)
class Comparison:
    workload: str
    description: str
    tokens: int
    ways: dict[str, Way]


def compare(executor: Clocked, name: str, batch_size: int, repeats: int) -> Comparison:
    description, workload = WORKLOADS[name]
    lengths = workload()
    limits = Limits(2048, batch_size, 100, max(512, batch_size), len(lengths), 1_000_000)
    num_blocks = blocks_needed(executor.block_size, batch_size)
    draw, ids = random.Random(1), count()

    def make(prompt: int, output: int) -> Request:
        return Request(next(ids), [draw.randrange(executor.vocab_size) for _ in range(prompt)], output)

    runs: dict[str, list[Run]] = {way: [] for way in WAYS}
    for repeat in range(repeats):
        for way in WAYS if repeat % 2 == 0 else reversed(WAYS):
            title = f"{name}, {way}, repeat {repeat + 1}"
            runs[way].append(serve(executor, lengths, limits, num_blocks, way, make, title))
    expected = sum(length.output for length in lengths)
    if any(run.tokens != expected for all_of_way in runs.values() for run in all_of_way):
        raise RuntimeError(f"{name}: a run did not draw the {expected} tokens asked for")
    ways = {way: _against(runs[way], runs["continuous"]) for way in WAYS}
    return Comparison(name, description, expected, ways)


def _against(runs: Sequence[Run], continuous: Sequence[Run]) -> Way:
    ratios = [c.tokens_per_second / r.tokens_per_second for r, c in zip(runs, continuous, strict=True)]
    return Way(
        tokens_per_second=statistics.median(run.tokens_per_second for run in runs),
        steps=runs[0].steps,
        ratio=statistics.median(ratios),
        ratios=ratios,
        processor_ratio=statistics.median(
            r.processor_seconds / c.processor_seconds for r, c in zip(runs, continuous, strict=True)
        ),
    )


def blocks_needed(block_size: int, batch_size: int) -> int:
    """Room for a full batch of the longest requests, so that memory plays no part."""
    lengths = [length for _, make in WORKLOADS.values() for length in make()]
    # A padded batch draws the longest output behind each prompt.
    longest = max(length.prompt for length in lengths) + max(length.output for length in lengths)
    return batch_size * -(-longest // block_size)


def _progress(name: str, run: Run) -> None:
    print(
        f"{name}: {run.tokens} tokens in {run.steps} steps, {run.seconds:.1f} s, {run.tokens_per_second:.1f} tokens/s",
        file=sys.stderr,
        flush=True,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    executor: Clocked
    if options.executor == "fake":
        executor = StepLaw()
    else:
        real = create_executor(options.executor, options.model)
        executor = Measured(real, blocks_needed(real.block_size, options.batch_size))
    results = [compare(executor, name, options.batch_size, options.repeats) for name in options.workloads]
    print(f"\nbatch limit {options.batch_size}, executor {options.executor}, median of {options.repeats}")
    print(f"{'workload':12} {'way':12} {'tokens/s':>9} {'steps':>6}  continuous against it (per processor second)")
    for result in results:
        for name, way in result.ways.items():
            ratio = "" if name == "continuous" else f"{way.ratio:.2f}x ({way.processor_ratio:.2f}x)"
            print(f"{result.workload:12} {name:12} {way.tokens_per_second:>9.1f} {way.steps:>6}  {ratio}")
        print(f"{'':12} {result.description}")
    if options.json is not None:
        body = {
            "executor": options.executor,
            "model": options.model,
            "batchSize": options.batch_size,
            "repeats": options.repeats,
            "workloads": [asdict(result) for result in results],
        }
        options.json.write_text(json.dumps(body, indent=2) + "\n")
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    workloads = "\n".join(f"  {name:12} {description}" for name, (description, _) in WORKLOADS.items())
    parser = argparse.ArgumentParser(
        prog="python -m e2e.bench.static_batching",
        description=f"{(__doc__ or '').strip()}\n\nworkloads:\n{workloads}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--executor",
        choices=(*NAMES, "fake"),
        default="reference",
        help="fake: a step law, seconds (default: reference)",
    )
    parser.add_argument("--model", default="bundled:smollm2-135m-instruct", help="default: %(default)s")
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="batch limit of both (default: 8)")
    parser.add_argument("--repeats", type=int, default=1, metavar="N", help="runs of each, alternating (default: 1)")
    parser.add_argument(
        "--workloads", nargs="+", choices=tuple(WORKLOADS), default=["long", "mix"], help="default: long mix"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    options = parser.parse_args(arguments)
    if options.batch_size < 1 or options.repeats < 1:
        parser.error("--batch-size and --repeats must be at least 1")
    return options


if __name__ == "__main__":
    sys.exit(main())
