"""Constrained requests in the step loop: masks, ends, preemption, aborts, compiling beside the steps."""

import json
import random
import threading
import time

import pytest
from hashing_executor import HashingExecutor

from busload_runtime.contract import Limits
from busload_runtime.engine.grammar import GRAMMAR_ERROR, KEPT, Grammars
from busload_runtime.engine.loop import Engine
from busload_runtime.engine.memory import Budget, MemoryPlan
from busload_runtime.engine.messages import Submit, TokenOut
from busload_runtime.engine.plan import Plan, Sampled
from busload_runtime.grammar.errors import GrammarError
from busload_runtime.grammar.matcher import Matcher, Vocabulary
from busload_runtime.grammar.text import choice_expression, grammar, json_expression, regex_expression

EOS = 256
BYTES = Vocabulary([bytes([byte]) for byte in range(256)] + [b""], {EOS})
LIST = grammar(json_expression({"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 3, "maxItems": 6}))


class MaskedExecutor(HashingExecutor):
    """Draws any token, whatever its mask allows; of the others a byte that no JSON has."""

    vocab_size = 257

    def __init__(self) -> None:
        super().__init__(block_size=4, context_length=256)
        self.plans: list[Plan] = []

    def run(self, plan: Plan) -> list[Sampled]:
        self.plans.append(plan)
        drawn = []
        for chunk, sampled in zip([c for c in plan.chunks if c.sampling], super().run(plan), strict=True):
            mask = plan.masks.get(chunk.request_id)
            token = 1 if mask is None else random.Random(sampled.token).choice(allowed(mask))
            drawn.append(Sampled(chunk.request_id, token))
        return drawn


def allowed(mask: bytes) -> list[int]:
    bits = int.from_bytes(mask, "little")
    return [token for token in range(257) if bits >> token & 1]


def build(grammars: Grammars | None, blocks: int = 64, batch: int = 4) -> tuple[Engine, MaskedExecutor]:
    executor = MaskedExecutor()
    limits = Limits(128, batch, 100, 64, 0, 0)
    overhead, activations = 1 << 20, executor.activation_bytes(limits.token_budget, limits.batch_size)
    memory = MemoryPlan(
        budget=Budget(executor.weight_bytes + overhead + activations + blocks * executor.bytes_per_block, "test"),
        weights=executor.weight_bytes,
        overhead=overhead,
        block_size=4,
        bytes_per_block=executor.bytes_per_block,
        context_length=executor.context_length,
        activations=executor.activation_bytes,
    )
    return Engine(executor, memory, limits, grammars=grammars), executor


def submit(request_id: int, text: str, **fields: int) -> Submit:
    return Submit(request_id, [request_id, 2, 3], **{"max_tokens": 100, **fields}, stop_token_ids=[EOS], grammar=text)


def run_all(engine: Engine, requests: int) -> list[TokenOut]:
    """Steps until so many requests have ended."""
    outputs: list[TokenOut] = []
    deadline = time.monotonic() + 60
    while sum(out.finish_reason is not None for out in outputs) < requests:
        assert time.monotonic() < deadline
        outputs += engine.compiled()
        if engine.has_work:
            outputs += engine.step()
        else:
            time.sleep(0.001)
    return outputs


def text_of(outputs: list[TokenOut], request_id: int) -> str:
    mine = [out for out in outputs if out.request_id == request_id and out.token is not None]
    return bytes(out.token for out in mine if out.token != EOS and out.token is not None).decode()


def ends(outputs: list[TokenOut]) -> dict[int, str]:
    return {out.request_id: out.finish_reason for out in outputs if out.finish_reason is not None}


def test_texts_are_whole_and_end_by_themselves_beside_free_requests() -> None:
    """The free one is served while the grammar is compiled, beside constrained ones, and behind them: however long the
    compiler takes."""
    may_compile = threading.Event()

    def compile_then(text: str) -> Matcher:
        assert may_compile.wait(60)
        return BYTES.compile(text)

    grammars = Grammars(compile_then)
    engine, executor = build(grammars)
    for request_id in range(1, 9):
        assert engine.submit(submit(request_id, LIST)) == []
    engine.submit(Submit(9, [1, 2], 100, stop_token_ids=[EOS]))
    outputs = [out for _ in range(5) for out in engine.step()]
    may_compile.set()
    while grammars.num_waiting:
        outputs += engine.compiled()
        time.sleep(0.001)
    outputs += run_all(engine, 9)
    for request_id in range(1, 9):
        assert 3 <= len(json.loads(text_of(outputs, request_id))) <= 6
    assert text_of(outputs, 9) == "\x01" * 100
    assert ends(outputs) == {**dict.fromkeys(range(1, 9), "stop"), 9: "length"}
    assert not engine.has_work
    assert engine.stats().kv_blocks_free == engine.stats().kv_blocks
    assert {len(plan.masks) for plan in executor.plans} > {0, 3}


def test_a_plan_without_constrained_requests_is_the_schedulers_own() -> None:
    engine, executor = build(Grammars(BYTES.compile))
    engine.submit(submit(1, LIST))
    run_all(engine, 1)
    executor.plans.clear()
    engine.submit(Submit(2, [1, 2], 5))
    run_all(engine, 1)
    assert all(plan.masks == {} for plan in executor.plans)


def test_a_preempted_request_goes_on_where_it_was() -> None:
    engine, _ = build(Grammars(BYTES.compile), blocks=33, batch=8)
    for request_id in range(1, 9):
        engine.submit(submit(request_id, LIST))
    outputs = run_all(engine, 8)
    assert engine.stats().preemptions > 0
    for request_id in range(1, 9):
        assert 3 <= len(json.loads(text_of(outputs, request_id))) <= 6


def test_an_answer_that_is_whole_with_its_last_token_is_not_cut() -> None:
    engine, _ = build(Grammars(BYTES.compile))
    engine.submit(submit(1, grammar(choice_expression(["abc"])), max_tokens=3))
    engine.submit(submit(2, grammar(choice_expression(["abc"])), max_tokens=2))
    outputs = run_all(engine, 2)
    assert (text_of(outputs, 1), text_of(outputs, 2)) == ("abc", "ab")
    assert ends(outputs) == {1: "stop", 2: "length"}


def test_the_end_of_text_ends_an_answer_that_could_go_on_even_if_the_request_would_not() -> None:
    engine, _ = build(Grammars(BYTES.compile))
    text = grammar(regex_expression("(ab)*"))
    engine.submit(Submit(1, [1, 2], 100, stop_token_ids=[], grammar=text))
    engine.submit(Submit(2, [1, 2, 3], 100, min_tokens=90, stop_token_ids=[EOS], grammar=text))
    outputs = run_all(engine, 2)
    assert ends(outputs) == {1: "stop", 2: "stop"}
    assert all(text_of(outputs, n) == "ab" * (len(text_of(outputs, n)) // 2) for n in (1, 2))


def test_wrong_grammars_are_refused_and_one_that_grows_too_big_ends_with_an_error() -> None:
    def compile_grammar(text: str) -> Matcher:
        if text == "panics":
            raise BaseException("as the library's panics are")
        matcher = BYTES.compile(text.removeprefix("fails"))
        if text.startswith("fails"):
            matcher.fork = lambda: Failing()  # type: ignore[method-assign]
        return matcher

    class Failing(Matcher):
        def __init__(self) -> None:
            super().__init__(BYTES.compile(LIST)._matcher, 257)
            self.left = 3

        def mask(self) -> bytes:
            self.left -= 1
            if not self.left:
                raise GrammarError("too many items")
            return super().mask()

    engine, _ = build(Grammars(compile_grammar))
    engine.submit(submit(1, "start: ("))
    engine.submit(submit(2, "fails" + LIST))
    engine.submit(submit(3, "panics"))
    outputs = run_all(engine, 3)
    errors = {out.request_id: out for out in outputs if out.finish_reason}
    assert {out.error_code for out in errors.values()} == {GRAMMAR_ERROR}
    assert "too many items" in str(errors[2].error)
    assert not engine.has_work
    engine, _ = build(None)
    (refused,) = engine.submit(submit(1, LIST))
    assert (refused.finish_reason, refused.error_code) == ("error", GRAMMAR_ERROR)


def test_the_loop_goes_on_while_a_grammar_is_compiled_and_is_woken_when_it_is() -> None:
    compiling, woken = threading.Event(), threading.Event()

    def slowly(text: str) -> Matcher:
        assert compiling.wait(60)
        return BYTES.compile(text)

    engine, _ = build(Grammars(slowly, woken.set))
    engine.submit(submit(1, LIST))
    engine.submit(submit(2, LIST))
    engine.submit(Submit(3, [1, 2], 20))
    assert ends(run_all(engine, 1)) == {3: "length"}
    assert not engine.has_work
    engine.abort(2)
    assert not woken.is_set()
    compiling.set()
    assert woken.wait(60)
    assert ends(run_all(engine, 1)) == {1: "stop"}
    assert engine.compiled() == []
    assert not engine.has_work


def test_an_abort_forgets_the_state_and_an_unknown_one_is_ignored() -> None:
    grammars = Grammars(BYTES.compile)
    engine, _ = build(grammars)
    engine.submit(submit(1, LIST))
    while not engine.has_work:
        engine.compiled()
    engine.step()
    engine.abort(1)
    engine.abort(77)
    assert not engine.has_work
    assert grammars.num_states == 0
    engine.submit(submit(2, LIST))
    assert ends(run_all(engine, 1)) == {2: "stop"}
    assert grammars.num_states == 0


def test_a_grammar_is_compiled_once_and_few_are_kept() -> None:
    seen: list[str] = []

    def counted(text: str) -> Matcher:
        seen.append(text)
        return BYTES.compile(text)

    engine, _ = build(Grammars(counted))
    for request_id in (1, 2):
        engine.submit(submit(request_id, LIST))
        run_all(engine, 1)
    assert len(seen) == 1
    for other in range(KEPT):
        engine.submit(submit(10 + other, grammar(choice_expression([f"text {other}"]))))
        run_all(engine, 1)
    engine.submit(submit(3, LIST))
    run_all(engine, 1)
    assert seen.count(LIST) == 2


@pytest.mark.parametrize("blocks", [40, 200])
def test_aborts_at_any_time_leave_nothing_behind(blocks: int) -> None:
    grammars = Grammars(BYTES.compile)
    engine, _ = build(grammars, blocks=blocks)
    chance = random.Random(blocks)
    live: set[int] = set()
    for request_id in range(1, 300):
        if chance.random() < 0.4:
            engine.submit(submit(request_id, LIST if chance.random() < 0.8 else ""))
            live.add(request_id)
        if live and chance.random() < 0.2:
            engine.abort(chance.choice(sorted(live)))
        outputs = engine.compiled()
        if engine.has_work:
            outputs += engine.step()
        live -= ends(outputs).keys()
    for request_id in live:
        engine.abort(request_id)
    while grammars.num_waiting:
        engine.compiled()
    assert not engine.has_work
    assert grammars.num_states == 0
    assert engine.stats().kv_blocks_free == engine.stats().kv_blocks
