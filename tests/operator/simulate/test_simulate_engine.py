"""A simulated pod against the runtime's real step loop: `Engine` with its statistics, on a clock that the law moves.

The loop is driven as the engine process drives it: what has arrived, then one step. Every token's time and every number
a pod would report must come out the same.
"""

from collections.abc import Sequence
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from simulate_helpers import hardware

from busload_operator.simulate.replica import Job, Replica
from busload_operator.simulate.workload import Arrival
from busload_runtime.contract import Limits, Pace, StepLaw
from busload_runtime.engine.loop import Engine
from busload_runtime.engine.memory import Budget, MemoryPlan
from busload_runtime.engine.messages import Stats, Submit
from busload_runtime.engine.plan import Plan, Sampled

LAW = StepLaw(a=0.01, b=0.001, c=1e-5, d=2e-4)
BLOCK = 32
# What the engine reports -> what a scrape of the simulated pod shows.
SAME = {
    "clock": "clock",
    "steps": "steps",
    "busy_seconds": "busy_seconds",
    "step_batch": "step_batch",
    "step_kv_tokens": "step_kv_tokens",
    "step_prefill_tokens": "prefill_tokens",
    "generated_tokens": "generated_tokens",
    "preemptions": "preemptions",
    "batch_seconds": "batch_seconds",
    "queue_seconds": "queue_seconds",
    "kv_token_seconds": "kv_token_seconds",
    "running": "running",
    "waiting": "waiting",
    "kv_blocks": "kv_blocks",
    "kv_blocks_free": "kv_blocks_free",
}


class LawExecutor:
    """Takes the law's time for a step, on its own clock."""

    block_size = BLOCK
    bytes_per_block = 1
    weight_bytes = 0
    vocab_size = 1 << 20
    context_length = 1 << 20
    copy_bandwidth = 1.0

    def __init__(self) -> None:
        self.now = 0.0
        self.prompts: dict[int, int] = {}

    def clock(self) -> float:
        return self.now

    def activation_bytes(self, token_budget: int, batch_size: int) -> int:
        return 0

    def reserve(self, max_blocks: int) -> None: ...
    def resize(self, num_blocks: int) -> None: ...

    def run(self, plan: Plan) -> Sequence[Sampled]:
        decodes = [c for c in plan.chunks if len(c.tokens) == 1 and c.start >= self.prompts[c.request_id]]
        prefill = plan.num_tokens - len(decodes)
        self.now += LAW.seconds(len(decodes), sum(c.length_after for c in plan.chunks), prefill)
        return [Sampled(c.request_id, 1) for c in plan.chunks if c.sampling is not None]


def engine_run(
    load: list[Arrival], limits: Limits, blocks: int, changes: dict[int, Limits], pace: Pace
) -> tuple[list[list[float]], Stats]:
    """Times of each request's tokens, and what the engine reports in the end."""
    executor = LawExecutor()
    memory = MemoryPlan(Budget(blocks, "test"), 0, 0, BLOCK, 1, 1 << 20, executor.activation_bytes)
    engine = Engine(executor, memory, limits, executor.clock, pace)
    tokens: list[list[float]] = [[] for _ in load]
    waiting = list(enumerate(load))
    while waiting or engine.has_work:
        if not engine.has_work:
            executor.now = max(executor.now, waiting[0][1].at)
        while waiting and waiting[0][1].at <= executor.now:
            index, arrival = waiting.pop(0)
            executor.prompts[index] = arrival.prompt
            if index in changes:
                assert engine.apply(changes[index], pace) == []
            # Unlike any other prompt from its first token on.
            message = Submit(index, [100 + index] * arrival.prompt, arrival.output, submitted_at=arrival.at)
            assert engine.submit(message) == []
        if engine.has_work:
            for output in engine.step():
                if output.token is not None:
                    tokens[output.request_id].append(executor.now)
    return tokens, engine.stats()


@settings(max_examples=150, deadline=None)
@given(
    load=st.lists(st.tuples(st.floats(0.001, 0.5), st.integers(1, 150), st.integers(1, 60)), min_size=1, max_size=12),
    blocks=st.integers(10, 40),
    batch=st.integers(1, 6),
    budget=st.integers(16, 200),
    changes=st.dictionaries(st.integers(1, 11), st.tuples(st.integers(1, 6), st.integers(16, 200)), max_size=2),
    pace=st.builds(
        Pace,
        st.none() | st.floats(0.05, 5.0),
        st.none() | st.floats(0.005, 0.1),
        st.just(LAW),
    ),
)
def test_a_simulated_pod_is_the_engine(
    load: list[tuple[float, int, int]],
    blocks: int,
    batch: int,
    budget: int,
    changes: dict[int, tuple[int, int]],
    pace: Pace,
) -> None:
    limits = Limits(256, batch, 100, budget, 1000, 1_000_000)
    arrivals, now = [], 0.001
    for gap, prompt, output in load:
        arrivals.append(Arrival(now, prompt, output))
        now += gap
    changed = {index: replace(limits, batch_size=b, token_budget=t) for index, (b, t) in changes.items()}
    tokens, stats = engine_run(arrivals, limits, blocks, changed, pace)

    replica = Replica("pod-1", hardware(LAW, kv_tokens=blocks * BLOCK), limits, 1, 0.0, 0.0, 1, pace)
    jobs = []
    for index, arrival in enumerate(arrivals):
        if index in changed:
            replica.apply(changed[index], index, arrival.at)
        jobs.append(Job(index, arrival))
        replica.submit(jobs[-1], arrival.at)
    replica.advance(1e6)
    assert [(job.first, job.last, job.output) for job in jobs] == [
        (pytest.approx(times[0]), pytest.approx(times[-1]), len(times)) for times in tokens
    ]
    assert jobs[0].failed == ""
    counters = replica.counters(stats.clock)
    for reported, shown in SAME.items():
        assert getattr(counters, shown) == pytest.approx(getattr(stats, reported)), reported
