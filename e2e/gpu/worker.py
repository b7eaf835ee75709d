"""A process that runs units of one section. It writes a line of JSON before and after each, so that whoever started it
knows where a crash came from: an illegal access ends everything that a process does on its GPU."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .place import Place
from .processes import GPU_IS_GONE
from .sections import Context, Section


@dataclass(frozen=True)
class Share:
    """Which units: every `of`-th from the `first` one on."""

    first: int
    of: int


def run(section: Section, share: Share, lines: Path, bandwidth: float, tables: Path) -> None:
    """All units of a share, appended to `lines`."""
    context = Context(Place("cuda", torch.cuda.get_device_name(0)), bandwidth, tables)
    units = section.units()
    with lines.open("a", buffering=1) as out:

        def tell(**line: Any) -> None:
            out.write(json.dumps(line) + "\n")

        for index in range(share.first, len(units), share.of):
            unit = units[index]
            tell(begins=index, unit=unit.name)
            began = time.monotonic()
            try:
                for row in unit.run(context):
                    tell(part_of=index, unit=unit.name, rows=[row])
            except Exception as error:  # one unit's problem; a device that is gone shows itself in the next
                tell(ends=index, unit=unit.name, error=f"{type(error).__name__}: {error}"[:500])
                if not _device_lives():
                    sys.exit(GPU_IS_GONE)
            else:
                tell(ends=index, unit=unit.name, seconds=round(time.monotonic() - began, 2))


def _device_lives() -> bool:
    try:
        torch.cuda.synchronize()
        torch.zeros(1, device="cuda").item()
    except RuntimeError:
        return False
    return True
