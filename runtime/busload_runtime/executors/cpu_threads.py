"""How many threads an engine should run: what affinity and the container's CPU quota give."""

import math
import os
from collections.abc import Iterator
from pathlib import Path

from busload_runtime.executors.errors import ExecutorError

_MAX_THREADS = 1024


def usable_threads(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """`BUSLOAD_THREADS`, else the smaller of this process's CPUs and its quota, at least 1.

    A quota of 1.5 CPUs gives one thread: two would be stopped together for a quarter of every period, and at each
    barrier the one that still runs waits for the other. Raises `ExecutorError` for a bad `BUSLOAD_THREADS`.
    """
    if text := os.environ.get("BUSLOAD_THREADS"):
        if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= _MAX_THREADS:
            raise ExecutorError(
                f"BUSLOAD_THREADS is {text!r:.80}; must be an integer from 1 to {_MAX_THREADS}, or unset"
            )
        return int(text)
    quota = min(_quotas(proc, cgroups), default=math.inf)
    return max(1, min(len(os.sched_getaffinity(0)), math.floor(min(quota, _MAX_THREADS))))


def _quotas(proc: Path, cgroups: Path) -> Iterator[float]:
    """CPU quotas, in CPUs, of this process's cgroup and its ancestors."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            for folder in _upward(cgroups, path):
                yield from _ratio(_words(folder / "cpu.max"))
        elif "cpu" in controllers.split(","):
            for folder in _upward(cgroups / "cpu", path):
                yield from _ratio(_words(folder / "cpu.cfs_quota_us") + _words(folder / "cpu.cfs_period_us"))


def _upward(root: Path, path: str) -> Iterator[Path]:
    """A cgroup's folder and those above it. In a container the path may be the host's: then only the root exists."""
    folder = root / path.lstrip("/")
    while folder != root and root in folder.parents:
        yield folder
        folder = folder.parent
    yield root


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []


def _ratio(words: list[str]) -> Iterator[float]:
    """Quota over period; nothing for "max" (v2), -1 (v1) or a file that is not there."""
    if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[0]) and int(words[1]):
        yield int(words[0]) / int(words[1])
