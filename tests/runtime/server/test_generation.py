"""A generation on an engine that the test plays."""

import time
from collections.abc import Callable

import pytest
from prometheus_client.parser import text_string_to_metric_families

from busload_runtime.contract import OBJECTIVES, Limits, Pace
from busload_runtime.engine.messages import Submit, TokenOut
from busload_runtime.server import generation as generation_module
from busload_runtime.server.admission import Admission
from busload_runtime.server.deadline import Deadline, Timeouts
from busload_runtime.server.errors import ApiError
from busload_runtime.server.generation import PIECES_AT_ONCE, Generation, Piece
from busload_runtime.server.metrics import Metrics
from busload_runtime.server.text import TextStream
from busload_runtime.server.trace import Trace


class PlayedEngine:
    alive = True

    def __init__(self) -> None:
        self.deliver: dict[int, Callable[[TokenOut], None]] = {}
        self.aborted: list[int] = []

    def submit(self, submit: Submit, deliver: Callable[[TokenOut], None]) -> None:
        self.deliver[submit.request_id] = deliver

    def abort(self, request_id: int) -> None:
        self.aborted.append(request_id)

    def draw(self, request_id: int, token: int | None, *end: str | None, error: str | None = None) -> None:
        self.deliver[request_id](TokenOut(request_id, token, *end, error=error))


def begin(choices: int) -> tuple[PlayedEngine, Generation]:
    engine, admission = PlayedEngine(), Admission(Limits(2048, 4, 90, 512, 2, 100))
    admission.take(choices)
    generation = Generation(engine, admission, Metrics("m"), Trace("id", 0.0), Deadline(Timeouts(), time.monotonic()))  # type: ignore[arg-type]
    generation.submit(
        [Submit(n, [1], 9) for n in range(choices)], lambda: TextStream(lambda token: bytes([token]), ("END",))
    )
    return engine, generation


async def test_pieces_that_wait_come_together_and_each_is_one_token() -> None:
    engine, generation = begin(2)
    pieces = generation.pieces()
    engine.draw(0, ord("a"))
    assert await anext(pieces) == [Piece(0, "a")]
    engine.draw(1, ord("b"))
    engine.draw(0, ord("c"))
    engine.draw(1, ord("d"), "length")
    assert await anext(pieces) == [Piece(1, "b"), Piece(0, "c"), Piece(1, "d", "length")]
    engine.draw(0, ord("e"), "length")
    assert [piece async for piece in pieces] == [[Piece(0, "e", "length")]]


async def test_thousands_that_wait_come_in_portions() -> None:
    """A client that has long read nothing must not have all its events encoded at once."""
    engine, generation = begin(1)
    for _ in range(1000):
        engine.draw(0, ord("a"))
    engine.draw(0, ord("b"), "length")
    portions = [len(pieces) async for pieces in generation.pieces()]
    assert (sum(portions), max(portions)) == (1001, PIECES_AT_ONCE)


async def test_a_stop_string_ends_the_choice_at_once_though_nobody_reads() -> None:
    engine, generation = begin(1)
    for character in "xEND":
        engine.draw(0, ord(character))
    assert engine.aborted == [0]
    assert [piece async for piece in generation.pieces()] == [[Piece(0, "x"), Piece(0, "", "stop")]]


async def test_what_came_before_a_failure_is_handed_out_first() -> None:
    engine, generation = begin(1)
    engine.draw(0, ord("a"))
    engine.draw(0, None, "error", error="the engine is gone")
    pieces = generation.pieces()
    assert await anext(pieces) == [Piece(0, "a")]
    with pytest.raises(ApiError, match="the engine is gone"):
        await anext(pieces)


def counted(generation: Generation, name: str) -> dict[str, float]:
    families = text_string_to_metric_families(generation.metrics.render().decode())
    return {
        next(iter(sample.labels.values()), ""): sample.value
        for family in families
        for sample in family.samples
        if sample.name == name
    }


async def test_each_request_is_judged_once_by_each_objective(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [10.0]
    monkeypatch.setattr(generation_module.time, "monotonic", lambda: clock[0])
    engine, generation = begin(5)
    generation.trace.arrival = 10.0
    generation.metrics.pace = Pace(time_to_first_token=2.0, inter_token_latency=0.5)
    requests, misses = "busload_objective_requests_total", "busload_objective_misses_total"

    def draw(at: float, request_id: int, *end: str) -> None:
        clock[0] = at
        engine.draw(request_id, ord("a"), *end)

    draw(12.0, 0)  # in time, to the last moment
    draw(12.1, 1)
    draw(12.2, 2, "length")  # of one token: nothing between
    draw(12.7, 0)  # a gap of 0.7 s, mean of two gaps 0.5 s
    draw(13.0, 0, "length")
    draw(12.2, 1)
    assert counted(generation, requests) == {"time_to_first_token": 3, "inter_token_latency": 1}
    assert counted(generation, misses) == {"time_to_first_token": 2, "inter_token_latency": 0}
    draw(13.2, 1, "length")  # mean gap 0.55 s
    clock[0] = 11.0
    generation.choices[3].finish_reason = "x"  # not this one
    generation.close()  # request 4 leaves after one second, in time
    generation.choices[3].finish_reason = None
    clock[0] = 12.5
    generation.close()  # request 3 leaves late, without a token
    assert counted(generation, requests) == {"time_to_first_token": 4, "inter_token_latency": 2}
    assert counted(generation, misses) == {"time_to_first_token": 3, "inter_token_latency": 1}
    # Output lengths 3, 3, 1, 0, 0 behind prompts of one token: D*(P+D/2).
    assert counted(generation, "busload_output_length_tokens_sum") == {"": 7}
    assert counted(generation, "busload_finished_prompt_tokens_total") == {"": 5}
    assert counted(generation, "busload_finished_kv_token_steps_total") == {"": 2 * 3 * 2.5 + 1.5}


async def test_without_objectives_nothing_is_judged() -> None:
    engine, generation = begin(1)
    engine.draw(0, ord("a"))
    engine.draw(0, ord("b"), "length")
    assert counted(generation, "busload_objective_requests_total") == dict.fromkeys(OBJECTIVES, 0.0)
