"""The HTTP process's end of the wire to the engine process."""

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable
from dataclasses import astuple

import msgspec

from busload_runtime.contract import Limits, Pace
from busload_runtime.engine.messages import (
    Abort,
    ApplyLimits,
    Failed,
    FromEngine,
    LimitsApplied,
    LimitsRefused,
    Ready,
    Stats,
    Submit,
    TextLoaded,
    ToEngine,
    TokenOut,
    Tokens,
)
from busload_runtime.engine.wire import RECEIVE_BYTES, FrameReader, FrameWriter
from busload_runtime.server.errors import ApiError

# What may wait for an engine that does not read. Admission bounds submissions long before; this is the backstop.
_UNSENT_BYTES = 1 << 26
_WATCH_SECONDS = 0.25
_ALL = 1 << 30

Deliver = Callable[[TokenOut], None]


class EngineClient:
    """Sends requests, hands each its tokens, keeps the newest `Stats`, and notices an engine that died or fell silent.

    All methods belong to the event loop's thread. `connection` is this process's end of the socket pair.
    """

    def __init__(self, connection: socket.socket, timeout: float, on_stats: Callable[[Stats], None]) -> None:
        self._socket = connection
        self._socket.setblocking(False)
        self._timeout = timeout
        self._on_stats = on_stats
        self._writer = FrameWriter()
        self._reader: FrameReader[FromEngine] = FrameReader(FromEngine)
        self._unsent = bytearray()
        self._deliver: dict[int, Deliver] = {}
        self._applying: dict[int, asyncio.Future[LimitsApplied | LimitsRefused]] = {}
        self._next_id = 1
        self._steps = -1
        self._progress_at = time.monotonic()
        self._loop = asyncio.get_running_loop()
        self._watching: asyncio.Task[None] | None = None
        self.ready: asyncio.Future[Ready] = self._loop.create_future()
        self.failed: asyncio.Future[str] = self._loop.create_future()
        """Resolved once, with one line, when the engine cannot go on."""
        self.stats: Stats | None = None

    def start(self) -> None:
        """Begins to send, receive and watch."""
        self._loop.add_reader(self._socket, self._receive)
        self._watching = self._loop.create_task(self._watch())

    async def close(self) -> None:
        self._disconnect()
        if self._watching is not None:
            self._watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watching

    @property
    def alive(self) -> bool:
        return not self.failed.done()

    @property
    def live(self) -> int:
        """Requests submitted and not ended."""
        return len(self._deliver)

    def next_id(self) -> int:
        """A request id never used before in this process."""
        self._next_id += 1
        return self._next_id - 1

    def submit(self, request: Submit, deliver: Deliver) -> None:
        """Queues a request; `deliver` gets each of its tokens and its end. Raises `ApiError` if the engine is gone."""
        if self.failed.done():
            raise ApiError(500, f"the engine is gone: {self.failed.result()}", code="engine_error")
        if len(self._unsent) > _UNSENT_BYTES:
            raise ApiError(
                503, "the engine does not take requests at the moment; try again", code="engine_busy", retry_after=5
            )
        self._deliver[request.request_id] = deliver
        self._put(request)

    def text_loaded(self) -> None:
        """Tells the engine that this process holds all that it will before requests come."""
        self._put(TextLoaded())

    def abort(self, request_id: int) -> None:
        """Ends a request; nothing more is delivered for it."""
        if self._deliver.pop(request_id, None) is not None:
            self._put(Abort(request_id))

    async def apply(self, generation: int, limits: Limits, pace: Pace) -> LimitsApplied | LimitsRefused:
        """Asks the engine to run under these limits. Raises `ConnectionError` when the engine is gone."""
        if self.failed.done():
            raise ConnectionError(self.failed.result())
        answer: asyncio.Future[LimitsApplied | LimitsRefused] = asyncio.get_running_loop().create_future()
        self._applying[generation] = answer
        self._put(
            ApplyLimits(
                generation=generation,
                max_sequence_length=limits.max_sequence_length,
                batch_size=limits.batch_size,
                kv_cache_percent=limits.kv_cache_percent,
                token_budget=limits.token_budget,
                max_queued_requests=limits.max_queued_requests,
                max_queued_tokens=limits.max_queued_tokens,
                time_to_first_token=pace.time_to_first_token,
                inter_token_latency=pace.inter_token_latency,
                step_law=None if pace.law is None else astuple(pace.law),
            )
        )
        try:
            return await answer
        finally:
            self._applying.pop(generation, None)

    def fail(self, error: str) -> None:
        """Marks the engine as gone and ends every live request with an error. The first error counts."""
        if self.failed.done():
            return
        self.failed.set_result(error)
        live, self._deliver = self._deliver, {}
        for request_id, deliver in live.items():
            deliver(TokenOut(request_id, None, "error", error=f"the engine is gone: {error}"))
        for answer in self._applying.values():
            if not answer.done():
                answer.set_exception(ConnectionError(error))

    def _disconnect(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._socket.close()

    def _put(self, message: ToEngine) -> None:
        waits = bool(self._unsent)
        self._unsent += self._writer.frame(message)
        if not waits:
            self._flush()

    def _flush(self) -> None:
        """Sends what the socket takes; the rest follows when it takes more."""
        if self._socket.fileno() < 0:
            return
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            self._loop.add_writer(self._socket, self._flush)
        except OSError:  # the engine is gone; what it said last may still have to be read
            self._loop.remove_writer(self._socket)
        else:
            self._loop.remove_writer(self._socket)

    def _receive(self) -> None:
        try:
            data = self._socket.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._disconnect()  # its exit code, which comes next, says more
            return
        try:
            self._reader.feed(data)
            for message in self._reader.take(_ALL):
                self._dispatch(message)
        except msgspec.DecodeError as error:
            self.fail(f"the engine sent a message that cannot be read ({error}); are both processes one version?")
        except Exception as error:
            # A wire that broke on this side is as bad as an engine that died: better said than waited for.
            self.fail(f"the wire to the engine failed: {type(error).__name__}: {error}")

    def _dispatch(self, message: FromEngine) -> None:
        match message:
            case Tokens():
                self._progress_at = time.monotonic()
                for out in message.tokens:
                    self._dispatch_token(out)
            case Stats():
                if message.steps != self._steps:
                    self._steps = message.steps
                    self._progress_at = time.monotonic()
                self.stats = message
                self._on_stats(message)
            case Ready():
                if not self.ready.done():
                    self.ready.set_result(message)
            case LimitsApplied() | LimitsRefused():
                answer = self._applying.get(message.generation)
                if answer is not None and not answer.done():
                    answer.set_result(message)
            case Failed():
                self.fail(message.error)

    def _dispatch_token(self, out: TokenOut) -> None:
        if out.finish_reason is None:
            deliver = self._deliver.get(out.request_id)
        else:
            deliver = self._deliver.pop(out.request_id, None)
        if deliver is not None:
            deliver(out)

    async def _watch(self) -> None:
        """Fails the engine when work waits and no step ends for `timeout` seconds.

        Only time in which this process ran counts: after it was stopped (SIGSTOP, a frozen cgroup, a paused machine)
        the engine's messages wait in the socket unread, which proves nothing against the engine.
        """
        looked = time.monotonic()
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            now = time.monotonic()
            self._progress_at += max(0.0, now - looked - 2 * _WATCH_SECONDS)
            looked = now
            if not self._deliver and not self._applying:
                self._progress_at = time.monotonic()
            elif time.monotonic() - self._progress_at > self._timeout:
                what = f"{len(self._deliver)} requests wait" if self._deliver else "changed limits wait"
                self.fail(f"no step in {self._timeout:g} s while {what}")
                return
