"""Reading the limits file: whatever lies at the path, it answers at once and in little memory."""

import errno
import os
import stat
from pathlib import Path

from busload_runtime.contract import LimitsDocument, LimitsError, parse_limits

_MAX_BYTES = 2**16  # a document has some hundred


def read_limits(path: Path) -> bytes:
    """Content of the file, cut a little beyond what is accepted. Raises `OSError` for what is not a regular file."""
    with open(path, "rb", opener=_open_without_waiting) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "Not a regular file")
        return file.read(_MAX_BYTES + 1)


def parse_limits_file(content: bytes) -> LimitsDocument:
    """The document in what `read_limits` returned. Raises `LimitsError`."""
    if len(content) > _MAX_BYTES:
        raise LimitsError(f"limits document is larger than {_MAX_BYTES} bytes")
    try:
        return parse_limits(content.decode())
    except UnicodeDecodeError as error:
        raise LimitsError(f"limits document is not UTF-8: {error.reason} at byte {error.start}") from None


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a FIFO would wait for a writer, and the whole server with it
