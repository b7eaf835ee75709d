"""What every step needs: run a command, report progress with seconds, write a file whole, hold a lock, wait."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
NETWORK_HINT = (
    "see whether this machine reaches the network (a proxy goes into HTTPS_PROXY, mirrors into the settings of apt, "
    "pip and Go), then run it again: what was fetched is kept"
)


class Failure(Exception):
    """Something a person must know: what failed and what to do about it. Printed without a traceback."""


def last_lines(text: str, count: int = 15) -> str:
    return "\n".join(text.rstrip().splitlines()[-count:])


def run(
    argv: Sequence[str | Path],
    *,
    check: bool = True,
    stdin: str | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout: float | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end and captures its output.

    Raises Failure, with the end of the command's own words, when `check` is set and it did not return 0, when it is
    not installed, and when it ran past `timeout` seconds.
    """
    command = shlex.join(map(str, argv))
    try:
        done = subprocess.run(
            list(map(str, argv)), input=stdin, env=env, cwd=cwd, timeout=timeout, capture_output=True, text=True
        )
    except FileNotFoundError as error:
        raise Failure(f"{argv[0]} is not on this machine (wanted for: {command})") from error
    except subprocess.TimeoutExpired as error:
        raise Failure(f"{command}\nran past {timeout:g} s and was stopped") from error
    if check and done.returncode != 0:
        raise Failure(f"{command}\nended with {done.returncode}:\n{last_lines(done.stderr or done.stdout)}")
    return done


HEARTBEAT_SECONDS = 20.0
DOWNLOADS, PAUSE_SECONDS = 3, 5.0
"""Times that a download is tried, and the pause behind the first failure; behind the second it is twice as long."""
NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


@contextlib.contextmanager
def beating(say: Callable[[float], None], every: float = HEARTBEAT_SECONDS) -> Iterator[None]:
    """Calls `say` with the seconds since the start, again and again until the body ends."""
    began, ended = time.monotonic(), threading.Event()

    def beat() -> None:
        while not ended.wait(every):
            say(time.monotonic() - began)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def downloading(action: Callable[[], T], say: Callable[[str], None], pause: float = PAUSE_SECONDS) -> T:
    """Does what needs the network, again when it fails: servers and ways to them have bad moments.

    Raises the last `Failure`, which then says what to look at.
    """
    for attempt in range(1, DOWNLOADS):
        try:
            return action()
        except Failure as error:
            say(f"{error}\nfailed, attempt {attempt} of {DOWNLOADS}; once more in {attempt * pause:g} s")
            time.sleep(attempt * pause)
    try:
        return action()
    except Failure as error:
        raise Failure(f"{error}\nfailed {DOWNLOADS} times: {NETWORK_HINT}") from error


class Progress:
    """Prints one line per finished step: seconds since the start, the step, and its own seconds.

    `seconds` keeps the durations by step name, in order, for whoever reports them.
    """

    def __init__(self) -> None:
        self.start = time.monotonic()
        self.seconds: dict[str, float] = {}

    def note(self, text: str) -> None:
        print(f"[{time.monotonic() - self.start:7.1f} s] {text}", file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def step(self, name: str, heartbeat: bool = True) -> Iterator[None]:
        """Reports the step once it is done, and while it is not, now and then, for minutes of silence look like a hang.

        `heartbeat` False: the step says itself how far it is.
        """
        began = time.monotonic()
        with (
            beating(lambda seconds: self.note(f"  not yet: {name} ({seconds:.0f} s so far)")) if heartbeat else NOTHING
        ):
            yield
        self.seconds[name] = time.monotonic() - began
        self.note(f"{name} ({self.seconds[name]:.1f} s)")


@contextlib.contextmanager
def exclusive(lock: Path, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Holds an advisory lock on the file `lock`; calls `waiting` once when somebody else has it.

    The kernel lets go of it when its holder ends, however that happens: there is no stale lock to clean up.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def write(path: Path, text: str, mode: int = 0o644) -> None:
    """Writes a whole file or none: a reader, or the next run after a crash, never sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_text(text)
    new.chmod(mode)
    new.replace(path)


def wait_until(what: str, condition: Callable[[], bool], seconds: float, *, hint: str = "", pause: float = 0.2) -> None:
    """Asks `condition` again and again until it holds. Raises Failure after `seconds`, naming what was waited for."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise Failure(f"gave up after {seconds:g} s of waiting for: {what}" + (f"\n{hint}" if hint else ""))
        time.sleep(pause)
