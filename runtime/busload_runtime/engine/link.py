"""The engine's end of the socket to the HTTP process."""

import math
import os
from pathlib import Path

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from busload_runtime.engine.messages import FromEngine, ToEngine

CONNECT_MILLISECONDS = 10_000
MESSAGES_PER_TURN = 256
"""Messages taken in between two steps at most; the rest waits in the socket."""

_QUEUE = 4096  # messages per direction; a full queue makes the sender wait


class LinkClosed(Exception):
    """The HTTP process closed the socket or is gone."""


class Link:
    """Receives `ToEngine`, sends `FromEngine`. All methods raise `LinkClosed` once the HTTP process is gone."""

    def __init__(self, path: Path) -> None:
        self._parent = os.getppid()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        # IMMEDIATE: queue only for a peer that is there, so that a wrong path is an error and not a silent wait.
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.SNDHWM, _QUEUE)
        self._socket.setsockopt(zmq.RCVHWM, _QUEUE)
        self._socket.setsockopt(zmq.LINGER, 2000)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._socket.connect(f"ipc://{path}")
        if not self._monitor.poll(CONNECT_MILLISECONDS):
            self._context.destroy(linger=0)
            raise LinkClosed(f"no HTTP process listens on {path}")
        recv_monitor_message(self._monitor)

    def receive(self, seconds: float) -> list[ToEngine]:
        """Waits up to `seconds` for a message; returns those that are there, `MESSAGES_PER_TURN` at most."""
        messages: list[ToEngine] = []
        if self._parent != os.getppid():
            raise LinkClosed("the HTTP process is gone")
        ready = dict(self._poller.poll(math.ceil(seconds * 1000)))
        if self._socket in ready:
            try:
                while len(messages) < MESSAGES_PER_TURN:
                    messages.append(self._decoder.decode(self._socket.recv(zmq.NOBLOCK)))
            except zmq.Again:
                pass
        if self._monitor in ready:
            raise LinkClosed("the HTTP process closed the socket")
        return messages

    def send(self, message: FromEngine) -> None:
        """Queues a message; waits while the HTTP process is behind by a full queue."""
        data = self._encoder.encode(message)
        while not self._socket.poll(1000, zmq.POLLOUT):
            if self._parent != os.getppid() or self._monitor.poll(0):
                raise LinkClosed("the HTTP process is gone")
        self._socket.send(data)

    def close(self) -> None:
        """Delivers what is queued, for two seconds at most."""
        self._socket.disable_monitor()
        self._context.destroy(linger=2000)
