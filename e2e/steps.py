"""Progress for long work: every step says what it does, and afterwards how long it took.

Standard library only: it runs before there is a virtual environment.
"""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

OUT = Path(__file__).parent / "out"


class Steps:
    """Prints numbered steps and keeps their seconds under e2e/out, also across two processes of one command."""

    def __init__(self, name: str, fresh: bool = True) -> None:
        self._file = OUT / f"{name}.steps.json"
        self.seconds: dict[str, float] = {}
        if not fresh and self._file.exists():
            self.seconds = json.loads(self._file.read_text())

    @contextmanager
    def step(self, key: str, text: str) -> Iterator[None]:
        """Runs the body as one step. A body that raises is reported as failed, with its time."""
        say(f"{text} ...")
        start = time.monotonic()
        try:
            yield
        except BaseException:
            say(f"{key}: FAILED after {time.monotonic() - start:.1f} s")
            raise
        self.seconds[key] = round(time.monotonic() - start, 1)
        OUT.mkdir(exist_ok=True)
        self._file.write_text(json.dumps(self.seconds))
        say(f"{key}: done in {self.seconds[key]:.1f} s")

    @property
    def total(self) -> float:
        return round(sum(self.seconds.values()), 1)


def say(text: str) -> None:
    """One line of progress, at once."""
    print(f"\033[1m==>\033[0m {text}" if sys.stdout.isatty() else f"==> {text}", flush=True)
