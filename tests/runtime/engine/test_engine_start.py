"""The order of what happens when an engine starts, and what waits until it is needed."""

from functools import cached_property

import pytest
from hashing_executor import HashingExecutor

from busload_runtime.contract import Limits
from busload_runtime.engine import process
from busload_runtime.engine.loop import Engine
from busload_runtime.engine.memory import GRAMMAR_BYTES_PER_TOKEN
from busload_runtime.engine.messages import Ready, Submit
from busload_runtime.engine.plan import Plan, Sampled
from busload_runtime.engine.process import start
from busload_runtime.grammar.matcher import Vocabulary
from busload_runtime.grammar.text import choice_expression, grammar

LIMITS = Limits(256, 4, 100, 64, 8, 4096)
MEMORY = 1 << 32


class Watched(HashingExecutor):
    """Notes what it is asked for."""

    vocab_size = 257

    def __init__(self, events: list[str]) -> None:
        super().__init__(block_size=16, context_length=4096)
        self._events = events

    @cached_property
    def copy_bandwidth(self) -> float:  # type: ignore[override]
        self._events.append("bandwidth")
        return 1e9

    def run(self, plan: Plan) -> list[Sampled]:
        self._events.append("step")
        return list(super().run(plan))


def started(events: list[str], with_grammars: bool) -> tuple[Engine, Ready]:
    def load(name: str, source: str) -> Watched:
        events.append("load")
        return Watched(events)

    def load_vocabulary(source: str) -> Vocabulary:
        events.append("vocabulary")
        return Vocabulary([bytes([byte]) for byte in range(256)] + [b""], {256})

    return start(
        "m.gguf",
        "none",
        MEMORY,
        LIMITS,
        load,
        load_vocabulary=load_vocabulary if with_grammars else None,
        until_measurable=lambda: events.append("measurable"),
    )


def test_steps_and_bandwidth_are_measured_when_the_other_process_is_quiet() -> None:
    events: list[str] = []
    _, ready = started(events, with_grammars=True)
    assert events[:3] == ["load", "measurable", "step"]
    assert events[-1] == "bandwidth"
    assert set(events) == {"load", "measurable", "step", "bandwidth"}, "no vocabulary before a grammar needs it"
    assert ready.copy_bandwidth == 1e9


def test_the_vocabulary_is_read_once_for_the_first_grammar() -> None:
    events: list[str] = []
    engine, _ = started(events, with_grammars=True)
    for number, word in enumerate(("red", "green")):
        submit = Submit(number, [1, 2], 20, stop_token_ids=[256], grammar=grammar(choice_expression([word])))
        assert engine.submit(submit) == []
    waiting = 2
    while waiting:
        assert engine.compiled() == []
        if engine.has_work:
            waiting -= sum(out.finish_reason is not None for out in engine.step())
    assert events.count("vocabulary") == 1


def test_the_memory_plan_has_room_for_the_tables_of_the_first_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "measure_overhead", lambda before, weights: 1 << 26)
    without, with_room = (started([], grammars)[0].stats().kv_blocks for grammars in (False, True))
    blocks = GRAMMAR_BYTES_PER_TOKEN * Watched.vocab_size / Watched([]).bytes_per_block
    assert blocks - 1 < without - with_room < blocks + 1
