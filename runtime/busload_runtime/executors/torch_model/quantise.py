"""Weights and cached rows in 8 and 4 bits: value = code * scale.

The 8-bit scale of a row is its largest magnitude divided by the largest code (127 for int8, 448 for fp8 e4m3), as the
kernels have it (`busload_kernels.gpu.quantise`).
"""

import torch

from busload_runtime.executors.torch_model.ops import Tensor

_ROWS_AT_ONCE = 4096
_LIMITS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def quantise_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes of `dtype`, like x, and fp32 scales over the last dimension."""
    limit = _LIMITS[dtype]
    wide = x.float()
    scales = wide.abs().amax(-1).clamp_min(1e-20) / limit
    codes = (wide / scales[..., None]).clamp(-limit, limit)
    if dtype == torch.int8:
        codes = torch.floor(codes + 0.5)
    return codes.to(dtype), scales


def quantise_matrix(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`quantise_rows` for a matrix, a part at a time: the fp32 copies of a whole one may not fit beside a model."""
    codes = torch.empty(x.shape, dtype=dtype, device=x.device)
    scales = torch.empty(len(x), dtype=torch.float32, device=x.device)
    for first in range(0, len(x), _ROWS_AT_ONCE):
        rows = slice(first, first + _ROWS_AT_ONCE)
        part, scales[rows] = quantise_rows(x[rows], dtype)
        codes[rows] = part
    return codes, scales


def unpack_int4(packed: Tensor, groups: int) -> Tensor:
    """Codes [outputs, groups, group] from -8 to 7, of `busload_kernels.gpu.linear.pack_int4`."""
    halves = packed.unflatten(1, (groups, -1)).to(torch.int16)
    return torch.cat(((halves & 15) - 8, (halves >> 4) - 8), -1)
