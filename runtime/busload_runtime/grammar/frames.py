"""How texts travel to the checker process and back: a length (4 bytes, little-endian) and that many bytes of UTF-8."""

_LENGTH_BYTES = 4


def frame(content: bytes) -> bytes:
    return len(content).to_bytes(_LENGTH_BYTES, "little") + content


def length_of(head: bytes) -> int:
    """Bytes that follow a frame's first four."""
    return int.from_bytes(head, "little")
