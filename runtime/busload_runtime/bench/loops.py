"""When requests are sent.

Closed loop: so many clients, each waits for its answer. Open loop: at given times, whatever became of those before.
"""

import asyncio
import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from busload_runtime.bench.client import Client, Request
from busload_runtime.bench.outcome import Outcome

_MOST_IN_FLIGHT = 8192
"""Beyond this an open loop waits (and the waiting shows in its latencies): a client has only so many descriptors."""


@dataclass
class Ending:
    """How a measurement is told to end early. `cut` does not wait for running requests, `send_no_more` does."""

    send_no_more: asyncio.Event = field(default_factory=asyncio.Event)
    cut: asyncio.Event = field(default_factory=asyncio.Event)


async def closed_loop(
    client: Client,
    requests: Iterator[Request],
    concurrency: int,
    seconds: float | None,
    ending: Ending,
    outcomes: list[Outcome],
) -> None:
    """`concurrency` clients send until `requests` are used up, `seconds` have passed or `ending` says so."""

    async def one_client() -> None:
        while not ending.send_no_more.is_set() and (seconds is None or client.now() < seconds):
            request = next(requests, None)
            if request is None:
                return
            outcomes.append(outcome := Outcome(client.now()))
            await client.send(request, outcome.intended, outcome)

    await _until_done_or_cut([asyncio.create_task(one_client()) for _ in range(concurrency)], ending)


async def open_loop(
    client: Client, arrivals: Iterator[tuple[float, Request]], ending: Ending, outcomes: list[Outcome]
) -> None:
    """Sends each request at its time (seconds since the level began), whatever became of those before it."""
    running: set[asyncio.Task[None]] = set()

    async def send_all() -> None:
        for at, request in arrivals:
            if (wait := at - client.now()) > 0:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(ending.send_no_more.wait(), wait)
            while len(running) >= _MOST_IN_FLIGHT and not ending.send_no_more.is_set():
                await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            if ending.send_no_more.is_set():
                return
            outcomes.append(outcome := Outcome(at))
            task = asyncio.create_task(client.send(request, at, outcome))
            running.add(task)
            task.add_done_callback(running.discard)

    await _until_done_or_cut([asyncio.create_task(send_all())], ending)
    await _until_done_or_cut(list(running), ending)


async def _until_done_or_cut(tasks: list[asyncio.Task[None]], ending: Ending) -> None:
    if not tasks:
        return
    all_done = asyncio.gather(*tasks)
    cut = asyncio.create_task(ending.cut.wait())
    either: list[asyncio.Future[Any]] = [all_done, cut]
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    cut.cancel()
    if not all_done.done():
        all_done.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await all_done


def poisson(rate: float, seconds: float | None, count: int | None, rng: random.Random) -> Iterator[float]:
    """Times of a Poisson process of `rate` per second, until `seconds` or `count` is reached, whichever comes first."""
    at, sent = 0.0, 0
    while (count is None or sent < count) and (seconds is None or at < seconds):
        yield at
        at += rng.expovariate(rate)
        sent += 1
