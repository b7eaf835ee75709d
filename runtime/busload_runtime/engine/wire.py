"""How messages travel between the two processes: msgpack in frames over a Unix stream socket.

A frame is the length of its content (4 bytes, little-endian) and the content. Plain sockets, because a message is sent
for every step while all cores compute: a library with sending and receiving threads wakes two more of them each time.
"""

from typing import Any, Generic, TypeVar

import msgspec

Message = TypeVar("Message")

RECEIVE_BYTES = 1 << 18
"""Ample for all that comes between two steps; more takes another call."""

_HEADER = 4


class FrameWriter:
    """Encodes messages."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._buffer = bytearray(_HEADER)

    def frame(self, message: msgspec.Struct) -> bytearray:
        """The message as a frame, in a buffer that the next call overwrites."""
        self._encoder.encode_into(message, self._buffer, _HEADER)
        self._buffer[:_HEADER] = (len(self._buffer) - _HEADER).to_bytes(_HEADER, "little")
        return self._buffer


class FrameReader(Generic[Message]):
    """Cuts what was received into messages of the given type (a union of tagged structs)."""

    def __init__(self, kind: Any) -> None:
        self._decode = msgspec.msgpack.Decoder(kind).decode
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        """Adds received bytes: any part of any number of frames."""
        self._buffer += data

    @property
    def has_frame(self) -> bool:
        """Whether `take` would return a message."""
        buffer = self._buffer
        return len(buffer) >= _HEADER and len(buffer) >= _HEADER + int.from_bytes(buffer[:_HEADER], "little")

    def take(self, most: int) -> list[Message]:
        """The oldest messages that are whole, so many at most. Raises `msgspec.MsgspecError` for anything else."""
        messages: list[Message] = []
        buffer, start = self._buffer, 0
        with memoryview(buffer) as view:
            while len(messages) < most and len(buffer) - start >= _HEADER:
                content = start + _HEADER
                end = content + int.from_bytes(view[start:content], "little")
                if end > len(buffer):
                    break
                messages.append(self._decode(view[content:end]))
                start = end
        del buffer[:start]
        return messages
