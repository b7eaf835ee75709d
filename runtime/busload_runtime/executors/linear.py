"""Matrix products over tiled weights: fast for a few rows, and the same bits for a request whatever its batch-mates."""

import os
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

Array: TypeAlias = NDArray[np.float32]

_GROUP = 16
"""Most decoding rows multiplied at once."""
_SMALL_PRODUCT = 1_000_000
"""Multiply-adds up to which OpenBLAS has kernels that read the matrix in place instead of copying it first."""
_WORTH_A_THREAD = 2_000_000
"""Multiply-adds below which waking another thread costs more than it saves."""


def tile(weight: Array) -> Array:
    """weight [outputs, inputs] as tiles [num_tiles, inputs, width] of its transpose, the last one filled with zeros.

    A tile times `_GROUP` rows is a small product for BLAS: the weights then come from memory once and in order.
    """
    outputs, inputs = weight.shape
    width = next((width for width in (64, 32) if width * inputs * _GROUP <= _SMALL_PRODUCT), 16)
    num_tiles = -(-outputs // width)
    tiles = np.zeros((num_tiles * width, inputs), np.float32)
    tiles[:outputs] = weight
    return np.ascontiguousarray(tiles.reshape(num_tiles, width, inputs).swapaxes(1, 2))


def rows_of(tiles: Array, rows: NDArray[np.intp]) -> Array:
    """Rows of the matrix that was tiled: [len(rows), inputs]."""
    width = tiles.shape[2]
    return np.ascontiguousarray(tiles[rows // width, :, rows % width])


class Linear:
    """x @ weight.T on a few threads, each with its own share of the tiles.

    BLAS picks its kernel, and with it the order in which a dot product is summed, by the shape of the product. So
    decoding rows go in groups of 2 to `_GROUP`, which all get one kernel: their bits do not depend on the rest of the
    batch. (True of OpenBLAS 0.3.31 on AVX-512; on other machines the difference is at most rounding, which greedy
    decoding shows at ties alone.) Prompt pieces go in one product, which is fastest; how a prompt is cut may therefore
    change the last bits of its keys and values.
    """

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._pool = ThreadPoolExecutor(max(1, num_threads - 1), thread_name_prefix="linear")
        # For the whole process: BLAS's own threads spin while they wait for each other, which on shared cores costs
        # more than it brings.
        threadpool_limits(1, user_api="blas")  # type: ignore[no-untyped-call]

    def __call__(self, x: Array, tiles: Array, num_decodes: int) -> Array:
        """x [tokens, inputs] times tiles; the first `num_decodes` rows decode. Returns [tokens, num_tiles * width]."""
        num_tiles, _, width = tiles.shape
        result = np.empty((len(x), num_tiles * width), np.float32)
        if num_decodes:
            grouped = _grouped(x[:num_decodes])
            product = np.empty((num_tiles, *grouped.shape[:2], width), np.float32)
            self._multiply(grouped, tiles[:, None], product)
            rows = product.reshape(num_tiles, -1, width)[:, :num_decodes]
            result[:num_decodes].reshape(num_decodes, num_tiles, width)[:] = rows.swapaxes(0, 1)
        if num_decodes < len(x):
            by_tile = result.reshape(len(x), num_tiles, width).swapaxes(0, 1)
            self._multiply(x[num_decodes:], tiles, by_tile[:, num_decodes:])
        return result

    def _multiply(self, x: Array, tiles: Array, out: Array) -> None:
        if out.size * tiles.shape[-2] < _WORTH_A_THREAD or self.num_threads == 1:
            np.matmul(x, tiles, out=out)
            return
        cuts = np.linspace(0, len(tiles), self.num_threads + 1).astype(int)
        shares = [slice(*pair) for pair in pairwise(cuts)]
        others = [self._pool.submit(np.matmul, x, tiles[share], out=out[share]) for share in shares[1:]]
        np.matmul(x, tiles[shares[0]], out=out[shares[0]])
        for other in others:
            other.result()


def usable_threads() -> int:
    """OMP_NUM_THREADS if it is a positive number, else the processors this process may run on."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    return int(wanted) if wanted.isdigit() and int(wanted) > 0 else len(os.sched_getaffinity(0))


def _grouped(x: Array) -> Array:
    """x [rows, inputs] as [groups, size, inputs], sizes equal and from 2 to `_GROUP`, zero rows at the end."""
    rows, inputs = x.shape
    num_groups = -(-rows // _GROUP)
    size = max(2, -(-rows // num_groups))
    grouped = np.zeros((num_groups * size, inputs), np.float32)
    grouped[:rows] = x
    return grouped.reshape(num_groups, size, inputs)
