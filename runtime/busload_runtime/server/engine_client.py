"""The HTTP process's end of the wire to the engine process."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable

import msgspec
import zmq

from busload_runtime.contract import Limits
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
    ToEngine,
    TokenOut,
    Tokens,
)
from busload_runtime.server.errors import ApiError

# Messages under way in each direction before the sender has to wait (ZeroMQ high-water mark), and messages that may
# wait for that. Admission bounds submissions long before; this is the backstop for an engine that stops reading.
_WIRE_MESSAGES = 1000
_OUTBOX_MESSAGES = 20_000
_WATCH_SECONDS = 0.25
# Messages taken in or sent before other work gets its turn.
_MESSAGES_PER_TURN = 256
# As plain numbers: `&` on the library's flags costs more than receiving does.
_POLLIN, _POLLOUT = int(zmq.POLLIN), int(zmq.POLLOUT)

Deliver = Callable[[TokenOut], None]


class EngineClient:
    """Sends requests, hands each its tokens, keeps the newest `Stats`, and notices an engine that died or fell silent.

    All methods belong to the event loop's thread. Binds a ZeroMQ PAIR at `ipc://{socket_path}`.
    """

    def __init__(self, socket_path: str, timeout: float, on_stats: Callable[[Stats], None]) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, _WIRE_MESSAGES)
        self._socket.setsockopt(zmq.RCVHWM, _WIRE_MESSAGES)
        self._socket.bind(f"ipc://{socket_path}")
        self._timeout = timeout
        self._on_stats = on_stats
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(FromEngine).decode
        self._outbox: deque[ToEngine] = deque()
        self._turn_due = False
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
        self._loop.add_reader(self._socket.FD, self._turn)
        self._watching = self._loop.create_task(self._watch())
        self._take_turn()

    async def close(self) -> None:
        if self._watching is not None:
            self._loop.remove_reader(self._socket.FD)
            self._watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watching
        self._context.destroy(linger=0)

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
        if len(self._outbox) >= _OUTBOX_MESSAGES:
            raise ApiError(503, "the engine does not take requests at the moment; try again", retry_after=5)
        self._deliver[request.request_id] = deliver
        self._put(request)

    def abort(self, request_id: int) -> None:
        """Ends a request; nothing more is delivered for it."""
        if self._deliver.pop(request_id, None) is not None:
            self._put(Abort(request_id))

    async def apply(self, generation: int, limits: Limits) -> LimitsApplied | LimitsRefused:
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

    def _put(self, message: ToEngine) -> None:
        self._outbox.append(message)
        self._take_turn()

    def _take_turn(self) -> None:
        """Has `_turn` run soon: once, however many messages are put until then."""
        if not self._turn_due and not self._socket.closed:
            self._turn_due = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """Receives and sends what is possible now, without waiting.

        The socket's descriptor tells of changes only, and any use of the socket may swallow the news of another: so a
        turn ends when `EVENTS` says that neither direction moves, as ZeroMQ asks for, or takes another turn.
        """
        self._turn_due = False
        socket = self._socket
        try:
            for _ in range(_MESSAGES_PER_TURN):
                events = 0 if socket.closed else int(socket.getsockopt(zmq.EVENTS))
                if events & _POLLIN:
                    self._dispatch(self._decode(socket.recv(zmq.NOBLOCK)))
                elif events & _POLLOUT and self._outbox:
                    socket.send(self._encode(self._outbox[0]), zmq.NOBLOCK)
                    self._outbox.popleft()
                else:
                    return
        except msgspec.DecodeError as error:
            self.fail(f"the engine sent a message that cannot be read ({error}); are both processes one version?")
        except Exception as error:
            # A wire that broke on this side is as bad as an engine that died: better said than waited for.
            self.fail(f"the wire to the engine failed: {type(error).__name__}: {error}")
        else:
            self._take_turn()

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
