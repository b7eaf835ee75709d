"""Bodies that do not arrive, and what those under way hold together."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from starlette.requests import Request

from busload_runtime.server.body import BodyReader
from busload_runtime.server.errors import ApiError

Message = dict[str, Any]


class Sender:
    """A client that sends what it is told to, when it is told to."""

    def __init__(self, **headers: str) -> None:
        self._messages: asyncio.Queue[Message] = asyncio.Queue()
        pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        receive: Callable[[], Awaitable[Message]] = self._messages.get
        self.request = Request({"type": "http", "method": "POST", "headers": pairs}, receive)

    def send(self, content: bytes, more: bool = True) -> None:
        self._messages.put_nowait({"type": "http.request", "body": content, "more_body": more})


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def refusal(work: Awaitable[bytes]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        await work
    return caught.value


async def test_a_body_comes_in_parts() -> None:
    sender = Sender()
    sender.send(b"one ")
    sender.send(b"two", more=False)
    assert await BodyReader().read(sender.request, 100) == b"one two"


@pytest.mark.parametrize("headers", [{}, {"content_length": "101"}])
async def test_a_body_that_is_too_large_is_refused_once_that_is_known(headers: dict[str, str]) -> None:
    sender = Sender(**headers)
    sender.send(b"x" * 101)  # and no end
    assert (await refusal(BodyReader().read(sender.request, 100))).status == 413


async def test_a_body_that_stalls_is_given_up() -> None:
    error = await refusal(BodyReader().read(Sender().request, 100, seconds=0.01))
    assert (error.status, error.code) == (408, "body_timeout")
    assert "within 0.01 s" in error.message


async def test_the_oldest_of_too_many_makes_room() -> None:
    """The bound is 8 bodies of the largest size: the ninth full one ends the first, and no more than that."""
    reader = BodyReader(held_bytes=0)
    senders = [Sender() for _ in range(9)]
    reads = [asyncio.ensure_future(reader.read(sender.request, 100)) for sender in senders]
    await settle()
    for sender in senders[:8]:
        sender.send(b"x" * 100)
    await settle()
    assert not any(read.done() for read in reads)
    senders[8].send(b"x" * 100)
    await settle()
    assert [read.done() for read in reads] == [True] + [False] * 8
    error = await refusal(reads[0])
    assert (error.status, error.code) == (408, "body_timeout")
    assert "room" in error.message
    for sender in senders[1:]:
        sender.send(b"", more=False)
    assert await asyncio.gather(*reads[1:]) == [b"x" * 100] * 8
    later = Sender()
    later.send(b"y" * 100, more=False)
    assert await reader.read(later.request, 100) == b"y" * 100


async def test_a_server_that_shuts_down_waits_for_no_body() -> None:
    reader = BodyReader()
    early, quick, late = Sender(), Sender(), Sender()
    reads = [asyncio.ensure_future(reader.read(sender.request, 100)) for sender in (early, quick)]
    await settle()
    reader.hurry(0.02)
    quick.send(b"whole", more=False)
    assert await reads[1] == b"whole"
    for work in (reads[0], reader.read(late.request, 100)):
        error = await refusal(work)
        assert (error.status, error.code) == (503, "draining")
