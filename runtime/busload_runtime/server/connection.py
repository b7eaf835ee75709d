"""One TCP connection: uvicorn's HTTP/1.1, with bounds on what a client may send and on how long it may take.

uvicorn bounds neither the size of a request's head nor the time it takes, nor the time a client may leave an answer
unread: each lets one client hold memory and a file descriptor for ever. And it goes on where the protocol does not:
- Its parser takes the end of a head that offers another protocol for the end of the request, so that the body of every
  first POST of Java's HttpClient (`Upgrade: h2c`) is lost; a server that does not know the protocol has to go on as if
  it were not offered (RFC 9110, 7.8).
- It takes the fields behind a chunked body for fields of the head (RFC 9110, 6.5.1): a client could say there what a
  gateway has taken out of its head.
- It answers what it cannot read at once, in the middle of what it writes to an earlier request of the connection.
- It sends chunks to clients of HTTP/1.0, which does not know them (RFC 9112, 6.1).
- It does not read while pipelined requests wait, and so does not see that their client has left.
"""

import asyncio
import select
import sys
from typing import Any

import httptools
import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from busload_runtime.server.errors import ApiError

EXTENSION = "busload.connection"
"""Under this name the app finds the connection of a request, among the extensions of its scope."""
KEEP_ALIVE_SECONDS = 75
"""Longer than the pools of usual clients and proxies keep a connection, so that they close it first.

A head, and what is left of a body once its answer is out, must arrive in this time too."""
_UNREAD_SECONDS = 300
_LOOK_SECONDS = 1.0
_PIECE_BYTES = 2**12
_HEAD_BYTES = 2**16
_CHUNK_FACTOR = 8  # a body in chunks of one byte takes six bytes for each


class HttpConnection(HttpToolsProtocol):
    """Closes on a client that is too slow; answers 431 to a head that is too large, in the API's error shape."""

    promised = False
    """The last answer's head let the client keep the connection, so its next request comes here."""
    _deadline: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    _running: RequestResponseCycle | None = None
    _received = 0
    _body_received = 0
    _head = 0
    _resumed = False
    """The parser is told a head again that was handled already, to read its body."""
    _in_body = False
    """The head of the newest request is whole, its body is not."""
    _refusal: ApiError | None = None
    """What to say in the place of a request that cannot be read, once those before it have their answers."""
    _looking: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._unparsed = bytearray()
        self._expect_more()

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_nothing()
        if self._looking is not None:
            self._looking.cancel()
        self.resume_writing()
        # With pipelined requests uvicorn tells only the newest one that its client is gone.
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        self.pipeline.clear()
        self._unparsed.clear()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unparsed += data
        self._parse_on()

    def _parse_on(self) -> None:
        """Parses what has come, but not far beyond a request that waits behind another: as bytes requests are small."""
        begin = 0
        if self.transport.is_closing():
            return
        if self._unparsed:
            self._unset_keepalive_if_required()
        while begin < len(self._unparsed) and not self.pipeline and self._refusal is None:
            piece = bytes(self._unparsed[begin : begin + _PIECE_BYTES])
            begin += len(piece)
            self._received += len(piece)
            try:
                self._parse(piece)
            except httptools.HttpParserError:
                self._refuse(ApiError(400, "this is not a valid HTTP/1.1 request", code="invalid_http"))
            if self._received - self._body_received > _HEAD_BYTES + _CHUNK_FACTOR * self._body_received:
                self._refuse(_head_too_large())
        del self._unparsed[: begin if self._refusal is None else None]
        if self._unparsed:
            self.flow.pause_reading()

    def _parse(self, data: bytes) -> None:
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
            framing = self._framing()
            self.parser = httptools.HttpRequestParser(self)
            if framing:
                self._resumed = True
                self.parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n\r\n" % framing)
                self._resumed = False

    def _framing(self) -> bytes:
        """The field that says how long the request's body is; empty if it has none."""
        for name, value in self.headers:
            if (name == b"content-length" and value.strip(b" \t0")) or name == b"transfer-encoding":
                return name + b": " + value
        return b""

    def on_url(self, url: bytes) -> None:
        if not self._resumed:
            self._head += len(url)
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._resumed and not self._in_body:
            self._head += len(name) + len(value)
            super().on_header(name, value)

    def on_message_begin(self) -> None:
        if self._resumed:
            return
        super().on_message_begin()
        self._head = 0
        self.scope["extensions"] = {EXTENSION: {"connection": self}}
        self._expect_more()

    def on_headers_complete(self) -> None:
        if self._resumed:
            return
        if self._head > _HEAD_BYTES:  # it came as a whole
            self._refuse(_head_too_large())
            raise ValueError  # ends the parser
        self._expect_nothing()  # the route bounds the time for the body
        super().on_headers_complete()
        self._in_body = True
        if self.scope["http_version"] < "1.1":
            self.cycle.waiting_for_100_continue = False  # it knows no such answer
        if self.pipeline and self._looking is None:
            self._look()

    def on_body(self, body: bytes) -> None:
        self._body_received += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade() and self._framing():
            return  # the head alone: see `_parse`
        self._in_body = False
        self._expect_nothing()
        self._received = self._body_received = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self._received and not self.pipeline:
            self._expect_more()
        super().on_response_complete()
        self._parse_on()
        if self._refusal is not None and self._idle:
            self._say(self._refusal)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(_UNREAD_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def drop(self) -> None:
        """Gives up an answer that its client does not read."""
        if self._running is not None and not self._running.response_complete:
            self.transport.abort()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        old = cycle.scope["http_version"] < "1.1"
        super()._start_asgi_task(cycle, _Unchunked(app, cycle) if old else app)  # type: ignore[arg-type]

    @property
    def _idle(self) -> bool:
        """All requests so far have their answers."""
        return self._running is None or self._running.response_complete

    def _look(self) -> None:
        """Whether the client has left, as long as requests wait behind another: nothing is read meanwhile."""
        self._looking = None
        if not self.pipeline or self.transport.is_closing():
            return
        peer = select.poll()
        peer.register(self.transport.get_extra_info("socket").fileno(), select.POLLRDHUP)
        if peer.poll(0):
            self.transport.abort()
        else:
            self._looking = self.loop.call_later(_LOOK_SECONDS, self._look)

    def _expect_more(self) -> None:
        self._expect_nothing()
        self._deadline = self.loop.call_later(KEEP_ALIVE_SECONDS, self._on_deadline)

    def _on_deadline(self) -> None:
        if self._idle:
            self.transport.close()
        else:  # a pipelined head may be cut where reading was paused: its turn comes after the answer
            self._expect_more()

    def _expect_nothing(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _refuse(self, error: ApiError) -> None:
        """Ends the connection at a request that cannot be read any further, with an answer in that request's place."""
        if self._refusal is not None:
            return
        self._refusal = error
        if self._in_body and self.pipeline:
            self.pipeline.popleft()  # it is the newest, and will not be whole
        elif self._in_body and self._running is not None:
            if self._running.response_started:  # it has its answer, or the beginning of one
                self.transport.close()
            else:
                self._say(error)
            return
        if self._idle:
            self._say(error)

    def _say(self, error: ApiError) -> None:
        """Answers outside of any request, and closes."""
        if self.transport.is_closing():
            return
        body = msgspec.json.encode(error.body())
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[error.status] + head + body)
        self.transport.close()


def _head_too_large() -> ApiError:
    return ApiError(431, f"the request's head has more than {_HEAD_BYTES} bytes", code="request_head_too_large")


class _Unchunked:
    """The app for a client of HTTP/1.0: an answer of unknown length has its end where the connection has."""

    def __init__(self, app: ASGIApp, cycle: RequestResponseCycle) -> None:
        self._app = app
        self._cycle = cycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        cycle, unbounded = self._cycle, False

        async def send_plain(message: Message) -> None:
            nonlocal unbounded
            if message["type"] == "http.response.start":
                unbounded = all(name.lower() != b"content-length" for name, _ in message["headers"])
                if unbounded:
                    cycle.chunked_encoding, cycle.expected_content_length = False, sys.maxsize
            elif unbounded and not message.get("more_body", False):
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await self._app(scope, receive, send_plain)
