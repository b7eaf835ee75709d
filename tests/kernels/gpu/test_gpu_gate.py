"""The ahead-of-time gate: it compiles without a GPU, and it can fail. In processes of their own, which compile."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from busload_kernels.gpu.aot import Code
from busload_kernels.gpu.errors import GpuKernelError
from busload_kernels.gpu.gate import judge, supported
from busload_kernels.gpu.tiles import tile_for
from busload_kernels.gpu.variants import TENSOR_CORE, WIDE_ASYNC_COPY, Variant, all_variants

ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
GOOD = Code(registers=100, spills=0, shared_memory=1000, instructions={"HMMA.16816.F32.BF16": 4})
VARIANT = Variant("one", "_kernel", lambda: None, registers=100, needs=(TENSOR_CORE,))


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], env=ENVIRONMENT, capture_output=True, text=True, timeout=250, check=False
    )


def test_gate_compiles_and_finds_what_was_meant(tmp_path: Path) -> None:
    table = tmp_path / "table.json"
    match = "_decode_kernel dim 128, group 4, cache bf16"
    done = run("-m", "busload_kernels.gpu.gate", "--match", match, "--capability", "90", "--json", str(table))
    assert done.returncode == 0, done.stdout + done.stderr
    (verdict,) = json.loads(table.read_text())
    assert verdict["spills"] == 0
    assert 32 <= verdict["registers"] <= verdict["register_budget"]
    assert verdict["found"]["tensor core"] >= 16
    assert verdict["found"]["wide async"] >= 16


SPILLING = """
import torch, triton, triton.language as tl
from busload_kernels.gpu import aot
from busload_kernels.gpu.launch import Tile, launch, recording

@triton.jit
def _greedy_kernel(x, y, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    at = tl.arange(0, ROWS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    values = tl.load(x + at)
    tl.store(y + at, values / tl.sum(values) + tl.max(values))

x = torch.empty(16384, device="meta")
with recording() as launches:
    launch(_greedy_kernel, (1,), Tile(num_warps=1), x=x, y=x, ROWS=128, WIDTH=128)
code = aot.compile_launch(launches[0], 90)
print(code.spills)
"""


def test_spills_are_seen(tmp_path: Path) -> None:
    script = tmp_path / "spilling.py"
    script.write_text(SPILLING)
    done = run(str(script))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 100


def test_each_budget_can_fail() -> None:
    assert judge(VARIANT, 90, GOOD) == ()
    assert judge(VARIANT, 90, Code(101, 0, 0, GOOD.instructions)) == ("101 registers, budget 100",)
    assert judge(VARIANT, 90, Code(9, 3, 0, GOOD.instructions)) == ("3 local memory instructions: registers spill",)
    assert judge(VARIANT, 80, Code(9, 0, 200_000, GOOD.instructions)) == (
        "200000 bytes of shared memory, sm_80 has 166912",
    )
    assert judge(VARIANT, 90, Code(9, 0, 200_000, GOOD.instructions)) == ()
    (problem,) = judge(VARIANT, 90, Code(9, 0, 0, {"FFMA": 1000, "HMMAX": 1}))
    assert problem.startswith("no instruction like")


def test_patterns_tell_wide_copies_from_narrow_ones() -> None:
    code = Code(1, 0, 0, {"LDGSTS.E.BYPASS.128": 2, "LDGSTS.E.64": 3, "LDGSTS.E.BYPASS.LTC128B.128": 5, "LDGSTS.E": 7})
    assert code.count(WIDE_ASYNC_COPY) == 10


def test_old_gpus_are_not_asked_for_fp8() -> None:
    variants = {variant.name: variant for variant in all_variants() if variant.kernel == "_decode_kernel"}
    fp8, int8 = (variants[f"dim 128, group 4, cache {name}"] for name in ("fp8", "int8"))
    assert [supported(fp8, 80), supported(fp8, 90), supported(int8, 80)] == [False, True, True]


def test_every_variant_has_a_tile_and_a_name_of_its_own() -> None:
    variants = all_variants()
    assert len({(variant.kernel, variant.name) for variant in variants}) == len(variants)
    assert {variant.kernel for variant in variants if variant.core} == {variant.kernel for variant in variants}
    for variant in variants:
        launch = variant.launch()
        assert launch.tile.num_warps in (1, 2, 4, 8, 16)
        tensors = [value for value in launch.arguments.values() if isinstance(value, torch.Tensor)]
        assert tensors
        assert all(tensor.device.type == "meta" for tensor in tensors)


def test_a_shape_without_a_tile_is_named() -> None:
    assert tile_for("decode_attention", "a GPU without a table", dim=64, cache_bits=16).sizes == {"TILE": 64}
    assert tile_for("decode_attention", "a GPU without a table", dim=256, cache_bits=16).sizes == {"TILE": 32}
    with pytest.raises(
        GpuKernelError,
        match=r"no tile for decode_attention with rows 0, dim 64, cache_bits 4 in a-gpu-without-a-table-",
    ):
        tile_for("decode_attention", "a GPU without a table", dim=64, cache_bits=4)
