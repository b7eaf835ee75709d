"""Reading the limits file."""

from pathlib import Path

from busload_runtime.contract import LimitsDocument, LimitsError, parse_limits
from busload_runtime.server.small_file import read_small_file

_MAX_BYTES = 2**16  # a document has some hundred


def read_limits(path: Path) -> bytes:
    """Content of the file, cut a little beyond what is accepted. Raises `OSError` for what is not a regular file."""
    return read_small_file(path, _MAX_BYTES)


def parse_limits_file(content: bytes) -> LimitsDocument:
    """The document in what `read_limits` returned. Raises `LimitsError`."""
    if len(content) > _MAX_BYTES:
        raise LimitsError(f"limits document is larger than {_MAX_BYTES} bytes")
    try:
        return parse_limits(content.decode())
    except UnicodeDecodeError as error:
        raise LimitsError(f"limits document is not UTF-8: {error.reason} at byte {error.start}") from None
