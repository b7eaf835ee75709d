"""The engine's end of the socket to the HTTP process."""

import os
import select
import socket

from busload_runtime.engine.messages import FromEngine, ToEngine
from busload_runtime.engine.wire import RECEIVE_BYTES, FrameReader, FrameWriter

MESSAGES_PER_TURN = 256
"""Messages taken in between two steps at most; the rest waits."""

_SEND_SECONDS = 1.0  # between two looks at a parent that does not read


class LinkClosed(Exception):
    """The HTTP process closed the socket or is gone."""


class Link:
    """Receives `ToEngine`, sends `FromEngine`. All methods raise `LinkClosed` once the HTTP process is gone."""

    def __init__(self, connection: socket.socket) -> None:
        self._parent = os.getppid()
        self._reader: FrameReader[ToEngine] = FrameReader(ToEngine)
        self._writer = FrameWriter()
        self._socket = connection
        self._socket.settimeout(_SEND_SECONDS)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        if any(events & select.POLLHUP for _, events in self._poll.poll(0)):
            raise LinkClosed("the HTTP process is gone")
        self._woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll.register(self._woken, select.POLLIN)

    def receive(self, seconds: float) -> list[ToEngine]:
        """Waits up to `seconds` for a message, or until `wake`; returns those that are there, `MESSAGES_PER_TURN` at
        most."""
        self._look_for_parent()
        if not self._reader.has_frame:
            for descriptor, _ in self._poll.poll(seconds * 1000):
                if descriptor == self._woken:
                    os.eventfd_read(self._woken)
                else:
                    self._read()
        return self._reader.take(MESSAGES_PER_TURN)

    def wake(self) -> None:
        """Ends a `receive` that waits, or the next one. From any thread."""
        os.eventfd_write(self._woken, 1)

    def send(self, message: FromEngine) -> None:
        """Sends a message; waits while the HTTP process is behind by a full socket."""
        left = memoryview(self._writer.frame(message))
        try:
            while left:
                try:
                    left = left[self._socket.send(left) :]
                except TimeoutError:
                    self._look_for_parent()
        except OSError:
            raise LinkClosed("the HTTP process closed the socket") from None

    def close(self) -> None:
        """What was sent stays readable for the HTTP process."""
        self._socket.close()

    def _read(self) -> None:
        try:
            data = self._socket.recv(RECEIVE_BYTES)
        except OSError:
            data = b""
        if not data:
            raise LinkClosed("the HTTP process closed the socket")
        self._reader.feed(data)

    def _look_for_parent(self) -> None:
        if self._parent != os.getppid():
            raise LinkClosed("the HTTP process is gone")
