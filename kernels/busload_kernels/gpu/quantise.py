"""Device helpers: rounding to 8 bits, shared by the kernels that write quantised values.

value = code * scale, with one fp32 scale for a row: its largest magnitude divided by the largest code (127 for int8;
448 for fp8 e4m3, whose cast must not see more than that).
"""

import triton
import triton.language as tl


@triton.jit
def row_scale(largest, dtype: tl.constexpr):
    """Scale of a row whose largest magnitude is `largest` (fp32); a row of zeros gets one that is not zero."""
    limit: tl.constexpr = 127.0 if dtype == tl.int8 else 448.0
    return tl.maximum(largest, 1e-20) / limit


@triton.jit
def to_codes(x, scale, dtype: tl.constexpr):
    """Codes of `x` (fp32) as int8, rounded to nearest, or fp8."""
    x = x / scale
    if dtype == tl.int8:
        codes = tl.floor(tl.minimum(tl.maximum(x, -127.0), 127.0) + 0.5).to(tl.int8)
    else:
        codes = tl.minimum(tl.maximum(x, -448.0), 448.0).to(dtype)
    return codes
