"""What the check found, as JSON and as tables that a person reads. Written after every section, so that a run that is
cut off keeps what it has."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class Target:
    section: str
    what: str
    column: str
    least: float
    is_about: Callable[[Row], bool]


TARGETS = (
    Target("floors", "linears at <= 16 rows", "share_of_copy", 0.80, lambda row: row["rows"] <= 16 and not _is_kv(row)),
    Target("floors", "KV reads", "share_of_copy", 0.80, lambda row: _is_kv(row)),
    Target("floors", "linears at >= 512 rows, of cuBLAS in bf16", "share_of_cublas", 0.85, lambda row: True),
    Target("serve", "8B shape, batch 1", "share_of_floor", 0.75, lambda row: (row["model"], row["batch"]) == ("8B", 1)),
    Target("serve", "time of a step in which the device computes", "device_busy", 0.90, lambda row: True),
)


def _is_kv(row: Row) -> bool:
    return str(row["what"]).startswith("KV")


def targets(found: dict[str, Any]) -> list[str]:
    """A line for each target: how many rows reach it, and the worst and the best."""
    lines = []
    for target in TARGETS:
        rows = [row for row in found.get(target.section, {}).get("rows", []) if row.get(target.column) is not None]
        values = sorted(float(row[target.column]) for row in rows if target.is_about(row))
        head = f"  {target.what:<44} at least {target.least:.0%}"
        if not values:
            lines.append(f"{head}: not measured")
            continue
        reached = sum(value >= target.least for value in values)
        state = "reached" if reached == len(values) else "MISSED"
        lines.append(f"{head}: {state} by {reached} of {len(values)}, from {values[0]:.0%} to {values[-1]:.0%}")
    return lines


def table(rows: list[Row]) -> list[str]:
    """Rows with the same columns under one heading, as wide as they need."""
    lines: list[str] = []
    columns: list[str] = []
    for row in rows:
        if list(row) != columns:
            columns = list(row)
            same = [other for other in rows if list(other) == columns]
            widths = [max(len(name), *(len(cell(name, other[name])) for other in same)) for name in columns]
            lines.append("  " + "  ".join(name.ljust(width) for name, width in zip(columns, widths, strict=True)))
        cells = (cell(name, row[name]).ljust(width) for name, width in zip(columns, widths, strict=True))
        lines.append(("  " + "  ".join(cells)).rstrip())
    return lines


def cell(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "NO"
    if isinstance(value, float):
        if name == "copy_bandwidth":
            return f"{value / 1e9:.0f} GB/s"
        if name in ("relative_error", "tolerance"):
            return f"{value:.1e}"
        if name.startswith(("share", "device_busy")):
            return f"{value:.0%}"
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "-"
    return "-" if value is None else str(value)


def write(folder: Path, found: dict[str, Any], titles: dict[str, str]) -> None:
    """results.json and results.txt."""
    _replace(folder / "results.json", json.dumps(_finite(found), indent=1, allow_nan=False) + "\n")
    text = []
    for name, title in titles.items():
        if name not in found:
            continue
        section = found[name]
        text += [f"{title} ({section['state']}, {section['seconds']:.0f} s)"]
        text += table(section["rows"])
        text += [f"  FAILED {one['unit']}: {one['error']}" for one in section["failures"]]
        text.append("")
    text += ["Targets", *targets(found)]
    _replace(folder / "results.txt", "\n".join(text) + "\n")


def _finite(value: Any) -> Any:
    """JSON has no NaN."""
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _replace(file: Path, text: str) -> None:
    part = file.with_name(file.name + ".part")
    part.write_text(text)
    part.replace(file)
