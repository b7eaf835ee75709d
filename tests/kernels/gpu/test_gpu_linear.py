"""Linear layers of every weight format, split and whole, gated and plain, against fp64 on the dequantised inputs."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged import EIGHT_BIT_LIMIT, TOLERANCE, poisoned, quantise, relative_error

from busload_kernels.gpu.errors import GpuKernelError
from busload_kernels.gpu.launch import Tile
from busload_kernels.gpu.linear import interleave_gate_up, linear, pack_int4

FORMATS = [(a, w) for a in TOLERANCE for w in (a, *EIGHT_BIT_LIMIT, torch.uint8)] + [(a, a) for a in EIGHT_BIT_LIMIT]
BM, BN, BK = 16, 32, 64
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # silu far below zero


def tile(w: torch.dtype, split: int) -> Tile:
    sizes = {"BM": BM, "BN": BN, "SPLIT_K": split}
    return Tile(sizes if w == torch.uint8 else {**sizes, "BK": BK})


def operand(rows: int, k: int, dtype: torch.dtype, generator: torch.Generator) -> tuple[Any, Any, torch.Tensor]:
    """A matrix in `dtype`, its scales, and its value in fp64."""
    x = torch.randn((rows, k), generator=generator)
    if dtype == torch.uint8:
        codes = torch.randint(-8, 8, (rows, k), generator=generator)
        scales = torch.rand((rows, k // 64), generator=generator).half().float()  # exact in both types
        return pack_int4(codes, 64), scales, codes.double() * scales.double().repeat_interleave(64, 1)
    if dtype in EIGHT_BIT_LIMIT:
        codes, scales = quantise(x, dtype)
        return codes, scales, codes.double() * scales[:, None].double()
    return x.to(dtype), None, x.to(dtype).double()


def check(rows: int, n: int, k: int, a: torch.dtype, w: torch.dtype, split: int, gated: bool, with_bias: bool) -> None:
    generator = torch.Generator().manual_seed(rows + n + k)
    x, x_scales, x_value = operand(rows, k, a, generator)
    weights, w_scales, w_value = operand(n, k, w, generator)
    bias = torch.randn(n, generator=generator) if with_bias else None
    expected = x_value @ w_value.T + (0 if bias is None else bias.double())
    if gated:
        expected = torch.nn.functional.silu(expected[:, ::2]) * expected[:, 1::2]
    dtype = a if a in TOLERANCE else torch.float32
    if w_scales is not None and w == torch.uint8:
        w_scales = w_scales.to(dtype)
    out = linear(
        x,
        weights,
        poisoned(rows, n // 2 if gated else n, dtype=dtype),
        tile(w, split),
        x_scales=x_scales,
        w_scales=w_scales,
        bias=bias,
        gated=gated,
        partial=poisoned(split * rows * n, dtype=torch.float32),
    )
    assert relative_error(out, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize(("a", "w"), FORMATS)
@pytest.mark.parametrize(("split", "gated"), [(1, False), (1, True), (3, False), (3, True)])
def test_product_is_that_of_the_formula(a: torch.dtype, w: torch.dtype, split: int, gated: bool) -> None:
    check(17, 70, 320, a, w, split, gated, with_bias=gated)


@settings(max_examples=15, deadline=None)
@given(
    rows=st.integers(1, 40),
    n=st.integers(1, 40).map(lambda half: 2 * half),
    k=st.integers(1, 20).map(lambda sixteenth: 16 * sixteenth),
    split=st.integers(1, 4),
    gated=st.booleans(),
    weights=st.sampled_from([torch.float32, torch.int8]),
)
def test_any_shape(rows: int, n: int, k: int, split: int, gated: bool, weights: torch.dtype) -> None:
    check(rows, n, k, torch.float32, weights, split, gated, with_bias=True)


def test_more_row_blocks_than_a_band() -> None:
    check(9 * BM + 3, 2 * BN + 2, 64, torch.float32, torch.float32, 1, gated=False, with_bias=False)


def test_gate_and_up_are_neighbours() -> None:
    gate, up = torch.arange(6).view(3, 2), 10 + torch.arange(6).view(3, 2)
    assert interleave_gate_up(gate, up)[:, 0].tolist() == [0, 10, 2, 12, 4, 14]
    with pytest.raises(GpuKernelError, match=r"gate is int64 \[3, 2\] and up int64 \[2, 2\]; they must be alike"):
        interleave_gate_up(gate, up[:2])


def test_four_bit_codes_come_back_from_their_bytes() -> None:
    codes = torch.randint(-8, 8, (3, 128), generator=torch.Generator().manual_seed(3))
    packed = pack_int4(codes, 64).view(3, 2, 32).int()
    assert torch.equal(torch.cat((packed & 15, packed >> 4), 2).view(3, 128) - 8, codes)
    with pytest.raises(GpuKernelError, match="codes go from -8 to 8; 4 bits hold -8 to 7"):
        pack_int4(torch.tensor([[-8, 8] * 32]), 64)
    with pytest.raises(GpuKernelError, match="group is 48 for K = 96; it must be 32, 64 or 128 and divide K"):
        pack_int4(torch.zeros(1, 96), 48)


def test_messages_name_the_tensor_and_what_is_allowed() -> None:
    x, w, out = torch.zeros(2, 64), torch.zeros(8, 64), torch.zeros(2, 8)
    one = tile(torch.float32, 1)
    with pytest.raises(GpuKernelError, match="w is float16; allowed: float32, int8, float8_e4m3fn"):
        linear(x, w.half(), out, one)
    with pytest.raises(GpuKernelError, match="w is int8; allowed: float8_e4m3fn"):
        linear(x.to(torch.float8_e4m3fn), w.to(torch.int8), out, one)
    with pytest.raises(GpuKernelError, match=r"w_scales are missing: int8 values need fp32 scales \[8\]"):
        linear(x, w.to(torch.int8), out, one)
    with pytest.raises(GpuKernelError, match="partial is missing; a tile that splits K in 3 needs fp32 memory for 48"):
        linear(x, w, out, tile(torch.float32, 3))
    with pytest.raises(GpuKernelError, match=r"out has shape \[2, 8\]; it must be \[2, 4\]"):
        linear(x, w, out, one, gated=True)
    with pytest.raises(GpuKernelError, match="w_scales has 3 groups for K = 64; a group has 32, 64 or 128 weights"):
        linear(x, torch.zeros(8, 32, dtype=torch.uint8), out, tile(torch.uint8, 1), w_scales=torch.zeros(8, 3))
