"""A small OpenAI-compatible server that answers, delays, cuts and refuses as it is told."""

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer


@dataclass(frozen=True)
class Behaviour:
    """What one request meets. Delays in seconds."""

    before: float = 0.0
    gap: float = 0.0
    status: int = 200
    retry_after: str | None = None
    cut_after: int | None = None
    """Drop the connection after so many chunks; 0: before the answer begins."""
    end_without_done_after: int | None = None
    error_event_after: int | None = None
    usage: bool = True
    tokens_per_chunk: int = 1
    raw: bytes | None = None
    """Sent instead of events, as a web page."""
    events: bytes | None = None
    """Sent instead of well-formed events; then the end."""
    usage_says: dict[str, Any] = field(default_factory=dict)
    charset: str = "utf-8"
    """Of an error's text, by its header."""


@dataclass
class FakeOpenAI:
    default: Behaviour = field(default_factory=Behaviour)
    next: deque[Behaviour] = field(default_factory=deque)
    """Behaviours of the next requests; then `default`."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    peers: set[Any] = field(default_factory=set)
    """Client address and port of each connection."""
    arrived: asyncio.Condition = field(default_factory=asyncio.Condition)
    running: int = 0
    most_running: int = 0

    async def received(self, count: int) -> None:
        """Waits until so many requests have come."""
        async with self.arrived:
            await self.arrived.wait_for(lambda: len(self.bodies) >= count)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            return await self._answer(request, self.next.popleft() if self.next else self.default)
        finally:
            self.running -= 1

    async def _answer(self, request: web.Request, how: Behaviour) -> web.StreamResponse:
        body = await request.json()
        async with self.arrived:
            self.bodies.append(body)
            self.arrived.notify_all()
        self.headers.append(dict(request.headers))
        assert request.transport is not None
        self.peers.add(request.transport.get_extra_info("peername"))
        await asyncio.sleep(how.before)
        if how.status != 200:
            headers = {} if how.retry_after is None else {"Retry-After": how.retry_after}
            text = json.dumps({"error": {"message": "as told"}}).encode()
            kind = f"application/json; charset={how.charset}"
            return web.Response(body=text, status=how.status, headers={**headers, "Content-Type": kind})
        if how.raw is not None:
            return web.Response(body=how.raw, content_type="text/html")
        if how.cut_after == 0:
            request.transport.close()
            return web.Response()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if how.events is not None:
            await response.write(how.events)
            return response
        chat = "messages" in body
        if chat:
            await _event(response, choices=[{"index": 0, "delta": {"role": "assistant", "content": ""}}])
        for sent in range(body["max_tokens"] // how.tokens_per_chunk):
            if sent == how.cut_after:
                request.transport.close()
                return response
            if sent == how.end_without_done_after:
                return response
            if sent == how.error_event_after:
                await _event(response, error={"message": "as told"})
                return response
            if sent:
                await asyncio.sleep(how.gap)
            text = {"delta": {"content": "x"}} if chat else {"text": "x"}
            await _event(response, choices=[{"index": 0, **text, "finish_reason": None}])
        closing = {"delta": {}} if chat else {"text": ""}
        await _event(response, choices=[{"index": 0, **closing, "finish_reason": "length"}])
        if how.usage:
            await _event(response, choices=[], usage=_usage(body) | how.usage_says)
        await response.write(b"data: [DONE]\n\n")
        return response


def _usage(body: dict[str, Any]) -> dict[str, Any]:
    prompt = body.get("prompt") or body["messages"][0]["content"]
    length = len(prompt if isinstance(prompt, list) else prompt.split())
    details = {"cached_tokens": 3}
    return {"prompt_tokens": length, "completion_tokens": body["max_tokens"], "prompt_tokens_details": details}


async def _event(response: web.StreamResponse, **event: Any) -> None:
    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


@asynccontextmanager
async def serving(fake: FakeOpenAI) -> AsyncIterator[str]:
    """Serves; yields the URL up to and including /v1."""
    app = web.Application()
    app.router.add_post("/v1/completions", fake.answer)
    app.router.add_post("/v1/chat/completions", fake.answer)
    server = TestServer(app)
    await server.start_server()
    try:
        yield str(server.make_url("/v1"))
    finally:
        await server.close()
