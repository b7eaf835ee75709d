"""Plain quantisers to Q4_K, Q5_K and Q6_K: the gguf library only reads these. Blocks: ggml-common.h of ggml.

No search for better scales, as llama.cpp has: what matters here is that the bytes are valid and near the weights.
"""

from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type


def quantise(rows: Any, precision: Type) -> Any:
    """The bytes of `rows` [n, cols] in `precision`, K-quants or what the gguf library writes."""
    match precision:
        case Type.Q4_K:
            return _with_minimum(rows, 4)
        case Type.Q5_K:
            return _with_minimum(rows, 5)
        case Type.Q6_K:
            return _six_bits(rows)
        case _:
            return gguf.quants.quantize(rows, precision)


def _with_minimum(rows: Any, bits: int) -> Any:
    """Blocks of 256 as 8 x 32 of `scale * q - minimum`; scales and minima are 6 bits times one fp16 each."""
    x = rows.reshape(-1, 8, 32).astype(np.float64)
    minimum = np.maximum(0, -x.min(-1))
    scale = (x.max(-1) + minimum) / (2**bits - 1)
    d, dmin = (np.float16(values.max(-1) / 63) for values in (scale, minimum))
    six_scale, six_minimum = (
        np.rint(values / np.float64(unit)[:, None]).clip(0, 63).astype(np.uint8)
        for values, unit in ((scale, d), (minimum, dmin))
    )
    unit = np.float64(d)[:, None] * six_scale
    shifted = x + (np.float64(dmin)[:, None] * six_minimum)[..., None]
    q = np.rint(shifted / np.where(unit > 0, unit, 1)[..., None]).clip(0, 2**bits - 1).astype(np.uint8)
    low = (q[:, 0::2] & 15 | (q[:, 1::2] & 15) << 4).reshape(len(x), 128)
    parts = [d[:, None].view(np.uint8), dmin[:, None].view(np.uint8), _twelve_bytes(six_scale, six_minimum)]
    if bits == 5:
        parts.append(np.bitwise_or.reduce((q >> 4) << np.arange(8, dtype=np.uint8)[:, None], axis=1))
    return np.concatenate([*parts, low], axis=1).reshape(len(rows), -1)


def _twelve_bytes(scale: Any, minimum: Any) -> Any:
    first = scale[:, :4] | (scale[:, 4:] >> 4) << 6
    second = minimum[:, :4] | (minimum[:, 4:] >> 4) << 6
    return np.concatenate([first, second, scale[:, 4:] & 15 | (minimum[:, 4:] & 15) << 4], axis=1)


def _six_bits(rows: Any) -> Any:
    """Blocks of 256 as 16 x 16 of `scale * (q - 32)`; scales are int8 times one fp16."""
    x = rows.reshape(-1, 16, 16).astype(np.float64)
    peak = np.take_along_axis(x, np.abs(x).argmax(-1)[..., None], -1)[..., 0]
    d = np.float16(np.abs(peak).max(-1) / 32 / 127)
    scales = np.rint(peak / -32 / np.float64(d)[:, None]).clip(-127, 127).astype(np.int8)
    unit = np.float64(d)[:, None] * scales
    q = np.rint(x / np.where(unit != 0, unit, 1)[..., None]).clip(-32, 31).astype(np.int8).reshape(-1, 2, 4, 32) + 32
    q = q.astype(np.uint8)
    low = q[:, :, :2] & 15 | (q[:, :, 2:] & 15) << 4
    high = np.bitwise_or.reduce((q >> 4) << np.array([0, 2, 4, 6], np.uint8)[:, None], axis=2)
    parts = [low.reshape(len(x), 128), high.reshape(len(x), 64), scales.view(np.uint8), d[:, None].view(np.uint8)]
    return np.concatenate(parts, axis=1).reshape(len(rows), -1)
