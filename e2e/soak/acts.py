"""What clients do: each act is one request, or one way of not making one, and says which answers are explained."""

import asyncio
import json
import random
import string
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from e2e.soak.wire import BrokenAnswer, Connection

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
CANARY: dict[str, Any] = {
    "prompt": "The capital of France is",
    "max_tokens": 16,
    "temperature": 0,
    "ignore_eos": True,
}
"""A greedy request: its text may depend on nothing else that happens."""

_WORDS = ("river", "bread", "clock", "bridge", "owl", "salt", "train", "map", "lamp", "stone")
_SERVED = frozenset({200, 429})


@dataclass(slots=True)
class Outcome:
    """How an act went. `status` 0: it was not meant to have an answer."""

    act: str
    status: int = 0
    problem: str = ""
    """What cannot be explained; empty when all is well."""
    gaps: list[float] = field(default_factory=list)
    """Seconds between events of a stream that was read as it came."""
    text: str = ""


@dataclass(frozen=True, slots=True)
class Client:
    """One client's view of the server; `draw` decides everything that is left to chance."""

    host: str
    port: int
    draw: random.Random

    async def open(self, receive_buffer: int | None = None) -> Connection:
        return await Connection.open(self.host, self.port, receive_buffer)

    def question(self, **fields: Any) -> tuple[str, dict[str, Any]]:
        """A path and a body: prompts of up to some hundred tokens, which all limits allow."""
        draw = self.draw
        text = " ".join(draw.choices(_WORDS, k=draw.choice((1, 5, 20, 80))))
        body = {"max_tokens": draw.choice((1, 4, 16, 64, 200)), "seed": draw.getrandbits(40), **fields}
        if draw.random() < 0.3:
            body["temperature"] = draw.choice((0, 0.3, 1.5))
        if draw.random() < 0.2:
            body |= {"frequency_penalty": 0.5, "logit_bias": {str(draw.randrange(40_000)): -5}}
        if draw.random() < 0.5:
            return CHAT, {"messages": [{"role": "user", "content": text}], **body}
        return COMPLETIONS, {"prompt": text, **body}


Act = Callable[[Client, Outcome], Awaitable[None]]


async def perform(name: str, client: Client) -> Outcome:
    """Does one act. Never raises: what went wrong is the outcome's problem."""
    outcome = Outcome(name)
    try:
        async with asyncio.timeout(180):
            await ACTS[name].act(client, outcome)
    except TimeoutError:
        outcome.problem = "no end within 180 s"
    except (BrokenAnswer, OSError) as error:
        outcome.problem = f"{type(error).__name__}: {error}"
    return outcome


async def whole(client: Client, outcome: Outcome) -> None:
    """An answer in one piece."""
    path, body = client.question(n=client.draw.choice((1, 1, 1, 3)))
    await _asked(client, outcome, path, body)


async def canary(client: Client, outcome: Outcome) -> None:
    """Always the same greedy request, in one piece or as a stream."""
    stream = client.draw.random() < 0.5
    await _asked(client, outcome, COMPLETIONS, CANARY | ({"stream": True} if stream else {}))


async def stream(client: Client, outcome: Outcome) -> None:
    """A stream, read as it comes."""
    path, body = client.question(stream=True, n=client.draw.choice((1, 1, 1, 2)))
    await _asked(client, outcome, path, body)


async def stop(client: Client, outcome: Outcome) -> None:
    """A stream with stop strings, none of which may be seen."""
    words = client.draw.choices((" a", "the", ".", "\n", "e", "in", "x" * 40), k=3)
    path, body = client.question(stream=True, stop=words)
    await _asked(client, outcome, path, body)
    if not outcome.problem and any(word in outcome.text for word in words):
        outcome.problem = f"a stop string of {words} is in the text {outcome.text[-80:]!r}"


async def slow(client: Client, outcome: Outcome) -> None:
    """A stream that is read a little at a time, into a small buffer."""
    path, body = client.question(stream=True, n=4)
    await _asked(client, outcome, path, body, receive_buffer=4096, pause=0.05)
    outcome.gaps.clear()


async def leave(client: Client, outcome: Outcome) -> None:
    """Leaves at any moment: before, during or after the answer; by closing or by a reset."""
    path, body = client.question(stream=client.draw.random() < 0.5, n=client.draw.choice((1, 1, 4)))
    connection = await client.open()
    connection.post(path, json.dumps(body | {"ignore_eos": True}).encode())
    await asyncio.sleep(client.draw.expovariate(3))
    connection.close(reset=client.draw.random() < 0.3)


async def half_open(client: Client, outcome: Outcome) -> None:
    """Says that a body comes, sends a part of it, and goes on holding the connection before it leaves."""
    connection = await client.open()
    if client.draw.random() < 0.5:
        connection.post(COMPLETIONS, b'{"prompt": "he', length=1000)
    else:
        connection.raw(b"POST /v1/completions HTTP/1.1\r\nHost: so")
    await asyncio.sleep(client.draw.uniform(0.5, 4))
    connection.close()


async def too_long(client: Client, outcome: Outcome) -> None:
    await _refused(client, outcome, json.dumps({"prompt": [5] * client.draw.choice((5000, 100_000))}).encode(), {400})


async def malformed(client: Client, outcome: Outcome) -> None:
    """Bytes that are no JSON, no such request, or no sense."""
    draw = client.draw
    junk = bytes(draw.randrange(256) for _ in range(draw.randrange(200)))
    bodies = (
        junk,
        b"[" * 5000,
        b'{"prompt": [-1]}',
        b'{"prompt": "x", "n": 0}',
        b'{"prompt": "x", "logit_bias": {"999999": 1}}',
        b'{"prompt": "\\ud800"}',
        b'{"prompt": "x", "stop": ["", 5]}',
        b'{"prompt": "x", "temperature": 1e999}',
        json.dumps({draw.choice(string.ascii_letters): draw.random() for _ in range(20)}).encode(),
    )
    await _refused(client, outcome, draw.choice(bodies), {400})


async def huge(client: Client, outcome: Outcome) -> None:
    """20 MB, declared or in chunks."""
    connection = await client.open()
    if client.draw.random() < 0.5:
        connection.post(COMPLETIONS, b"x" * 1_000_000, length=20_000_000)
    else:
        connection.post(COMPLETIONS, b"f4240\r\n%b\r\n" % (b"x" * 1_000_000) * 4, length="chunked")
    await _expect(connection, outcome, {413})


async def no_http(client: Client, outcome: Outcome) -> None:
    connection = await client.open()
    connection.raw(b"\x16\x03\x01" + bytes(client.draw.randrange(256) for _ in range(100)) + b"\r\n\r\n")
    await _expect(connection, outcome, {400})


async def astray(client: Client, outcome: Outcome) -> None:
    """A route or a model that is not there."""
    name = "".join(client.draw.choices(string.ascii_lowercase, k=8))
    if client.draw.random() < 0.5:
        connection = await client.open()
        connection.get(f"/{name}")
        await _expect(connection, outcome, {404})
    else:
        await _refused(client, outcome, json.dumps({"prompt": "x", "model": name}).encode(), {404})


async def _asked(
    client: Client,
    outcome: Outcome,
    path: str,
    body: dict[str, Any],
    receive_buffer: int | None = None,
    pause: float = 0.0,
) -> None:
    """Asks and reads the answer to its end."""
    connection = await client.open(receive_buffer)
    try:
        connection.post(path, json.dumps(body).encode())
        outcome.status = await connection.head()
        if outcome.status != 200:
            await _explain(connection, outcome, _SERVED)
        elif body.get("stream"):
            await _read_stream(connection, outcome, body.get("n", 1), pause)
        else:
            choices = (await connection.json())["choices"]
            outcome.text = choices[0].get("text") or ""
            if len(choices) != body.get("n", 1) or any(c["finish_reason"] not in ("stop", "length") for c in choices):
                outcome.problem = f"choices that did not end well: {str(choices)[:200]}"
    finally:
        connection.close()


async def _read_stream(connection: Connection, outcome: Outcome, n: int, pause: float) -> None:
    ends: dict[int, str] = {}
    last = 0.0
    event: Any = None
    async for event in connection.events():
        if pause:
            await asyncio.sleep(pause)
        now = time.perf_counter()
        if last:
            outcome.gaps.append(now - last)
        last = now
        if not isinstance(event, dict):
            continue
        if "error" in event:
            outcome.problem = f"an error event: {event['error'].get('message', '')[:200]}"
            return
        for choice in event["choices"]:
            if choice["index"] == 0:
                outcome.text += choice.get("text") or choice.get("delta", {}).get("content") or ""
            if choice["finish_reason"]:
                ends[choice["index"]] = choice["finish_reason"]
    if event != "[DONE]" or len(ends) != n or not set(ends.values()) <= {"stop", "length"}:
        outcome.problem = f"a stream that ended with {str(event)[:80]} and finish reasons {ends}"


async def _refused(client: Client, outcome: Outcome, content: bytes, statuses: set[int]) -> None:
    connection = await client.open()
    connection.post(COMPLETIONS, content)
    await _expect(connection, outcome, statuses)


async def _expect(connection: Connection, outcome: Outcome, statuses: set[int]) -> None:
    """An answer that refuses: one of the statuses, or that the queue is full."""
    try:
        outcome.status = await connection.head()
        await _explain(connection, outcome, statuses | {429})
    finally:
        connection.close()


async def _explain(connection: Connection, outcome: Outcome, statuses: frozenset[int] | set[int]) -> None:
    error = (await connection.json()).get("error", {})
    if outcome.status not in statuses:
        outcome.problem = f"status {outcome.status}: {str(error)[:200]}"
    elif not error.get("message") or not error.get("type"):
        outcome.problem = f"a refusal without a reason: {error}"
    elif outcome.status == 429 and not connection.headers.get("retry-after", "").isdigit():
        outcome.problem = "429 without Retry-After"


@dataclass(frozen=True, slots=True)
class Kind:
    """An act and how often it is chosen."""

    act: Act
    weight: int


ACTS: dict[str, Kind] = {
    "whole": Kind(whole, 20),
    "canary": Kind(canary, 10),
    "stream": Kind(stream, 25),
    "stop": Kind(stop, 8),
    "slow": Kind(slow, 3),
    "leave": Kind(leave, 25),
    "half_open": Kind(half_open, 3),
    "too_long": Kind(too_long, 4),
    "malformed": Kind(malformed, 6),
    "huge": Kind(huge, 2),
    "no_http": Kind(no_http, 2),
    "astray": Kind(astray, 3),
}


def choose(draw: random.Random) -> str:
    return draw.choices(list(ACTS), [kind.weight for kind in ACTS.values()])[0]
