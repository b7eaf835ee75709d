"""RMSNorm (Zhang and Sennrich 2019), with the residual added before and the result quantised after, in one pass.

One program normalises one row, which it holds in registers: the row is read once and written once.
"""

import torch
import triton
import triton.language as tl

from .checks import EIGHT_BIT, FLOATS, check_scales, check_tensor
from .errors import GpuKernelError
from .launch import Tile, launch
from .quantise import row_scale, to_codes

LONGEST_ROW = 32768


@triton.jit
def _rms_norm_kernel(x, residual, weight, out, scales, eps, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    at = row * HIDDEN + column
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if residual is not None:
        stream = (values + tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)).to(residual.dtype.element_ty)
        tl.store(residual + at, stream, mask=inside)
        values = stream.to(tl.float32)  # what is normalised is what the next layer adds to
    mean_square = tl.sum(values * values, 0) / HIDDEN
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    values = values * tl.rsqrt(mean_square + eps) * gain
    if scales is not None:
        scale = row_scale(tl.max(tl.abs(values), 0), out.dtype.element_ty)
        tl.store(scales + row, scale)
        tl.store(out + at, to_codes(values, scale, out.dtype.element_ty), mask=inside)
    else:
        tl.store(out + at, values.to(out.dtype.element_ty), mask=inside)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    *,
    residual: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """out = (x + residual) / sqrt(mean((x + residual)^2) + eps) * weight, over rows.

    x [rows, hidden] and weight [hidden] floats; residual [rows, hidden], of x's type, is replaced by x + residual. out
    [rows, hidden]: of x's type, or int8 or fp8 with fp32 scales [rows]. Returns out.
    """
    check_tensor("x", x, ("rows", "hidden"), FLOATS)
    rows, hidden = x.shape
    if not 1 <= hidden <= LONGEST_ROW:
        raise GpuKernelError(f"x has rows of {hidden}; a row may have 1 to {LONGEST_ROW} values")
    check_tensor("weight", weight, (hidden,), FLOATS)
    check_tensor("out", out, (rows, hidden), (x.dtype, *EIGHT_BIT))
    check_scales("scales", scales, out, (rows,))
    if residual is not None:
        check_tensor("residual", residual, (rows, hidden), (x.dtype,))
    block = triton.next_power_of_2(hidden)
    tile = Tile({"BLOCK": block}, num_warps=4 if block <= 4096 else 8 if block <= 8192 else 16)
    launch(
        _rms_norm_kernel,
        (rows,),
        tile,
        x=x,
        residual=residual,
        weight=weight,
        out=out,
        scales=scales,
        eps=eps,
        HIDDEN=hidden,
    )
    return out
