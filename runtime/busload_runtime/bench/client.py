"""One request to an OpenAI-compatible server: send, read the stream, note every arrival. Nothing is raised."""

import asyncio
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import aiohttp

from busload_runtime.bench.outcome import (
    BAD_ANSWER,
    CLIENT_ERROR,
    CONNECTION,
    CUT,
    REFUSED,
    SERVER_ERROR,
    TIMEOUT,
    Outcome,
)
from busload_runtime.bench.prompts import Prompt

_CONNECT_SECONDS = 10
_LONGEST_RETRY_WAIT = 120.0
_LONGEST_ERROR = 300
_LONGEST_EVENT = 2**24
"""Bytes of one event: a server that sends without end must not fill this machine's memory."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request to send. `input_tokens` is what the prompt was made to have."""

    prompt: Prompt
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Target:
    """Where requests go and how they ask. `url` ends before `/completions`, usually with `/v1`."""

    url: str
    model: str
    chat: bool = False
    api_key: str = ""
    timeout: float = 600.0
    retries: int = 0
    """How often a 429 is sent again after its Retry-After."""
    fresh_connections: bool = False


class Client:
    """Sends requests. `clock` gives the seconds since the level began; one client serves one level."""

    def __init__(self, target: Target, on_chunk: Callable[[], None] = lambda: None) -> None:
        self._target = target
        self._url = f"{target.url}/{'chat/completions' if target.chat else 'completions'}"
        self._on_chunk = on_chunk
        headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=target.fresh_connections),
            timeout=aiohttp.ClientTimeout(total=target.timeout, sock_connect=_CONNECT_SECONDS),
            headers=headers,
        )
        self.began = time.time()
        self._zero = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._zero

    async def close(self) -> None:
        await self._session.close()

    async def send(self, request: Request, intended: float, outcome: Outcome) -> None:
        """Sends the request and fills in `outcome` until its end. Cancelled, it marks it as interrupted."""
        outcome.intended, outcome.sent, outcome.input_tokens = intended, self.now(), request.input_tokens
        body = json.dumps(self._body(request)).encode()
        try:
            while (wait := await self._attempt(body, outcome)) is not None:
                outcome.retries += 1
                await asyncio.sleep(wait)
        except asyncio.CancelledError:
            outcome.interrupted = True
            raise
        except TimeoutError as error:
            outcome.fail(TIMEOUT, f"not done after {self.now() - outcome.sent:.1f} s {error}".rstrip())
        except aiohttp.ClientPayloadError as error:
            outcome.fail(CUT, f"cut after {len(outcome.chunks)} chunks: {error}")
        except (aiohttp.ClientError, OSError) as error:
            kind = CUT if outcome.chunks else CONNECTION
            outcome.fail(kind, f"{type(error).__name__}: {error}")
        finally:
            outcome.end = self.now()
            if not outcome.from_usage:
                outcome.output_tokens = len(outcome.chunks)

    def _body(self, request: Request) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._target.model,
            "max_tokens": request.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._target.chat:
            return body | {"messages": [{"role": "user", "content": request.prompt}]}
        return body | {"prompt": request.prompt}

    async def _attempt(self, body: bytes, outcome: Outcome) -> float | None:
        """One try; returns the seconds to wait before the next one, None if there is to be none."""
        headers = {"Content-Type": "application/json"}
        async with self._session.post(self._url, data=body, headers=headers) as response:
            outcome.status = response.status
            if response.status == 200:
                await self._read(response, outcome)
                return None
            text = await _beginning(response)
            if response.status == 429 and outcome.retries < self._target.retries:
                return _retry_after(response.headers.get("Retry-After", ""))
            kinds = {4: CLIENT_ERROR, 5: SERVER_ERROR}
            kind = REFUSED if response.status == 429 else kinds.get(response.status // 100, BAD_ANSWER)
            outcome.fail(kind, f"HTTP {response.status}: {text}")
            return None

    async def _read(self, response: aiohttp.ClientResponse, outcome: Outcome) -> None:
        """Reads server-sent events. Whole reads are split here: cheaper than a coroutine per line.

        Goes on behind `[DONE]` to the end of the body, without which the connection could not be used again.
        """
        rest, done = b"", False
        try:
            async for data in response.content.iter_any():
                now = self.now()
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    if done or not line.startswith(b"data:"):
                        continue
                    event = line[5:].strip()
                    done = event == b"[DONE]"
                    if not done:
                        self._take(event, now, outcome)
                    if outcome.kind is not None:
                        return
                if len(rest) > _LONGEST_EVENT:
                    outcome.fail(BAD_ANSWER, f"an event of over {_LONGEST_EVENT} bytes: {rest[:80]!r}")
                    return
        except aiohttp.ClientPayloadError:
            if not done:
                raise
        kind = response.headers.get("Content-Type", "no content type")
        if not done and not outcome.chunks and not kind.startswith("text/event-stream"):
            outcome.fail(BAD_ANSWER, f"the answer is {kind}, not a stream of events: {rest[:80]!r}")
        elif not done:
            outcome.fail(CUT, f"stream cut after {len(outcome.chunks)} chunks, before [DONE]")
        elif not outcome.chunks:
            outcome.fail(BAD_ANSWER, "the answer has no output token")

    def _take(self, data: bytes, now: float, outcome: Outcome) -> None:
        """One event. What a server says wrong in it becomes the request's failure."""
        try:
            event = json.loads(data)
            if error := event.get("error"):
                outcome.fail(BAD_ANSWER, f"error event: {str(error)[:_LONGEST_ERROR]}")
                return
            if any(_has_token(choice) for choice in event.get("choices") or ()):
                outcome.chunks.append(now)
                self._on_chunk()
            if usage := event.get("usage"):
                given = _count(usage, "prompt_tokens"), _count(usage, "completion_tokens")
                outcome.cached_tokens = _count(usage.get("prompt_tokens_details") or {}, "cached_tokens", 0)
                outcome.input_tokens, outcome.output_tokens = given
                outcome.from_usage = True
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            outcome.fail(BAD_ANSWER, f"an event that cannot be read ({error!r}): {data[:80]!r}")


def _has_token(choice: dict[str, Any]) -> bool:
    """Whether a chunk carries output: opening and closing ones do not, and one without text may be half a character."""
    if "delta" in choice:
        delta = choice["delta"] or {}
        return bool(delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning"))
    return bool(choice.get("text")) or not choice.get("finish_reason")


def _count(usage: dict[str, Any], key: str, default: int | None = None) -> int:
    """A number of tokens. Raises ValueError for anything else: tokens per second are made of it."""
    value = usage.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**31:
        raise ValueError(f"{key} is {value!r:.40}, not a number of tokens")
    return value


async def _beginning(response: aiohttp.ClientResponse) -> str:
    """Of an error's text, whatever its length and its alleged encoding."""
    try:
        raw = await response.content.readexactly(4 * _LONGEST_ERROR)
    except asyncio.IncompleteReadError as all_of_it:
        raw = all_of_it.partial
    return raw.decode(errors="replace")[:_LONGEST_ERROR]


def _retry_after(text: str) -> float:
    """Seconds to wait; 1 where the server does not say a number."""
    try:
        seconds = float(text)
    except ValueError:
        return 1.0
    return min(max(seconds, 0.0), _LONGEST_RETRY_WAIT) if math.isfinite(seconds) else 1.0
