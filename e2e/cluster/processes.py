"""Background processes that outlive the command that started them, and how to know them again.

A process id alone proves nothing: after a crash or a reboot it may belong to somebody else. So a pid file here holds
the process's own /proc/PID/stat line, which has its start time, and the machine's boot id. The process writes it about
itself before it becomes the program, so there is no moment at which it runs and no file knows of it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .shell import Failure, last_lines, wait_until

PROC = Path("/proc")
BOOT_ID = "sys/kernel/random/boot_id"
RECORD_AND_EXEC = (
    'cat /proc/$$/stat /proc/sys/kernel/random/boot_id > "$1.new" && mv "$1.new" "$1" && shift && exec "$@"'
)


@dataclass(frozen=True)
class Process:
    """One process of one boot of this machine: pid, start time in clock ticks since boot, boot id."""

    pid: int
    started: int
    boot: str

    def alive(self, proc: Path = PROC) -> bool:
        return find(self.pid, proc) == self

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Sends a signal, unless the process has ended."""
        if self.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def parse_stat(line: str) -> tuple[int, str, int, int]:
    """(pid, state, parent, start time) of a /proc/PID/stat line; the name inside may hold spaces and parentheses.

    Raises ValueError for anything else. Fields as in proc(5): state is number 3, parent 4, start time 22.
    """
    head, _, tail = line.rpartition(")")
    fields = tail.split()
    if len(fields) < 20:
        raise ValueError(f"no /proc/PID/stat line: {line!r}")
    return int(head.split(" ", 1)[0]), fields[0], int(fields[1]), int(fields[19])


def find(pid: int, proc: Path = PROC) -> Process | None:
    """The running process with this id, or None. A zombie has ended already."""
    try:
        _, state, _, started = parse_stat((proc / str(pid) / "stat").read_text())
        return None if state in "ZX" else Process(pid, started, (proc / BOOT_ID).read_text().strip())
    except (OSError, ValueError):
        return None


def read(pid_file: Path, proc: Path = PROC) -> Process | None:
    """The process that wrote `pid_file`, if it still runs; None for a stale, half or missing file."""
    try:
        stat, boot = pid_file.read_text().strip().rsplit("\n", 1)
        pid, _, _, started = parse_stat(stat)
    except (OSError, ValueError):
        return None
    process = Process(pid, started, boot)
    return process if process.alive(proc) else None


def children(pid: int, proc: Path = PROC) -> list[int]:
    found = []
    for entry in proc.iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError):
                if parse_stat((entry / "stat").read_text())[2] == pid:
                    found.append(int(entry.name))
    return found


def start(pid_file: Path, argv: Sequence[str | Path], log: Path) -> Process:
    """Starts a program in a session of its own, its output appended to `log`. Raises Failure if it does not start."""
    pid_file.unlink(missing_ok=True)
    with log.open("ab") as output:
        child = subprocess.Popen(
            ["/bin/sh", "-c", RECORD_AND_EXEC, "sh", str(pid_file), *map(str, argv)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    wait_until(f"{argv[0]} to start", lambda: pid_file.exists() or child.poll() is not None, 10, pause=0.02)
    process = read(pid_file)
    if process is None:
        raise Failure(
            f"{argv[0]} ended at once; its last words, in {log}:\n{last_lines(log.read_text(errors='replace'))}"
        )
    return process


def stop(pid_file: Path, seconds: float = 20) -> bool:
    """Kills the process of `pid_file` and waits for its end; removes the file. False if it was not running."""
    process = read(pid_file)
    if process:
        process.kill()
        wait_until(f"process {process.pid} to end", lambda: not process.alive(), seconds, pause=0.05)
    pid_file.unlink(missing_ok=True)
    return process is not None
