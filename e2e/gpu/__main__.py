"""`python -m e2e.gpu`, which e2e/gpu/check.sh calls: everything that can be known about a GPU in ten minutes."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
OUT = HERE.parent / "out" / "gpu"
SECONDS = 570
"""Of all sections together."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="e2e/gpu/check.sh", description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="everything but launches: works without a GPU")
    parser.add_argument("--output", type=Path, default=OUT, help=f"folder for results (default {OUT})")
    parser.add_argument("--seconds", type=int, default=SECONDS, help=f"time for all (default {SECONDS})")
    parser.add_argument("--only", nargs="+", metavar="SECTION", help="these sections alone; device is always run")
    parser.add_argument("--compiles", type=int, default=12, help="of a dry run: launches to compile (default 12)")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--bandwidth", type=float, default=0.0, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if (problem := _missing()) is not None:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    if chosen.dry_run:
        from .dry_run import dry_run

        return dry_run(chosen.compiles)
    if chosen.worker:
        return _work(chosen)
    return _check(chosen)


def _missing() -> str | None:
    try:
        import numpy  # noqa: F401
        import torch
        import triton  # noqa: F401
    except ImportError as error:
        return f"{error}; the check needs Python with torch 2.11 or later, Triton and numpy, and nothing else"
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < (2, 11):
        return f"torch is {torch.__version__}; the kernels need 2.11 or later"
    return None


def _work(chosen: argparse.Namespace) -> int:
    from busload_kernels.gpu import tiles

    from .sections import sections
    from .worker import Share, run

    name, first, of = chosen.worker
    (section,) = (one for one in sections(os.cpu_count() or 1) if one.name == name)
    folder = Path(tiles.__file__).parent
    lines = chosen.output / f"{name}-{int(first) % int(of)}.jsonl"
    run(section, Share(int(first), int(of)), lines, chosen.bandwidth, folder)
    return 0


def _check(chosen: argparse.Namespace) -> int:
    import torch

    from . import report
    from .processes import run_section
    from .sections import sections

    if not torch.cuda.is_available():
        print("error: no CUDA GPU is visible; --dry-run checks everything but launches without one", file=sys.stderr)
        return 2
    chosen.output.mkdir(parents=True, exist_ok=True)
    for old in chosen.output.glob("*.jsonl"):
        old.unlink()
    wanted = [
        one
        for one in sections(os.cpu_count() or 1)
        if one.name == "device" or not chosen.only or one.name in chosen.only
    ]
    titles = {one.name: one.title for one in wanted}
    began, bandwidth = time.monotonic(), 0.0
    found: dict[str, dict[str, Any]] = {}
    left_over = chosen.seconds - sum(one.seconds for one in wanted)
    for section in wanted:
        limit = section.seconds + left_over
        if limit < 10:
            found[section.name] = {"state": "no time", "seconds": 0.0, "rows": [], "failures": []}
            continue
        print(f"[{time.monotonic() - began:5.0f} s] {section.title}, at most {limit:.0f} s", flush=True)
        at = time.monotonic()
        found[section.name] = run_section(section, chosen.output, bandwidth, at + limit)
        left_over = limit - (time.monotonic() - at)
        if section.name == "device" and found["device"]["rows"]:
            bandwidth = found["device"]["rows"][0]["copy_bandwidth"]
        report.write(chosen.output, found, titles)
    text = (chosen.output / "results.txt").read_text()
    print(text)
    print(f"{chosen.output / 'results.json'} and results.txt; commit the tables in kernels/busload_kernels/gpu/tiles")
    wrong = [row for row in found.get("correctness", {}).get("rows", []) if not row["passed"]]
    failures = sum(len(section["failures"]) for section in found.values())
    return 1 if wrong or failures else 0


if __name__ == "__main__":
    sys.exit(main())
