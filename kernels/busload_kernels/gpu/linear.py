"""Linear layers, out = x w^T, with weights of 16 or 8 bits and activations of 16 or 8, for few rows and for many.

Weights are the first operand of the matrix instruction, activations the second: 8-bit weights then become 16-bit ones
in registers, where the first operand may lie, and a decode batch of 16 rows fills the instruction's short side. With
few rows all time goes into reading weights, so K is split over programs (`SPLIT_K`) until every multiprocessor reads;
partial sums are joined in a second launch, in a fixed order, so that results repeat.

Integer codes come with one fp32 scale for each output (and for each row of 8-bit activations), which the epilogue
multiplies in. So does `silu(gate) * up`, for gate and up rows interleaved in one matrix (`interleave_gate_up`): the two
halves of a pair are neighbours in a tile.
"""

import torch
import triton
import triton.language as tl

from .checks import EIGHT_BIT, FLOATS, check_scales, check_tensor, short
from .errors import GpuKernelError
from .launch import Tile, launch

PROGRAM_BAND = 8
"""Row blocks that share the weights which are in the L2 cache, when there are many rows."""
FP8_PRECISE = 128
"""Products summed inside an fp8 matrix instruction, which keeps 14 bits, before they are added in fp32."""


@triton.jit
def finish(
    acc,
    row,
    first_column,
    out,
    x_scales,
    w_scales,
    bias,
    rows,
    N: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    GATED: tl.constexpr,
):
    """Scales, bias and gate of a tile acc [BM, BN] in fp32; stores it."""
    column = first_column + tl.arange(0, BN)
    inside = column < N
    if w_scales is not None:
        acc = acc * tl.load(w_scales + column, mask=inside, other=0.0)[None, :]
    if x_scales is not None:
        acc = acc * tl.load(x_scales + row, mask=row < rows, other=0.0)[:, None]
    if bias is not None:
        acc = acc + tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    if GATED:
        gate, up = tl.split(tl.reshape(acc, [BM, BN // 2, 2]))
        half = first_column // 2 + tl.arange(0, BN // 2)
        at = row.to(tl.int64)[:, None] * (N // 2) + half[None, :]
        result = gate / (1.0 + tl.exp(-gate)) * up
        tl.store(out + at, result.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (half < N // 2)[None, :])
    else:
        at = row.to(tl.int64)[:, None] * N + column[None, :]
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=(row < rows)[:, None] & inside[None, :])


@triton.jit
def tile_of(program, rows, N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BAND: tl.constexpr):
    """Block of rows and block of columns of a program: down a band of row blocks, then to the next columns."""
    row_blocks = tl.cdiv(rows, BM)
    columns: tl.constexpr = (N + BN - 1) // BN
    band = program // (BAND * columns)
    height = tl.minimum(row_blocks - band * BAND, BAND)
    within = program % (BAND * columns)
    return band * BAND + within % height, within // height


@triton.jit(do_not_specialize=["rows"])
def _linear_kernel(
    x,
    w,
    out,
    x_scales,
    w_scales,
    bias,
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    GATED: tl.constexpr,
    PRECISE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BAND: tl.constexpr,
):
    row_block, column_block = tile_of(tl.program_id(0), rows, N, BM, BN, BAND)
    row = row_block * BM + tl.arange(0, BM)
    column = column_block * BN + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    # Rows and columns past the end read the last one again: no mask, and nobody stores them.
    at_x = x + tl.minimum(row, rows - 1).to(tl.int64)[None, :] * K + inner[:, None]
    at_w = w + tl.minimum(column, N - 1).to(tl.int64)[:, None] * K + inner[None, :]
    ACC: tl.constexpr = tl.int32 if x.dtype.element_ty == tl.int8 else tl.float32
    acc = tl.zeros([BN, BM], ACC)
    share: tl.constexpr = ((K + BK - 1) // BK + SPLIT_K - 1) // SPLIT_K * BK
    start = tl.program_id(1) * share
    for k in range(start, tl.minimum(start + share, K), BK):
        if K % BK == 0:
            xs = tl.load(at_x + k)
            ws = tl.load(at_w + k)
        else:
            xs = tl.load(at_x + k, mask=(k + inner)[:, None] < K, other=0.0)
            ws = tl.load(at_w + k, mask=(k + inner)[None, :] < K, other=0.0)
        acc = tl.dot(ws.to(xs.dtype), xs, acc, input_precision="ieee", max_num_imprecise_acc=PRECISE, out_dtype=ACC)
    result = tl.trans(acc).to(tl.float32)
    target = out + tl.program_id(1).to(tl.int64) * rows * N if SPLIT_K > 1 else out
    finish(result, row, column_block * BN, target, x_scales, w_scales, bias, rows, N, BM, BN, GATED)


@triton.jit(do_not_specialize=["rows"])
def _linear_w4_kernel(
    x,
    w,
    group_scales,
    out,
    bias,
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    GATED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BAND: tl.constexpr,
):
    HALF: tl.constexpr = GROUP // 2
    row_block, column_block = tile_of(tl.program_id(0), rows, N, BM, BN, BAND)
    row = row_block * BM + tl.arange(0, BM)
    column = column_block * BN + tl.arange(0, BN)
    real_column = tl.minimum(column, N - 1).to(tl.int64)
    inner = tl.arange(0, HALF)
    at_x = x + tl.minimum(row, rows - 1).to(tl.int64)[None, :] * K + inner[:, None]
    at_w = w + real_column[:, None] * (K // 2) + inner[None, :]
    at_scale = group_scales + real_column * (K // GROUP)
    acc = tl.zeros([BN, BM], tl.float32)
    share: tl.constexpr = (K // GROUP + SPLIT_K - 1) // SPLIT_K
    start = tl.program_id(1) * share
    for group in range(start, tl.minimum(start + share, K // GROUP)):
        low_x = tl.load(at_x + group * GROUP)
        high_x = tl.load(at_x + group * GROUP + HALF)
        codes = tl.load(at_w + group * HALF)
        low = ((codes & 15).to(tl.int8) - 8).to(low_x.dtype)
        high = ((codes >> 4).to(tl.int8) - 8).to(low_x.dtype)
        part = tl.dot(low, low_x, input_precision="ieee")
        part = tl.dot(high, high_x, part, input_precision="ieee")
        acc += part * tl.load(at_scale + group).to(tl.float32)[:, None]
    target = out + tl.program_id(1).to(tl.int64) * rows * N if SPLIT_K > 1 else out
    finish(tl.trans(acc), row, column_block * BN, target, None, None, bias, rows, N, BM, BN, GATED)


@triton.jit(do_not_specialize=["rows"])
def _join_kernel(
    partial,
    out,
    x_scales,
    w_scales,
    bias,
    rows,
    N: tl.constexpr,
    GATED: tl.constexpr,
    SPLIT_K: tl.constexpr,
    BN: tl.constexpr,
):
    row = tl.program_id(0) + tl.arange(0, 1)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    at = row.to(tl.int64)[:, None] * N + column[None, :]
    acc = tl.zeros([1, BN], tl.float32)
    for split in range(SPLIT_K):
        acc += tl.load(partial + split * (rows.to(tl.int64) * N) + at, mask=(column < N)[None, :], other=0.0)
    finish(acc, row, tl.program_id(1) * BN, out, x_scales, w_scales, bias, rows, N, 1, BN, GATED)


def linear(
    x: torch.Tensor,
    w: torch.Tensor,
    out: torch.Tensor,
    tile: Tile,
    *,
    x_scales: torch.Tensor | None = None,
    w_scales: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    gated: bool = False,
    partial: torch.Tensor | None = None,
) -> torch.Tensor:
    """out = (x * x_scales) (w * w_scales)^T + bias, or silu of its even columns times its odd ones, if `gated`.

    x [rows, K] and w [N, K]: floats of one type; a float and an 8-bit type; or one 8-bit type. 8-bit weights have
    w_scales [N], 8-bit activations x_scales [rows], both fp32. w may instead be uint8 [N, K / 2] with w_scales [N, K /
    group] (see `pack_int4`). bias [N]. out [rows, N], or [rows, N / 2] if gated, floats. partial: fp32 memory for at
    least SPLIT_K * rows * N numbers, needed when the tile splits K. Returns out.
    """
    check_tensor("x", x, ("rows", "K"), (*FLOATS, *EIGHT_BIT))
    rows, k = x.shape
    if w.dtype == torch.uint8:
        return _linear_w4(x, w, out, tile, w_scales, bias, gated, partial)
    allowed = (x.dtype,) if x.dtype in EIGHT_BIT else (x.dtype, *EIGHT_BIT)
    check_tensor("w", w, ("N", k), allowed)
    n = w.shape[0]
    check_scales("w_scales", w_scales, w, (n,))
    check_scales("x_scales", x_scales, x, (rows,))
    _check_output(x, out, bias, n, gated)
    split = tile.sizes["SPLIT_K"]
    blocks = triton.cdiv(rows, tile.sizes["BM"]) * triton.cdiv(n, tile.sizes["BN"])
    target, after = _targets(out, partial, rows * n, split)
    launch(
        _linear_kernel,
        (blocks, split),
        Tile({"BAND": PROGRAM_BAND, **tile.sizes}, tile.num_warps, tile.num_stages),
        x=x,
        w=w,
        out=target,
        x_scales=None if after else x_scales,
        w_scales=None if after else w_scales,
        bias=None if after else bias,
        rows=rows,
        N=n,
        K=k,
        GATED=gated and not after,
        PRECISE=min(FP8_PRECISE, tile.sizes["BK"]) if x.dtype == torch.float8_e4m3fn else None,
    )
    if after:
        _join(target, out, x_scales, w_scales, bias, rows, n, gated, split)
    return out


def _linear_w4(
    x: torch.Tensor,
    w: torch.Tensor,
    out: torch.Tensor,
    tile: Tile,
    w_scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    gated: bool,
    partial: torch.Tensor | None,
) -> torch.Tensor:
    """The 4-bit case of `linear`."""
    check_tensor("x", x, ("rows", "K"), FLOATS)
    rows, k = x.shape
    check_tensor("w", w, ("N", k // 2), (torch.uint8,))
    n = w.shape[0]
    if w_scales is None:
        raise GpuKernelError("w_scales are missing: 4-bit weights need scales [N, K / group]")
    check_tensor("w_scales", w_scales, (n, "K / group"), FLOATS)
    group = k // max(1, w_scales.shape[1])
    if group not in (32, 64, 128) or group * w_scales.shape[1] != k:
        raise GpuKernelError(
            f"w_scales has {w_scales.shape[1]} groups for K = {k}; a group has 32, 64 or 128 weights, so it must be "
            f"{', '.join(str(k // size) for size in (32, 64, 128) if k % size == 0) or 'none: K does not divide'}"
        )
    _check_output(x, out, bias, n, gated)
    split = tile.sizes["SPLIT_K"]
    blocks = triton.cdiv(rows, tile.sizes["BM"]) * triton.cdiv(n, tile.sizes["BN"])
    target, after = _targets(out, partial, rows * n, split)
    launch(
        _linear_w4_kernel,
        (blocks, split),
        Tile({"BAND": PROGRAM_BAND, **tile.sizes}, tile.num_warps, tile.num_stages),
        x=x,
        w=w,
        group_scales=w_scales,
        out=target,
        bias=None if after else bias,
        rows=rows,
        N=n,
        K=k,
        GROUP=group,
        GATED=gated and not after,
    )
    if after:
        _join(target, out, None, None, bias, rows, n, gated, split)
    return out


def _join(
    partial: torch.Tensor,
    out: torch.Tensor,
    x_scales: torch.Tensor | None,
    w_scales: torch.Tensor | None,
    bias: torch.Tensor | None,
    rows: int,
    n: int,
    gated: bool,
    split: int,
) -> None:
    launch(
        _join_kernel,
        (rows, triton.cdiv(n, 1024)),
        Tile({"SPLIT_K": split, "BN": 1024}, num_warps=4),
        partial=partial,
        out=out,
        x_scales=x_scales,
        w_scales=w_scales,
        bias=bias,
        rows=rows,
        N=n,
        GATED=gated,
    )


def _targets(out: torch.Tensor, partial: torch.Tensor | None, numbers: int, split: int) -> tuple[torch.Tensor, bool]:
    """Where the first launch writes, and whether a second one joins."""
    if split == 1:
        return out, False
    if partial is None or partial.dtype != torch.float32 or partial.numel() < split * numbers:
        have = "missing" if partial is None else f"{partial.numel()} numbers of {short(partial.dtype)}"
        raise GpuKernelError(
            f"partial is {have}; a tile that splits K in {split} needs fp32 memory for {split * numbers} numbers"
        )
    return partial, True


def _check_output(x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None, n: int, gated: bool) -> None:
    if gated and n % 2:
        raise GpuKernelError(f"w has {n} outputs; gate and up interleaved are an even number")
    allowed = (x.dtype, torch.float32) if x.dtype in FLOATS else FLOATS
    check_tensor("out", out, (x.shape[0], n // 2 if gated else n), allowed)
    if bias is not None:
        check_tensor("bias", bias, (n,), FLOATS)


def interleave_gate_up(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """[2 N, ...]: row 2 i of `gate` [N, ...], row 2 i + 1 of `up`. For weights, scales and biases of a gated layer."""
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise GpuKernelError(
            f"gate is {short(gate.dtype)} {list(gate.shape)} and up {short(up.dtype)} {list(up.shape)}; "
            "they must be alike"
        )
    return torch.stack((gate, up), 1).reshape(2 * gate.shape[0], *gate.shape[1:])


def pack_int4(codes: torch.Tensor, group: int) -> torch.Tensor:
    """Packs codes [N, K] from -8 to 7 into uint8 [N, K / 2].

    In a group of consecutive weights, byte j holds weight j in its low and weight j + group / 2 in its high four bits,
    each plus 8: both halves come out as rows in order, without a shuffle.
    """
    n, k = codes.shape
    if k % group or group not in (32, 64, 128):
        raise GpuKernelError(f"group is {group} for K = {k}; it must be 32, 64 or 128 and divide K")
    if codes.min() < -8 or codes.max() > 7:
        raise GpuKernelError(f"codes go from {int(codes.min())} to {int(codes.max())}; 4 bits hold -8 to 7")
    halves = (codes + 8).to(torch.uint8).view(n, k // group, 2, group // 2)
    return (halves[:, :, 0] | halves[:, :, 1] << 4).reshape(n, k // 2).contiguous()
