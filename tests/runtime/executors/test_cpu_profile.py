"""The engine that counts where a step's time goes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_llama import TinyLlama

from busload_runtime.engine.plan import Chunk, Plan, SamplingParams
from busload_runtime.executors.cpu import CpuExecutor
from busload_runtime.model.load import load_weights

PLAN = Plan((Chunk(1, tuple(range(40)), 0, (0, 1), SamplingParams(temperature=0)),))


def run_twice(path: Path) -> None:
    """In a process of its own: the library is built and loaded by what the environment says. Prints the phases."""
    executor = CpuExecutor(load_weights(str(path)), threads=2)
    executor.reserve(2)
    executor.resize(2)
    for _ in range(2):
        executor.run(PLAN)
        profile = executor.take_profile()
        assert all(seconds.shape == (2, 2) for seconds in profile.values())
        assert all(seconds[:, 0].sum() > 0 for seconds in profile.values())
    assert not any(seconds.any() for seconds in executor.take_profile().values())
    print(*profile)


@pytest.mark.parametrize(
    ("setting", "phases"),
    [("0", ""), ("1", "embed norm qkv rotate attend output gate_up down head sample")],
    ids=["off", "on"],
)
def test_each_phase_is_counted_when_asked_for(tmp_path: Path, setting: str, phases: str) -> None:
    path = tmp_path / "tiny.gguf"
    TinyLlama(head_dim=32).write(path)
    script = f"import pathlib, test_cpu_profile; test_cpu_profile.run_twice(pathlib.Path({str(path)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "BUSLOAD_CPU_PROFILE": setting, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == phases
