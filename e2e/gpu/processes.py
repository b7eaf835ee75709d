"""The processes of a section: started, started again behind a unit that ended one, and ended when the time is up."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .sections import Section

GPU_IS_GONE = 3
"""Exit code of a worker after a unit that failed, when the GPU answers no more: a new process may find it again."""


def run_section(section: Section, output: Path, bandwidth: float, deadline: float) -> dict[str, Any]:
    """Its processes, started again behind a unit that ended one, until all is done or the time is."""
    began = time.monotonic()
    total = len(section.units())
    of = min(section.processes, total)
    running = {shard: _start(section.name, shard, of, output, bandwidth) for shard in range(of)}
    cut = False
    told = began
    while running:
        time.sleep(0.2)
        now = time.monotonic()
        for shard, process in list(running.items()):
            if now > deadline:
                process.kill()
                process.wait()
                cut = True
                del running[shard]
            elif process.poll() is not None:
                del running[shard]
                if process.returncode and (next_unit := _after_crash(output, section.name, shard, of, process)) < total:
                    running[shard] = _start(section.name, next_unit, of, output, bandwidth)
        if now - told > 15:
            told = now
            done = sum("ends" in line for line in _lines(output, f"{section.name}-*"))
            print(f"    {done} of {total} after {now - began:.0f} s", flush=True)
    lines = _lines(output, f"{section.name}-*")
    ends = [line for line in lines if "ends" in line]
    return {
        "state": f"cut off after {len(ends)} of {total}" if cut else "done",
        "seconds": time.monotonic() - began,
        "rows": [row for line in sorted(lines, key=_unit) for row in line.get("rows", [])],
        "failures": [{"unit": line["unit"], "error": line["error"]} for line in ends if "error" in line],
    }


def _unit(line: dict[str, Any]) -> int:
    """The number of the unit that a line is about."""
    return int(next(line[name] for name in ("begins", "part_of", "ends") if name in line))


def _start(name: str, first: int, of: int, output: Path, bandwidth: float) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-m", "e2e.gpu", "--output", str(output), "--bandwidth", repr(bandwidth)]
    log = (output / f"{name}.log").open("ab")
    with log:
        return subprocess.Popen([*argv, "--worker", name, str(first), str(of)], stdout=log, stderr=log)


def _after_crash(output: Path, name: str, shard: int, of: int, process: subprocess.Popen[bytes]) -> int:
    """The unit to go on with behind the one that a process ended in, which is noted as failed."""
    lines = _lines(output, f"{name}-{shard}")
    begun = [(int(line["begins"]), line["unit"]) for line in lines if "begins" in line]
    ended = {int(line["ends"]) for line in lines if "ends" in line}
    if process.returncode == GPU_IS_GONE:
        return begun[-1][0] + of
    unfinished = next((one for one in begun if one[0] not in ended), None)
    index, unit = unfinished or (shard, "start")
    line = {"ends": index, "unit": unit, "error": f"the process ended with {process.returncode}; see {name}.log"}
    with (output / f"{name}-{shard}.jsonl").open("a") as out:
        out.write(json.dumps(line) + "\n")
    # One that came to no unit would come to none again.
    return sys.maxsize if unfinished is None else index + of


def _lines(output: Path, name: str) -> list[dict[str, Any]]:
    found = []
    for file in sorted(output.glob(f"{name}.jsonl")):
        for text in file.read_text().splitlines():
            try:
                found.append(json.loads(text))
            except ValueError:  # half a line: its process was ended while it wrote
                continue
    return found
