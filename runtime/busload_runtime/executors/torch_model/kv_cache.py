"""Memory of the paged KV cache on a torch device, in pages as the kernels read them: [block][kv head][place][dim]."""

from dataclasses import dataclass

import numpy as np
import torch

from busload_runtime.executors.kv_pool import KvPool
from busload_runtime.executors.torch_model.ops import LayerCache, Tensor

BLOCK_SIZE = 64
"""Tokens of a block: one tile of attention lies in one page."""


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What a cache is made of."""

    num_layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    """Of keys and values: floats, or int8 or fp8, which have one fp32 scale for each token and head."""

    @property
    def quantised(self) -> bool:
        return bool(self.dtype.itemsize == 1)

    @property
    def bytes_per_block(self) -> int:
        rows = 2 * self.num_layers * self.kv_heads * BLOCK_SIZE
        return int(rows * (self.head_dim * self.dtype.itemsize + (4 if self.quantised else 0)))


class KvCache:
    """Blocks on the CPU, in memory that is committed when it is first written."""

    def __init__(self, shape: CacheShape, max_blocks: int) -> None:
        """Reserves address space for `max_blocks`; none is usable yet."""
        numbers = {1: np.uint8, 2: np.uint16, 4: np.float32}[shape.dtype.itemsize]
        block = shape.kv_heads, BLOCK_SIZE, shape.head_dim
        self._shape = shape
        self._codes = KvPool(shape.num_layers, block, max_blocks, numbers)
        self._scales = KvPool(shape.num_layers, block[:2], max_blocks) if shape.quantised else None
        self.num_blocks = 0

    def resize(self, num_blocks: int) -> None:
        """Makes the first `num_blocks` usable and gives the memory of the others back."""
        self._codes.resize(num_blocks)
        if self._scales is not None:
            self._scales.resize(num_blocks)
        self.num_blocks = num_blocks

    def layer(self, index: int) -> LayerCache:
        def tensors(pool: KvPool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
            keys, values = (torch.from_numpy(side) for side in pool.blocks[index])
            return keys.view(dtype), values.view(dtype)

        scales = (None, None) if self._scales is None else tensors(self._scales, torch.float32)
        return LayerCache(*tensors(self._codes, self._shape.dtype), *scales)
