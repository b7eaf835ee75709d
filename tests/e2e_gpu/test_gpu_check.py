"""The check for machines with a GPU, as far as a machine without one can tell."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from e2e.gpu import processes, report

ROOT = Path(__file__).parents[2]
CHECK = ROOT / "e2e" / "gpu" / "check.sh"


def check(*arguments: str, blocked: tuple[str, ...] = (), tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """The script in a process that cannot import what a machine with torch alone does not have."""
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({blocked!r}))\n")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"PYTHON": sys.executable, "PYTHONPATH": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    return subprocess.run([CHECK, *arguments], capture_output=True, text=True, timeout=280, env=environment)


def test_the_dry_run_passes_with_torch_triton_and_numpy_alone(tmp_path: Path) -> None:
    others = ("pydantic", "typer", "msgspec", "gguf", "tokenizers", "safetensors", "fastapi", "jinja2", "threadpoolctl")
    found = check("--dry-run", "--compiles", "1", blocked=others, tmp_path=tmp_path)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "nothing was launched" in found.stdout
    assert "compiled _rms_norm_kernel" in found.stdout
    assert "serve: a tiny model" in found.stdout


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    found = check("--dry-run", blocked=("triton",), tmp_path=tmp_path)
    assert (found.returncode, found.stdout) == (2, "")
    assert "the check needs Python with torch 2.11 or later, Triton and numpy" in found.stderr


class Units:
    """A section of numbered units, run by `WORKER` instead of a GPU's."""

    name, title, seconds = "fake", "Fake", 60

    def __init__(self, count: int, processes: int) -> None:
        self.count, self.processes = count, processes

    def units(self) -> list[int]:
        return list(range(self.count))


WORKER = """
import json, os, sys, time
file, first, of, count = sys.argv[1], *map(int, sys.argv[2:5])
with open(file, "a", buffering=1) as out:
    for unit in range(first, count, of):
        out.write(json.dumps({"begins": unit, "unit": f"u{unit}"}) + "\\n")
        if unit == 1:
            os.abort()
        if unit == 4:
            out.write(json.dumps({"ends": unit, "unit": "u4", "error": "CUDA: gone"}) + "\\n")
            sys.exit(3)
        if unit == 7:
            time.sleep(600)
        out.write(json.dumps({"part_of": unit, "unit": f"u{unit}", "rows": [{"unit": unit}]}) + "\\n")
        if unit == 5:
            os.abort()
        out.write(json.dumps({"ends": unit, "unit": f"u{unit}"}) + "\\n")
"""


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, count: int, shards: int, seconds: float) -> dict[str, Any]:
    def start(name: str, first: int, of: int, output: Path, bandwidth: float) -> subprocess.Popen[bytes]:
        file = output / f"{name}-{first % of}.jsonl"
        argv = [sys.executable, "-c", WORKER.replace("\\\\n", "\\n"), str(file), str(first), str(of), str(count)]
        return subprocess.Popen(argv, stderr=subprocess.DEVNULL)

    monkeypatch.setattr(processes, "_start", start)
    section: Any = Units(count, shards)
    return processes.run_section(section, folder, 0.0, processes.time.monotonic() + seconds)


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_a_unit_that_ends_its_process_does_not_end_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, shards: int
) -> None:
    found = run(monkeypatch, tmp_path, 7, shards, 60)
    assert [row["unit"] for row in found["rows"]] == [0, 2, 3, 5, 6]
    errors = {failure["unit"]: failure["error"] for failure in found["failures"]}
    died = "the process ended with -6; see fake.log"
    assert errors == {"u1": died, "u4": "CUDA: gone", "u5": died}
    assert found["state"] == "done"


def test_what_was_found_before_the_time_was_up_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = run(monkeypatch, tmp_path, 9, 1, 5)
    assert [row["unit"] for row in found["rows"]] == [0, 2, 3, 5, 6]
    assert found["state"] == "cut off after 7 of 9"


def test_a_process_that_comes_to_no_unit_is_not_started_for_ever(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(processes, "_start", lambda *_: subprocess.Popen([sys.executable, "-c", "raise SystemExit(1)"]))
    section: Any = Units(3, 1)
    found = processes.run_section(section, tmp_path, 0.0, processes.time.monotonic() + 60)
    assert [failure["error"] for failure in found["failures"]] == ["the process ended with 1; see fake.log"]


def test_targets_are_printed_beside_what_was_measured(tmp_path: Path) -> None:
    floors = [
        {"what": "8B qkv", "format": "w8a16 int8", "rows": 1, "share_of_copy": 0.85},
        {"what": "8B down", "format": "w8a16 int8", "rows": 16, "share_of_copy": 0.5},
        {"what": "KV read, 1 x 8192 tokens", "format": "int8", "rows": 1, "share_of_copy": 0.9},
        {"what": "8B qkv", "format": "w16a16", "rows": 512, "share_of_copy": 0.1, "share_of_cublas": float("nan")},
    ]
    serve = [{"model": "8B", "batch": 1, "share_of_floor": 0.8}, {"model": "8B", "batch": 8, "share_of_floor": 0.1}]
    found = {
        name: {"state": "done", "seconds": 1.0, "rows": rows, "failures": []}
        for name, rows in (("floors", floors), ("serve", serve))
    }
    report.write(tmp_path, found, {"floors": "Floors", "serve": "Serve"})
    text = (tmp_path / "results.txt").read_text()
    assert "linears at <= 16 rows                        at least 80%: MISSED by 1 of 2, from 50% to 85%" in text
    assert "KV reads                                     at least 80%: reached by 1 of 1, from 90% to 90%" in text
    assert "8B shape, batch 1                            at least 75%: reached by 1 of 1, from 80% to 80%" in text
    assert "device computes" in text
    assert "not measured" in text
    assert json.loads((tmp_path / "results.json").read_text())["floors"]["rows"][3]["share_of_cublas"] == "nan"
