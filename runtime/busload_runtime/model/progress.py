"""How far the loading of weights is, on stderr, for those who wait: nothing at all while it is fast."""

import contextlib
import os
import select
import time
from collections.abc import Callable

EVERY_SECONDS = 2.0
_STDERR = 2


def _write(line: str) -> None:
    """A log that takes no more, or that nobody reads, must not stop the loading."""
    with contextlib.suppress(OSError):
        poll = select.poll()
        poll.register(_STDERR, select.POLLOUT)
        if any(events & select.POLLOUT for _, events in poll.poll(0)):
            os.write(_STDERR, f"{line}\n".encode(errors="backslashreplace")[: select.PIPE_BUF])


class LoadProgress:
    """A line every `EVERY_SECONDS`, and one at the end if there were any. For one thread."""

    def __init__(
        self,
        source: str,
        total_bytes: int,
        clock: Callable[[], float] = time.monotonic,
        write: Callable[[str], None] = _write,
    ) -> None:
        self._source, self._total = source, total_bytes
        self._clock, self._write = clock, write
        self._done = 0
        self._began = self._told = clock()

    def add(self, num_bytes: int) -> None:
        """So many more bytes are loaded."""
        self._done += num_bytes
        now = self._clock()
        if now - self._told < EVERY_SECONDS or self._done >= self._total:
            return
        self._told = now
        left = (now - self._began) * (self._total - self._done) / max(1, self._done)
        self._write(
            f"loading {self._source}: {100 * self._done // max(1, self._total)}% of {self._total / 1e6:.0f} MB, "
            f"about {left:.0f} s left"
        )

    def finish(self) -> None:
        if self._told > self._began:
            seconds = self._clock() - self._began
            self._write(f"loading {self._source}: {self._total / 1e6:.0f} MB in {seconds:.1f} s")
