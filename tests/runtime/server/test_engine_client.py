"""The wire between the processes, both ends real and in one process: the engine's in a thread of its own."""

import asyncio
import socket
from collections.abc import Callable

import pytest
from live_server import eventually

from busload_runtime.engine.link import Link, LinkClosed
from busload_runtime.engine.messages import Failed, Submit, ToEngine, TokenOut, Tokens
from busload_runtime.server.engine_client import EngineClient


async def beside(engine: Callable[[Link], None], work: Callable[[EngineClient], None]) -> EngineClient:
    """Runs `work` on a client at once, and `engine` on the other end until it returns."""
    ours, theirs = socket.socketpair()
    client = EngineClient(ours, timeout=30, on_stats=lambda stats: None)
    client.start()

    def run() -> None:
        link = Link(theirs)
        try:
            engine(link)
        finally:
            link.close()

    work(client)
    await asyncio.to_thread(run)
    # It sees the end behind all that was said before.
    await asyncio.to_thread(eventually, lambda: client._socket.fileno() < 0)
    return client


async def test_prompts_larger_than_the_socket_arrive_whole_and_in_order() -> None:
    sent = [Submit(n, list(range(n, 200_000 + n)), 1) for n in range(5)]
    received: list[ToEngine] = []

    def engine(link: Link) -> None:
        while len(received) < len(sent):
            received.extend(link.receive(60.0))

    client = await beside(engine, lambda client: [client.submit(s, lambda out: None) for s in sent] and None)
    assert received == sent
    await client.close()


async def test_tokens_larger_than_the_socket_arrive_whole_and_in_order() -> None:
    outs = [TokenOut(1, token) for token in range(300_000)]
    got: list[TokenOut] = []

    def engine(link: Link) -> None:
        assert link.receive(60.0)
        for start in range(0, len(outs), 50_000):
            link.send(Tokens(outs[start : start + 50_000]))
        link.send(Tokens([TokenOut(1, None, "length")]))

    client = await beside(engine, lambda client: client.submit(Submit(1, [1], 1), got.append))
    assert got == [*outs, TokenOut(1, None, "length")]
    assert client.live == 0
    await client.close()


async def test_the_last_words_of_an_engine_are_heard_though_it_read_nothing() -> None:
    ends: list[TokenOut] = []

    def work(client: EngineClient) -> None:
        client.submit(Submit(1, list(range(100_000)), 1), ends.append)

    client = await beside(lambda link: link.send(Failed("scripted")), work)
    assert client.failed.result() == "scripted"
    assert [(end.finish_reason, end.error) for end in ends] == [("error", "the engine is gone: scripted")]
    await client.close()


async def test_the_engine_learns_that_the_http_process_closed_the_socket() -> None:
    ours, theirs = socket.socketpair()
    client = EngineClient(ours, timeout=30, on_stats=lambda stats: None)
    client.start()
    link = Link(theirs)
    await client.close()
    with pytest.raises(LinkClosed, match="closed the socket"):
        link.receive(60.0)
    with pytest.raises(LinkClosed, match="closed the socket"):
        link.send(Failed("nobody hears this"))
    link.close()
