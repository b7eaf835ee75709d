"""Matrix products whose result for one decoding request does not depend on which others share the step."""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.float32]

_GROUP = 8
"""Decoding rows multiplied together."""
_SMALL_PRODUCT = 1_000_000
"""Multiply-adds up to which OpenBLAS has kernels that read the matrix in place instead of copying it first."""


def linear(x: Array, weight: Array, num_decodes: int) -> Array:
    """x @ weight.T for x [tokens, inputs] and weight [outputs, inputs], both C-contiguous; C-contiguous result.

    The first `num_decodes` rows are decoding requests, the others prompt pieces. BLAS picks its kernel, and with it the
    order in which a dot product is summed, by the shape of the product: one row, two to eight, more. So the decoding
    rows go in groups of two to eight and get the same bits whatever else is in the batch. (Seen with OpenBLAS 0.3.31 on
    AVX-512; elsewhere the difference is at most rounding.) Prompt pieces go in one product, which is fastest; how a
    prompt is cut can therefore change the last bits of its keys and values.
    """
    result = np.empty((len(x), len(weight)), np.float32)
    if num_decodes:
        result[:num_decodes] = _grouped(x[:num_decodes], weight)
    if num_decodes < len(x):
        result[num_decodes:] = (weight @ x[num_decodes:].T).T
    return result


def _grouped(x: Array, weight: Array) -> Array:
    """x @ weight.T, x in groups of `_GROUP` rows and the matrix in tiles so small that a tile is read in place.

    A tile stays in the processor's cache while all groups use it, so the matrix comes from memory once.
    """
    rows, inputs = x.shape
    outputs = len(weight)
    width = _GROUP if rows > _GROUP else max(2, rows)
    num_groups = -(-rows // width)
    groups = np.zeros((num_groups * width, inputs), np.float32)
    groups[:rows] = x
    columns = np.ascontiguousarray(groups.reshape(num_groups, width, inputs).swapaxes(1, 2))
    height = _tile_height(outputs, inputs)
    tiles = outputs // height
    result = np.empty((num_groups, outputs, width), np.float32)
    whole = result[:, : tiles * height].reshape(num_groups, tiles, height, width).swapaxes(0, 1)
    np.matmul(weight[: tiles * height].reshape(tiles, 1, height, inputs), columns, out=whole)
    if rest := outputs - tiles * height:
        np.matmul(weight[-rest:], columns, out=result[:, -rest:])
    return result.swapaxes(1, 2).reshape(num_groups * width, outputs)[:rows]


def _tile_height(outputs: int, inputs: int) -> int:
    """Rows per tile: as many as a small product allows, an exact divisor of `outputs` where there is a good one."""
    most = max(1, min(outputs, _SMALL_PRODUCT // (_GROUP * inputs)))
    return next((height for height in range(most, most // 2, -1) if outputs % height == 0), most)
