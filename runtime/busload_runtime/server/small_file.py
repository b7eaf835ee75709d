"""Reading a small file that somebody else writes: at once and in little memory, whatever lies at the path."""

import errno
import os
import stat
from pathlib import Path


def read_small_file(path: Path, most: int) -> bytes:
    """Content of the file, cut one byte beyond `most`. Raises `OSError`, also for what is not a regular file."""
    with open(path, "rb", opener=_open_without_waiting) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "Not a regular file")
        return file.read(most + 1)


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a FIFO would wait for a writer, and the whole server with it
