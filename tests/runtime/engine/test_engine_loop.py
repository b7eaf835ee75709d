"""The step loop on a clock the test moves: integrals, counters, limits."""

import pytest
from hashing_executor import HashingExecutor, expected_text, logprobs_of

from busload_runtime.contract import Limits
from busload_runtime.engine.loop import Engine
from busload_runtime.engine.memory import Budget, LimitsImpossible, MemoryPlan
from busload_runtime.engine.messages import Submit, TokenOut
from busload_runtime.engine.plan import Plan, Sampled, SamplingParams, Shaping

LIMITS = Limits(64, 2, 100, 16, 0, 0)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class TimedExecutor(HashingExecutor):
    """Each step takes two seconds."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(block_size=4, context_length=128)
        self._clock = clock

    def run(self, plan: Plan) -> list[Sampled]:
        self._clock.now += 2.0
        return list(super().run(plan))


def build(clock: Clock, blocks: int = 32) -> tuple[Engine, TimedExecutor]:
    executor = TimedExecutor(clock)
    overhead = 1 << 20
    activations = executor.activation_bytes(LIMITS.token_budget, LIMITS.batch_size)
    budget = executor.weight_bytes + overhead + activations + blocks * executor.bytes_per_block
    plan = MemoryPlan(
        budget=Budget(budget, "test"),
        weights=executor.weight_bytes,
        overhead=overhead,
        block_size=4,
        bytes_per_block=executor.bytes_per_block,
        context_length=executor.context_length,
        activations=executor.activation_bytes,
    )
    return Engine(executor, plan, LIMITS, clock), executor


def run_all(engine: Engine) -> list[TokenOut]:
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    return outputs


def test_a_request_carries_only_what_it_asks_for() -> None:
    engine, executor = build(Clock())
    asked = {
        1: Submit(1, [1, 2, 3], 2),
        2: Submit(2, [1, 2, 3], 2, min_p=0.1, temperature=0.5, top_k=3, top_p=0.9, seed=4),
        3: Submit(3, [1, 2, 3], 2, logit_bias={5: 1.5, 2: -1.0}, frequency_penalty=0.5),
    }
    plans: list[Plan] = []
    executor.run = lambda plan, run=executor.run: plans.append(plan) or run(plan)  # type: ignore[method-assign]
    for message in asked.values():
        assert engine.submit(message) == []
    run_all(engine)
    seen = {chunk.request_id: chunk.sampling for plan in plans for chunk in plan.chunks}
    assert seen == {
        1: SamplingParams(),
        2: SamplingParams(0.5, 0.9, 3, 4, 0.1),
        3: SamplingParams(shaping=Shaping(logit_bias=((5, 1.5), (2, -1.0)), frequency_penalty=0.5)),
    }
    for ids in ({-1: 1.0}, {executor.vocab_size: 1.0}):
        (refused,) = engine.submit(Submit(4, [1], 2, logit_bias=ids))
        assert refused.error == f"logit_bias ids must be from 0 to {executor.vocab_size - 1}"


def test_logprobs_go_with_their_tokens_also_over_a_preemption() -> None:
    """Three requests in a pool for less than two; only some ask, each for its own number."""
    engine, _ = build(Clock(), blocks=16)
    for request, asked in ((1, 2), (2, None), (3, 0)):
        assert engine.submit(Submit(request, [request] * 6, 40, seed=request, logprobs=asked)) == []
    outputs = run_all(engine)
    assert engine.stats().preemptions > 0
    for request, asked in ((1, 2), (2, None), (3, 0)):
        own = [output for output in outputs if output.request_id == request]
        tokens = [output.token for output in own if output.token is not None]
        assert tokens == expected_text([request] * 6, 40, request)
        assert [output.logprobs for output in own] == [logprobs_of(token, asked) for token in tokens]


def test_integrals_are_levels_times_the_time_they_held() -> None:
    clock = Clock()
    engine, executor = build(clock)
    for request in (1, 2, 3):
        assert engine.submit(Submit(request, [request] * 3, 2)) == []
    clock.now += 1.0  # three wait for one second
    engine.step()  # for two seconds: two run with nothing computed yet, one waits
    clock.now += 0.5  # two run and hold three tokens each
    engine.step()
    run_all(engine)
    clock.now += 10.0  # nothing
    stats = engine.stats()
    assert stats.clock == clock.now
    assert stats.steps == executor.steps == 4
    assert stats.busy_seconds == pytest.approx(8.0)
    assert stats.batch_seconds == pytest.approx(2 * 2 + 2 * 0.5 + 2 * 2 + 1 * 2 + 1 * 2)
    assert stats.queue_seconds == pytest.approx(3 * 1 + 1 * 2 + 1 * 0.5 + 1 * 2)
    assert stats.kv_token_seconds == pytest.approx(6 * 0.5 + 6 * 2 + 0 * 2 + 3 * 2)
    assert (stats.step_batch, stats.step_prefill_tokens, stats.generated_tokens) == (3, 9, 6)
    assert stats.step_kv_tokens == 3 * 3 + 3 * 4
    # Each step reads all weights; keys and values of 21 tokens are read and of 12 written, 1024 bytes each.
    assert stats.bytes_moved == 4 * executor.weight_bytes + (21 + 12) * 1024
    assert (stats.running, stats.waiting, stats.kv_blocks, stats.kv_blocks_free) == (0, 0, 32, 32)


def test_time_in_the_socket_counts_as_waiting() -> None:
    clock = Clock()
    engine, _ = build(clock)
    engine.submit(Submit(1, [1], 1, submitted_at=clock.now - 3.0))
    engine.submit(Submit(2, [1], 1, submitted_at=clock.now + 3.0))  # a clock that is ahead is not believed
    clock.now += 1.0
    outputs = engine.step()
    assert [output.queue_seconds for output in outputs] == [4.0, 1.0]
    assert engine.stats().queue_seconds == pytest.approx(3.0 + 2 * 1.0)


def test_limits_resize_the_pool_of_scheduler_and_executor() -> None:
    clock = Clock()
    engine, executor = build(clock)
    for request in (1, 2):
        engine.submit(Submit(request, [request] * 30, 20, seed=request))
    outputs = engine.step() + engine.step()
    assert engine.apply(Limits(64, 2, 50, 16, 0, 0)) == []
    assert engine.stats().kv_blocks == executor.num_blocks == 16
    outputs += run_all(engine)
    assert engine.apply(LIMITS) == []
    assert engine.stats().kv_blocks == executor.num_blocks == 32
    for request in (1, 2):
        text = [output.token for output in outputs if output.request_id == request]
        assert text == expected_text([request] * 30, 20, request)
    assert engine.stats().kv_blocks_free == 32


def test_a_token_budget_that_needs_memory_takes_it_from_the_pool() -> None:
    engine, executor = build(Clock())
    engine.apply(Limits(64, 2, 100, 16 + 8, 0, 0))  # 8 tokens of activations are as large as 2 blocks
    assert engine.stats().kv_blocks == executor.num_blocks == 30


def test_impossible_limits_change_nothing() -> None:
    engine, executor = build(Clock())
    with pytest.raises(LimitsImpossible, match="lower maxSequenceLength to at most 60"):
        engine.apply(Limits(64, 2, 47, 16, 0, 0))
    assert engine.stats().kv_blocks == executor.num_blocks == 32
    engine.submit(Submit(1, [1], 3))
    assert len(run_all(engine)) == 3


def test_warm_up_leaves_no_trace() -> None:
    engine, executor = build(Clock())
    engine.warm_up()
    assert executor.steps == 1
    stats = engine.stats()
    assert (stats.steps, stats.generated_tokens, stats.bytes_moved, stats.kv_blocks_free) == (0, 0, 0, 32)
    engine.submit(Submit(1, [0, 5, 6, 7, 8], 3))
    assert [output.token for output in run_all(engine)] == expected_text([0, 5, 6, 7, 8], 3, 0)
