"""Packed weights against the gguf library's own dequantisation of the same bytes, type by type."""

from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from k_quants import quantise
from numpy.typing import NDArray

from busload_kernels.cpu import library as native

ROWS, COLS = 48, 512
# Relative error (root mean square) of a packed matrix of normally distributed weights, by what its tiles are made of.
# 0: kept bit by bit. 0.1%: scales and minima rounded to fp16. 0.4%: half of it kept. 0.6%: int8 with a scale per 32.
NATIVE = {
    Type.Q4_0: 0.0,
    Type.Q4_1: 0.0,
    Type.Q5_0: 0.0,
    Type.Q8_0: 0.0,
    Type.Q4_K: 0.001,
    Type.Q5_1: 0.006,
    Type.Q5_K: 0.006,
    Type.Q6_K: 0.004,
    Type.F16: 0.006,
    Type.BF16: 0.006,
    Type.F32: 0.006,
}
# The same where a matrix is of several types, and so int8.
BESIDE_OTHERS = NATIVE | {Type.Q4_1: 0.006, Type.Q4_K: 0.006}


def packed(raw: Any, kind: Type, layout: int) -> NDArray[np.float32]:
    """What the engine computes with, of the rows `raw` of a file."""
    library = native.load()
    raw = np.ascontiguousarray(raw).view(np.uint8)
    size = library.bl_packed_bytes(layout, ROWS, COLS)
    memory = np.zeros(size + 64, np.uint8)
    address = -(-memory.ctypes.data // 64) * 64
    order = np.arange(ROWS, dtype=np.int32)[::-1].copy()
    code = library.bl_pack_rows(kind, raw.ctypes.data, COLS, order.ctypes.data, ROWS, 0, layout, address)
    assert code == 0
    matrix = native.Matrix(address, -(-ROWS // 32) * 32, COLS, layout)
    rows = np.empty((ROWS, COLS), np.float32)
    for row, place in zip(rows, order, strict=True):
        library.bl_unpack_row(matrix, int(place), row.ctypes.data)
    return rows


def weights(seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0, 0.04, (ROWS, COLS)).astype(np.float32)


@pytest.mark.parametrize("kind", NATIVE, ids=lambda kind: kind.name)
def test_error_of_each_tensor_type(kind: Type) -> None:
    raw = quantise(weights(), kind)
    exact = gguf.quants.dequantize(raw, kind).reshape(ROWS, COLS)
    for layout, bounds in ((native.load().bl_packed_format(kind), NATIVE), (native.W8, BESIDE_OTHERS)):
        error = packed(raw, kind, layout) - exact
        relative = float(np.linalg.norm(error) / np.linalg.norm(exact))
        assert relative <= bounds[kind]


@pytest.mark.parametrize("kind", [Type.Q4_K, Type.Q5_K, Type.Q6_K], ids=lambda kind: kind.name)
def test_the_tests_own_quantisers_are_near_the_weights(kind: Type) -> None:
    """Else a model of their bytes would be no model of anything."""
    near = gguf.quants.dequantize(quantise(weights(), kind), kind).reshape(ROWS, COLS)
    bound = {Type.Q4_K: 0.1, Type.Q5_K: 0.05, Type.Q6_K: 0.03}[kind]
    assert np.linalg.norm(near - weights()) < bound * np.linalg.norm(weights())


@pytest.mark.parametrize("kind", [Type.Q4_K, Type.Q5_K, Type.Q6_K], ids=lambda kind: kind.name)
def test_any_bytes_of_a_k_quant(kind: Type) -> None:
    """All scales, minima, signs and high bits, as no quantiser would combine them; only the fp16 factors are sane."""
    rng = np.random.default_rng(3)
    size = gguf.GGML_QUANT_SIZES[kind][1]
    blocks = rng.integers(0, 256, (ROWS * COLS // 256, size), np.uint8)
    halves = rng.uniform(1e-3, 2e-3, (len(blocks), 2)).astype(np.float16).view(np.uint8)
    if kind == Type.Q6_K:
        blocks[:, -2:] = halves[:, :2]
    else:
        blocks[:, :4] = halves
    exact = gguf.quants.dequantize(blocks, kind).reshape(ROWS, COLS)
    relative = np.linalg.norm(packed(blocks, kind, native.load().bl_packed_format(kind)) - exact) / np.linalg.norm(
        exact
    )
    assert relative < (2**-11 if kind == Type.Q4_K else 0.006)
