"""Steps that overlap: what they cost, how they are timed, and when the engine waits for one before the next plan."""

import json
import random
import time
from collections.abc import Sequence

import pytest
from hashing_executor import HashingExecutor, expected_text
from late_executor import LateExecutor
from scheduler_checks import check_idle, check_scheduler

from busload_runtime.contract import Limits
from busload_runtime.engine.grammar import Grammars
from busload_runtime.engine.loop import Engine
from busload_runtime.engine.memory import Budget, MemoryPlan
from busload_runtime.engine.messages import Submit, TokenOut
from busload_runtime.engine.plan import Plan, Sampled
from busload_runtime.engine.request import Request
from busload_runtime.engine.scheduler import Scheduler
from busload_runtime.grammar.matcher import Vocabulary
from busload_runtime.grammar.text import grammar, json_expression

LIMITS = Limits(64, 4, 100, 16, 0, 0)


class Device(LateExecutor):
    """Works on a step for two seconds, beside the host, and on one at a time. Moves the clock to where the host has
    waited for it."""

    def __init__(self) -> None:
        super().__init__(block_size=4, context_length=128)
        self.now = 100.0
        self._free = 0.0
        self._ends: list[float] = []

    def clock(self) -> float:
        return self.now

    def launch(self, plan: Plan):  # type: ignore[no-untyped-def]
        self._free = max(self._free, self.now) + 2.0
        self._ends.append(self._free)
        return super().launch(plan)

    def compute(self, plan: Plan) -> Sequence[Sampled]:
        self.now = max(self.now, self._ends.pop(0))
        return super().compute(plan)


class Masked(LateExecutor):
    """Draws one of the allowed tokens, where there is a mask."""

    vocab_size = 257

    def compute(self, plan: Plan) -> Sequence[Sampled]:
        sampled = super().compute(plan)
        for one in sampled:
            mask = plan.masks.get(one.request_id)
            bits = int.from_bytes(mask, "little") if mask else 2
            may = [token for token in range(self.vocab_size) if bits >> token & 1]
            one.token = self._drawn[one.request_id] = random.Random(one.token).choice(may)
        return sampled


def build(executor: HashingExecutor, blocks: int = 32, grammars: Grammars | None = None) -> Engine:
    overhead, activations = 1 << 20, executor.activation_bytes(LIMITS.token_budget, LIMITS.batch_size)
    memory = MemoryPlan(
        budget=Budget(executor.weight_bytes + overhead + activations + blocks * executor.bytes_per_block, "test"),
        weights=executor.weight_bytes,
        overhead=overhead,
        block_size=4,
        bytes_per_block=executor.bytes_per_block,
        context_length=executor.context_length,
        activations=executor.activation_bytes,
    )
    clock = executor.clock if isinstance(executor, Device) else lambda: 0.0
    return Engine(executor, memory, LIMITS, clock, grammars=grammars)


def run_all(engine: Engine) -> list[TokenOut]:
    outputs = []
    while engine.has_work:
        outputs += engine.step()
        check_scheduler(engine._scheduler)
    return outputs


def tokens(outputs: list[TokenOut], request_id: int) -> list[int | None]:
    return [output.token for output in outputs if output.request_id == request_id]


def test_tokens_come_one_step_late_and_cost_nothing_more() -> None:
    """Ends by length are known ahead: exactly the same is computed, in as many steps."""
    late, plain = LateExecutor(4, context_length=128), HashingExecutor(4, context_length=128)
    engines = build(plain), build(late)
    for engine in engines:
        for request_id, count in ((1, 1), (2, 5), (3, 9)):
            assert engine.submit(Submit(request_id, [request_id] * 5, count)) == []
    assert len(engines[0].step()) == 3
    assert engines[1].step() == []
    outputs = run_all(engines[1])
    run_all(engines[0])
    for request_id, count in ((1, 1), (2, 5), (3, 9)):
        assert tokens(outputs, request_id) == expected_text([request_id] * 5, count, 0)
    first, second = (engine.stats() for engine in engines)
    assert (first.steps, plain.steps) == (second.steps, late.steps) == (9, 9)
    assert late.behind == 8
    for name in ("step_batch", "step_kv_tokens", "step_prefill_tokens", "generated_tokens", "bytes_moved"):
        assert getattr(first, name) == getattr(second, name), name
    check_idle(engines[1]._scheduler)


def test_a_stop_costs_one_row_that_nobody_sees() -> None:
    engine = build(LateExecutor(4, context_length=128))
    text = expected_text([7] * 5, 6, 0)
    engine.submit(Submit(1, [7] * 5, 30, stop_token_ids=[text[3]]))
    outputs = run_all(engine)
    assert tokens(outputs, 1) == text[:4]
    assert outputs[-1].finish_reason == "stop"
    stats = engine.stats()
    assert (stats.steps, stats.step_batch, stats.generated_tokens) == (5, 4, 4)
    assert stats.kv_blocks_free == stats.kv_blocks


def test_a_step_takes_what_passes_between_two_results() -> None:
    """Two seconds each while the host is faster than the device, and the host's time where it is slower."""
    device = Device()
    engine = build(device)
    engine.submit(Submit(1, [1, 2, 3], 5))
    assert engine.step() == []  # launched at 100
    device.now += 0.5
    assert len(engine.step()) == 1  # the second behind it; result at 102
    assert device.now == 102.0
    device.now += 1.0
    engine.step()  # result at 104
    assert engine.stats().busy_seconds == 4.0
    device.now += 5.0  # the device waits for the host from 106 on
    engine.step()  # the result of 106, read at 109
    assert engine.stats().busy_seconds == 9.0
    run_all(engine)
    assert device.now == 113.0
    stats = engine.stats()
    assert (stats.steps, stats.busy_seconds) == (5, 13.0)
    device.now += 50.0  # idle
    engine.submit(Submit(2, [1, 2, 3], 1))
    run_all(engine)
    assert engine.stats().busy_seconds == 15.0


def test_steps_are_tried_as_they_are_run() -> None:
    """One behind the other, so that the law before the first request is that of steps which overlap."""
    device = Device()
    engine = build(device)
    assert engine.probe() is not None
    assert device.steps == 3 * 4, "as many as a law needs, each between two others"
    assert device.behind == 2 * 4
    assert device.now == 100.0 + 2.0 * device.steps
    assert not engine.has_work


def test_an_aborted_request_keeps_its_blocks_from_others_until_the_step_has_ended() -> None:
    engine = build(LateExecutor(4, context_length=128), blocks=16)
    engine.submit(Submit(1, [1] * 15, 20))
    engine.step()
    engine.step()
    used = 16 - engine.stats().kv_blocks_free
    engine.abort(1)
    assert (engine.stats().running, 16 - engine.stats().kv_blocks_free) == (0, used)
    assert engine.has_work, "a step is in flight"
    # Somebody else comes under the same id; the row in flight is not his.
    engine.submit(Submit(1, [2] * 6, 4, seed=5))
    assert tokens(run_all(engine), 1) == expected_text([2] * 6, 4, 5)
    check_idle(engine._scheduler)


def test_what_is_in_flight_is_charged_to_who_aborts() -> None:
    scheduler = Scheduler(LIMITS, 4, 32)
    request = Request(1, [1] * 40, 5, tenant="a")
    scheduler.add(request)
    scheduler.add(Request(2, [2] * 5, 5, tenant="b"))
    plan = scheduler.plan(0.0)
    assert plan.num_tokens == 16
    scheduler.abort(1)
    assert request.account.tokens == 16


def test_a_smaller_pool_waits_for_the_step_in_flight() -> None:
    executor = LateExecutor(4, context_length=128)
    engine = build(executor)
    for request_id in (1, 2):
        engine.submit(Submit(request_id, [request_id] * 8, 20, seed=request_id))
    outputs = engine.step() + engine.step()
    assert len(executor.in_flight) == 1
    told = engine.apply(Limits(64, 4, 50, 16, 0, 0))
    assert [output.request_id for output in told] == [1, 2]
    assert not executor.in_flight
    assert engine.stats().kv_blocks == executor.num_blocks == 16
    outputs += told + run_all(engine)
    for request_id in (1, 2):
        assert tokens(outputs, request_id) == expected_text([request_id] * 8, 20, request_id)


def test_limits_that_leave_the_pool_alone_wait_for_nothing() -> None:
    executor = LateExecutor(4, context_length=128)
    engine = build(executor)
    engine.submit(Submit(1, [1] * 8, 20))
    engine.step()
    assert engine.apply(Limits(64, 4, 100, 16, 7, 7)) == []
    assert len(executor.in_flight) == 1


@pytest.mark.parametrize(
    "wish", [{"presence_penalty": 1.0}, {"logprobs": 1, "score_prompt": True}], ids=["penalty", "score"]
)
def test_the_host_is_waited_for_where_the_next_step_needs_it(wish: dict[str, object]) -> None:
    """`LateExecutor` fails where it is not. Beside such a request nobody overlaps; afterwards all do again."""
    executor = LateExecutor(4, context_length=128)
    engine = build(executor)
    engine.submit(Submit(1, [1] * 8, 12))
    engine.submit(Submit(2, [2] * 8, 4, **wish))  # type: ignore[arg-type]
    outputs = run_all(engine)
    assert tokens(outputs, 1) == expected_text([1] * 8, 12, 0)
    assert tokens(outputs, 2) == expected_text([2] * 8, 4, 0)
    # Of 11 launches behind the first, those behind a step that draws with a penalty, or that scores, are alone.
    assert executor.behind == (7 if "presence_penalty" in wish else 10)


def test_a_grammar_is_followed_before_the_next_step_is_planned() -> None:
    vocabulary = Vocabulary([bytes([byte]) for byte in range(256)] + [b""], {256})
    grammars = Grammars(vocabulary.compile)
    executor = Masked(4, context_length=128)
    engine = build(executor, grammars=grammars)
    text = grammar(json_expression({"enum": ["red", "green", "blue"]}))
    for request_id in (1, 2, 3):
        engine.submit(Submit(request_id, [request_id] * 3, 40, stop_token_ids=[256], grammar=text))
    engine.submit(Submit(4, [4] * 3, 30))
    outputs: list[TokenOut] = []
    ends = 0
    while ends < 4:
        outputs += engine.compiled()
        if engine.has_work:
            outputs += engine.step()
        else:
            time.sleep(0.001)  # a grammar is being compiled
        ends = sum(output.finish_reason is not None for output in outputs)
    outputs += run_all(engine)
    for request_id in (1, 2, 3):
        drawn = [token for token in tokens(outputs, request_id) if token not in (None, 256)]
        assert json.loads(bytes(token for token in drawn if token is not None)) in ("red", "green", "blue")
    assert tokens(outputs, 4) == [1] * 30
    assert 0 < executor.behind < 30
    check_idle(engine._scheduler)


def test_a_third_step_is_not_planned() -> None:
    scheduler = Scheduler(LIMITS, 4, 32)
    scheduler.add(Request(1, [1] * 5, 9))
    scheduler.plan(0.0)
    scheduler.plan(0.0)
    with pytest.raises(RuntimeError, match="two steps are planned and not committed yet"):
        scheduler.plan(0.0)
