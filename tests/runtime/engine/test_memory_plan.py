"""Where the memory budget comes from, and which limits fit it."""

import re
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from busload_runtime.contract import Limits
from busload_runtime.engine.memory import (
    OVERHEAD_VARIES,
    Budget,
    LimitsImpossible,
    MemoryPlan,
    find_budget,
    private_bytes,
)

MIB = 1 << 20


def machine(folder: Path, cgroup: str, files: dict[str, str]) -> tuple[Path, Path]:
    proc, cgroups = folder / "proc", folder / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(cgroup)
    (proc / "meminfo").write_text(
        "MemTotal:  8388608 kB\nMemFree: 1 kB\nMemAvailable: 4194304 kB\nHugePages_Total: 0\n"
    )
    for name, text in files.items():
        (cgroups / name).parent.mkdir(parents=True, exist_ok=True)
        (cgroups / name).write_text(text + "\n")
    return proc, cgroups


@pytest.mark.parametrize(
    ("cgroup", "files", "mebibytes", "source"),
    [
        # v2: in a container the path is the root of the mount.
        ("0::/\n", {"memory.max": str(512 * MIB)}, 512, "cgroup limit"),
        # v2: the tightest of all ancestors counts.
        (
            "0::/a/b\n",
            {"a/b/memory.max": "max", "a/memory.max": str(300 * MIB), "memory.max": "max"},
            300,
            "cgroup limit",
        ),
        # v1: the path is the host's, the mount shows the container's own.
        ("5:cpu:/x\n4:memory:/pod/x\n0::/\n", {"memory/memory.limit_in_bytes": str(256 * MIB)}, 256, "cgroup limit"),
        ("4:hugetlb,memory:/x\n", {"memory/x/memory.limit_in_bytes": str(128 * MIB)}, 128, "cgroup limit"),
        # No limit in either spelling, and one above what the machine has.
        ("4:memory:/x\n", {"memory/x/memory.limit_in_bytes": "9223372036854771712"}, 4096, "available memory"),
        ("0::/\n", {"memory.max": "max"}, 4096, "available memory"),
        ("0::/\n", {"memory.max": str(1 << 40)}, 8192, "cgroup limit"),
        ("", {}, 4096, "available memory"),
    ],
)
def test_budget(tmp_path: Path, cgroup: str, files: dict[str, str], mebibytes: int, source: str) -> None:
    proc, cgroups = machine(tmp_path, cgroup, files)
    assert find_budget(None, proc, cgroups) == Budget(mebibytes * MIB, source)
    assert find_budget(77, proc, cgroups) == Budget(77, "--memory")


def test_budget_unknown(tmp_path: Path) -> None:
    with pytest.raises(LimitsImpossible, match="give --memory"):
        find_budget(None, tmp_path, tmp_path)


def test_private_bytes_see_memory_that_is_taken() -> None:
    before = private_bytes()
    ballast = bytearray(64 * MIB)
    ballast[::4096] = b"x" * len(ballast[::4096])
    assert 60 * MIB < private_bytes() - before < 80 * MIB
    assert private_bytes(2**22 + 1) == 0  # no such process


def plan(budget: int, bytes_per_block: int = 1 * MIB, context_length: int = 4096) -> MemoryPlan:
    return MemoryPlan(
        budget=Budget(budget, "--memory"),
        weights=100 * MIB,
        overhead=50 * MIB,
        block_size=16,
        bytes_per_block=bytes_per_block,
        context_length=context_length,
        activations=lambda tokens, batch: tokens * 1024 + batch * MIB,
    )


def test_share_of_what_is_left() -> None:
    # 400 - 100 weights - 50 overhead - (0.5 + 8) activations = 241.5 MiB
    limits = Limits(1024, 8, 50, 512, 0, 0)
    assert plan(400 * MIB).num_blocks(limits) == 120
    assert plan(400 * MIB).max_blocks == 248


@pytest.mark.parametrize(
    ("budget", "limits", "text"),
    [
        (400, Limits(8192, 8, 50, 512, 0, 0), "maxSequenceLength 8192 is above the model's context length 4096"),
        (
            155,
            Limits(16, 8, 50, 512, 0, 0),
            "no memory is left for the KV cache: 155 MiB budget (--memory) - 100 MiB weights - 8 MiB activations - "
            "50 MiB overhead; raise the memory limit to at least 165 MiB (--memory 173015040), or lower tokenBudget or "
            "batchSize",
        ),
        (
            400,
            Limits(2048, 8, 50, 512, 0, 0),
            "kvCachePercent 50 of 242 MiB holds 1920 tokens, less than one sequence of maxSequenceLength 2048: ",
        ),
        (
            400,
            Limits(2048, 8, 50, 512, 0, 0),
            "raise kvCachePercent to at least 54 or lower maxSequenceLength to at most 1920",
        ),
        (
            400,
            Limits(4096, 8, 99, 512, 0, 0),
            "raise the memory limit to at least 422 MiB (--memory 442499072) or lower maxSequenceLength to at most "
            "3824",
        ),
    ],
)
def test_impossible_limits_say_what_would_fit(budget: int, limits: Limits, text: str) -> None:
    with pytest.raises(LimitsImpossible) as error:
        plan(budget * MIB).num_blocks(limits)
    assert text in str(error.value)


@given(
    budget=st.integers(100 * MIB, 2000 * MIB),
    bytes_per_block=st.integers(1000, 8 * MIB),
    length=st.integers(16, 4096),
    percent=st.integers(1, 100),
)
def test_the_advice_in_an_error_is_true(budget: int, bytes_per_block: int, length: int, percent: int) -> None:
    memory = plan(budget, bytes_per_block)
    try:
        blocks = memory.num_blocks(Limits(length, 8, percent, 512, 0, 0))
    except LimitsImpossible as error:
        if found := re.search(r"kvCachePercent to at least (\d+)", str(error)):
            needed = int(found[1])
            assert memory.num_blocks(Limits(length, 8, needed, 512, 0, 0)) * 16 >= length
            with pytest.raises(LimitsImpossible):
                memory.num_blocks(Limits(length, 8, needed - 1, 512, 0, 0))
        if found := re.search(r"maxSequenceLength to at most (\d+)", str(error)):
            assert memory.num_blocks(Limits(int(found[1]), 8, percent, 512, 0, 0)) * 16 == int(found[1])
        if found := re.search(r"--memory (\d+)", str(error).rpartition("raise")[2]):
            enough, limits = int(found[1]), Limits(length, 8, percent, 512, 0, 0)
            assert plan(enough, bytes_per_block).num_blocks(limits) * 16 >= length
            with pytest.raises(LimitsImpossible):
                plan(enough - OVERHEAD_VARIES - MIB, bytes_per_block).num_blocks(limits)
    else:
        assert blocks * 16 >= length
        assert blocks <= memory.max_blocks
