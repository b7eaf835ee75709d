"""The machine that figures were measured on, and whether it was free."""

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

# The instructions that decide how fast small models run, most telling first.
_TELLING = ("amx_int8", "avx512_vnni", "avx_vnni", "avx512f", "avx2", "asimddp")
BUSY = 0.05
"""Share of the cores used by others above which a machine does not count as free."""


@dataclass(frozen=True)
class Machine:
    cpu: str
    instructions: tuple[str, ...]
    cores: int
    """That this process may use."""
    memory_gb: float
    load: float
    """Mean of the last minute, at the start."""

    def __str__(self) -> str:
        instructions = " ".join(self.instructions) or "no vector instructions known here"
        return f"{self.cpu}, {self.cores} cores, {instructions}, {self.memory_gb:.0f} GB; load average {self.load:.1f}"


def describe() -> Machine:
    text = Path("/proc/cpuinfo").read_text()
    named = re.search(r"^model name\s*:\s*(.+)$", text, flags=re.MULTILINE)
    listed = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, flags=re.MULTILINE)
    flags = set(listed[1].split()) if listed else set()
    return Machine(
        cpu=named[1] if named else os.uname().machine,
        instructions=tuple(name for name in _TELLING if name in flags),
        cores=len(os.sched_getaffinity(0)),
        memory_gb=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9,
        load=os.getloadavg()[0],
    )


def busy_share(seconds: float = 1.0) -> float:
    """Share of all cores in use by anybody over the next `seconds`. Call it while nothing of one's own runs."""
    before = _ticks()
    time.sleep(seconds)
    busy, total = (b - a for a, b in zip(before, _ticks(), strict=True))
    return busy / total if total else 0.0


def _ticks() -> tuple[int, int]:
    """Clock ticks since boot of all cores: (not idle, all). Stolen ones are not idle: somebody else had the core."""
    user, nice, system, idle, wait, *others = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9])
    busy = user + nice + system + sum(others)
    return busy, busy + idle + wait


def warning(busy: float) -> str | None:
    """What to say when others used this share of the cores."""
    if busy <= BUSY:
        return None
    return (
        f"the machine is not idle: others use {busy:.0%} of its cores. Figures are too low, and ratios too good "
        "against servers that spin while they wait; measure again when it is idle"
    )
