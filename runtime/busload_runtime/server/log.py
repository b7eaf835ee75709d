"""Lines on stderr. A log that cannot be written (disk full, reader gone) must never stop what it tells about."""

import contextlib
import os

_STDERR = 2


def write_line(text: str) -> None:
    """Writes one line; drops it when stderr takes none.

    Straight to the descriptor: a buffered stream would keep a line that failed, fail again with the next one, and turn
    the exit code into 120.
    """
    with contextlib.suppress(OSError):
        os.write(_STDERR, f"{text}\n".encode(errors="backslashreplace"))
