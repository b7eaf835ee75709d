"""A generation on an engine that the test plays."""

from collections.abc import Callable

import pytest

from busload_runtime.contract import Limits
from busload_runtime.engine.messages import Submit, TokenOut
from busload_runtime.server.admission import Admission
from busload_runtime.server.edge import Trace
from busload_runtime.server.errors import ApiError
from busload_runtime.server.generation import Generation, Piece
from busload_runtime.server.metrics import Metrics
from busload_runtime.server.text import TextStream


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
    generation = Generation(engine, admission, Metrics("m"), Trace("id", 0.0))  # type: ignore[arg-type]
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
