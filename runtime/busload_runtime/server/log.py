"""Lines on stderr. A log that takes none (disk full, reader gone or stuck) must never stop what it tells about."""

import contextlib
import logging
import os
import select

_STDERR = 2
# A pipe that is writable takes so much at once without waiting (pipe(7)).
_PIECE = select.PIPE_BUF


class _Log:
    """Writes whole lines, or drops them."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._poll.register(_STDERR, select.POLLOUT)
        self._dropped = 0

    def write(self, line: bytes) -> None:
        if self._dropped:
            note = b"busload serve: %d log lines were dropped, for nobody read them\n" % self._dropped
            if not self._try(note):
                self._dropped += 1
                return
            self._dropped = 0
        self._dropped += not self._try(line)

    def _try(self, line: bytes) -> bool:
        """Straight to the descriptor: a buffered stream would keep a line that failed, fail again with the next one,
        and turn the exit code into 120. In pieces, each only when it is taken at once."""
        with contextlib.suppress(OSError):
            for start in range(0, len(line), _PIECE):
                if not any(events & select.POLLOUT for _, events in self._poll.poll(0)):
                    return False
                os.write(_STDERR, line[start : start + _PIECE])
            return True
        return False


class _Handler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        write_line(f"busload serve: {record.name}: {self.format(record)}")


_log = _Log()


def write_line(text: str) -> None:
    """Writes one line; drops it when stderr takes none, which the next line that is taken tells."""
    _log.write(f"{text}\n".encode(errors="backslashreplace"))


def say(text: str) -> None:
    """One line for the person or the log that watches the start."""
    write_line(f"busload serve: {text}")


def claim_standard_streams() -> None:
    """Opens those of stdin, stdout and stderr that are closed. The next file to be opened would take the place of one,
    and a client's connection, or the engine's, would get what is written there."""
    for stream in (0, 1, _STDERR):
        try:
            os.fstat(stream)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest that is free


def log_through_lines() -> None:
    """What libraries have to say goes the same way: a handler of `logging` would wait for a reader."""
    logging.basicConfig(level=logging.WARNING, handlers=[_Handler()], force=True)
