"""Parts of the measured bars that have a right value on any machine."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from busload_runtime.engine.scheduler import Scheduler
from e2e.bench import machine, serving
from e2e.bench.server import with_byte_code


def test_scheduling_without_the_prefix_cache_does_the_same_work() -> None:
    # Both finish; what the difference costs is the measurement's business.
    assert serving._scheduling_seconds(Scheduler, requests=4) > 0
    assert serving._scheduling_seconds(serving._WithoutPrefixCache, requests=4) > 0


def test_resident_memory_and_cpu_time_of_this_process() -> None:
    before = serving._resident(os.getpid())
    held = bytearray(os.urandom(1 << 20)) * 64
    assert serving._resident(os.getpid()) - before == pytest.approx(len(held), rel=0.2)
    assert serving._cpu_seconds(os.getpid()) == pytest.approx(time.process_time(), abs=0.5)


def test_the_exit_code_says_whether_all_bars_hold(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bars = [serving.Bar("a", "1", "< 2", True), serving.Bar("b", "1", "-", None)]
    monkeypatch.setattr(serving, "CHECKS", {"start": lambda: bars})
    monkeypatch.setattr(machine, "busy_share", lambda: 0.0)
    monkeypatch.setattr("sys.argv", ["serving"])
    assert serving.main() == 0
    bars.append(serving.Bar("c", "3", "< 2", False))
    assert serving.main() == 1
    said = capsys.readouterr().out
    assert "FAIL" in said
    assert "no bar" in said
    assert "warning" not in said


def test_the_machine_describes_itself() -> None:
    here = machine.describe()
    assert here.cores == len(os.sched_getaffinity(0))
    assert str(here.cores) in str(here)
    assert 0 <= machine.busy_share(0.05) <= 1
    assert machine.warning(0.01) is None
    assert "others use 50% of its cores" in (machine.warning(0.5) or "")


def test_servers_are_measured_with_byte_code_as_images_have_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    (tmp_path / "module.py").write_text("VALUE = 1\n")
    environment = with_byte_code()
    code = "import sys; sys.path.insert(0, sys.argv[1]); import module"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environment, check=True)
    written = Path(environment["PYTHONPYCACHEPREFIX"]).rglob("module.*.pyc")
    assert len(list(written)) == 1
