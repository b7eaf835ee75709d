"""Any traffic, any limits, changed at any moment: nothing leaks, everything ends, the text never depends on others."""

import hypothesis.strategies as st
from hashing_executor import HashingExecutor, expected_text
from hypothesis import given, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from scheduler_checks import check_idle, check_scheduler, run_step, run_until_idle, texts

from busload_runtime.contract import Limits
from busload_runtime.engine.plan import SamplingParams, Shaping
from busload_runtime.engine.request import Output, Request
from busload_runtime.engine.scheduler import RequestRefused, Scheduler

BLOCK_SIZE = 4

# Few tokens and shared beginnings: equal prefixes, equal prompts and equal blocks at different places are common.
BEGINNINGS = [[1] * 12, [1] * 9 + [2] * 7, [1, 2, 3, 4] * 4, [2]]
prompts = st.builds(
    lambda beginning, length, rest: beginning[:length] + rest,
    st.sampled_from(BEGINNINGS),
    st.integers(0, 16),
    st.lists(st.integers(1, 2), min_size=1, max_size=12),
)
# The executor checks that it gets the tokens so far with penalties, and with nothing else.
shapings = st.sampled_from((None, Shaping(logit_bias=((1, 2.0),)), Shaping(presence_penalty=1.0)))
tenants = st.sampled_from("aab")
limits = st.builds(
    lambda length, batch, budget: Limits(length, batch, 90, max(budget, batch), 0, 0),
    st.integers(16, 64),
    st.integers(1, 6),
    st.integers(16, 40) | st.integers(1, 6),
)


class AnyTraffic(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(Limits(64, 4, 90, 16, 0, 0), BLOCK_SIZE, 24)
        self.executor = HashingExecutor(BLOCK_SIZE, 24)
        self.next_id = 0
        self.now = 0.0
        self.requests: dict[int, tuple[list[int], int, int]] = {}
        self.live: set[int] = set()
        self.received: dict[int, list[int]] = {}
        self.capacity: dict[int, int] = {}  # smallest pool each request has lived through, in tokens

    @rule(prompt=prompts, max_tokens=st.integers(1, 30), seed=st.integers(0, 3), shaping=shapings, tenant=tenants)
    def add(self, prompt: list[int], max_tokens: int, seed: int, shaping: Shaping | None, tenant: str) -> None:
        request_id = self.next_id
        self.next_id += 1
        sampling = SamplingParams(seed=seed, shaping=shaping)
        request = Request(request_id, list(prompt), max_tokens, sampling=sampling, arrived=self.now, tenant=tenant)
        limit, capacity = self.scheduler.limits.max_sequence_length, self.scheduler.capacity
        try:
            self.scheduler.add(request)
        except RequestRefused:
            assert len(prompt) >= limit or len(prompt) > capacity
            return
        assert len(prompt) < limit
        self.requests[request_id] = (prompt, min(max_tokens, limit - len(prompt)), seed)
        self.live.add(request_id)
        self.received[request_id] = []
        self.capacity[request_id] = capacity

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        assert self.scheduler.abort(request_id) == (request_id in self.live)
        self.live.discard(request_id)

    @rule(limits=limits)
    def change_limits(self, limits: Limits) -> None:
        self.scheduler.set_limits(limits)

    @rule(num_blocks=st.integers(1, 32))
    def resize(self, num_blocks: int) -> None:
        outputs = self.scheduler.resize(num_blocks)
        self.executor.resize(num_blocks)
        for request_id in self.live:
            self.capacity[request_id] = min(self.capacity[request_id], num_blocks * BLOCK_SIZE)
        for output in outputs:
            assert output.token is None
            assert output.finish_reason == ("length" if self.received[output.request_id] else "error")
            assert (output.error is not None) == (output.finish_reason == "error")
        self.take(outputs)

    @precondition(lambda self: self.live)
    @rule(steps=st.integers(1, 8))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            if self.live:
                self.now += 1.0
                self.take(run_step(self.scheduler, self.executor, self.now))
                check_scheduler(self.scheduler)

    def take(self, outputs: list[Output]) -> None:
        for output in outputs:
            request_id = output.request_id
            assert request_id in self.live, "output for a request that has ended or was aborted"
            prompt, count, seed = self.requests[request_id]
            received = self.received[request_id]
            if output.token is not None:
                received.append(output.token)
            if output.finish_reason is None:
                continue
            self.live.remove(request_id)
            assert received == expected_text(prompt, len(received), seed)
            if output.finish_reason == "length" and len(received) < count:
                assert len(prompt) + len(received) > self.capacity[request_id], "ended too early"
            elif output.finish_reason == "length":
                assert len(received) == count

    @invariant()
    def holds(self) -> None:
        check_scheduler(self.scheduler)
        assert self.scheduler.has_work == bool(self.live)

    def teardown(self) -> None:
        # Bounded by what is left to draw: the oldest request moves in every step.
        for _ in range(10_000):
            if not self.live:
                break
            self.take(run_step(self.scheduler, self.executor, self.now))
        assert not self.live, "requests never end"
        check_idle(self.scheduler)
        check_scheduler(self.scheduler)


TestAnyTraffic = AnyTraffic.TestCase
TestAnyTraffic.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@settings(max_examples=150, deadline=None)
@given(
    requests=st.lists(st.tuples(prompts, st.integers(1, 20), st.integers(0, 2)), min_size=1, max_size=8),
    limits=limits,
    num_blocks=st.integers(16, 40),
)
def test_text_does_not_depend_on_company_chunking_or_preemption(
    requests: list[tuple[list[int], int, int]], limits: Limits, num_blocks: int
) -> None:
    scheduler = Scheduler(limits, BLOCK_SIZE, num_blocks)
    executor = HashingExecutor(BLOCK_SIZE, num_blocks)
    expected = {}
    for request_id, (prompt, max_tokens, seed) in enumerate(requests):
        count = min(max_tokens, limits.max_sequence_length - len(prompt))
        if count > 0:
            scheduler.add(Request(request_id, list(prompt), max_tokens, sampling=SamplingParams(seed=seed)))
            expected[request_id] = expected_text(prompt, count, seed)
    assert texts(run_until_idle(scheduler, executor)) == expected
    check_idle(scheduler)


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 60)), min_size=8, max_size=8), data=st.data())
def test_a_pool_for_one_and_a_half_requests_serves_eight(lengths: list[tuple[int, int]], data: st.DataObject) -> None:
    """Unique prompts, so that no prefix hit hides the work: what is computed again stays below what is computed."""
    longest = max(prompt + output for prompt, output in lengths)
    blocks = -(-longest * 3 // (2 * BLOCK_SIZE))
    budget = data.draw(st.integers(16, 64))
    scheduler = Scheduler(Limits(longest + 1, 8, 90, budget, 0, 0), BLOCK_SIZE, blocks)
    executor = HashingExecutor(BLOCK_SIZE, blocks)
    for request_id, (prompt, output) in enumerate(lengths):
        scheduler.add(Request(request_id, [1000 * (request_id + 1) + i for i in range(prompt)], output))
    drawn = texts(run_until_idle(scheduler, executor, max_steps=20_000))
    assert {request_id: len(tokens) for request_id, tokens in drawn.items()} == {
        request_id: output for request_id, (_, output) in enumerate(lengths)
    }
    assert scheduler.counters.recomputed_tokens <= 2 * sum(prompt + output for prompt, output in lengths)
    assert scheduler.counters.prefix_hit_tokens == 0, "a request's own recomputed blocks count as prefix hits"
