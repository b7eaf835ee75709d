"""Memory of the paged KV cache on a torch device, in pages as the kernels read them: [block][kv head][place][dim]."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import torch

from busload_runtime.executors.errors import ExecutorError
from busload_runtime.executors.kv_pool import KvPool
from busload_runtime.executors.torch_model.device_pool import DevicePool, Driver
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


class KvCache(Protocol):
    """Blocks in pages, of which the first `num_blocks` are usable."""

    num_blocks: int

    def resize(self, num_blocks: int) -> None:
        """Makes the first `num_blocks` usable and gives the memory of the others back. Content of kept ones stays."""

    def layer(self, index: int) -> LayerCache: ...


class HostCache:
    """Implements `KvCache` on the CPU, in memory that is committed when it is first written."""

    def __init__(self, shape: CacheShape, max_blocks: int) -> None:
        """Reserves address space for `max_blocks`; none is usable yet."""
        numbers = {1: np.uint8, 2: np.uint16, 4: np.float32}[shape.dtype.itemsize]
        block = shape.kv_heads, BLOCK_SIZE, shape.head_dim
        self._shape = shape
        self._codes = KvPool(shape.num_layers, block, max_blocks, numbers)
        self._scales = KvPool(shape.num_layers, block[:2], max_blocks) if shape.quantised else None
        self.num_blocks = 0

    def resize(self, num_blocks: int) -> None:
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


TensorAt: TypeAlias = Callable[[int, tuple[int, ...], torch.dtype], Tensor]
"""(address, shape, type) -> a tensor there."""


class DeviceCache:
    """Implements `KvCache` on a GPU, in memory that is mapped as it grows. Addresses never change."""

    def __init__(self, shape: CacheShape, max_blocks: int, driver: Driver, tensor_at: TensorAt) -> None:
        """Reserves address space for `max_blocks`; none is usable yet."""
        self._shape, self._tensor_at = shape, tensor_at
        row = shape.kv_heads * BLOCK_SIZE
        self._codes = DevicePool(driver, 2 * shape.num_layers, row * shape.head_dim * shape.dtype.itemsize, max_blocks)
        self._scales = DevicePool(driver, 2 * shape.num_layers, row * 4, max_blocks) if shape.quantised else None
        self._layers: list[LayerCache] = []
        self.num_blocks = 0

    @property
    def rounding_bytes(self) -> int:
        """Memory taken beyond the blocks, at most."""
        return self._codes.rounding_bytes + (self._scales.rounding_bytes if self._scales is not None else 0)

    def resize(self, num_blocks: int) -> None:
        before = self.num_blocks
        self._codes.resize(num_blocks)
        try:
            if self._scales is not None:
                self._scales.resize(num_blocks)
        except ExecutorError:
            self._codes.resize(before)
            raise
        else:
            self.num_blocks = num_blocks
        finally:
            self._layers = [self._layer(index) for index in range(self._shape.num_layers)]

    def layer(self, index: int) -> LayerCache:
        return self._layers[index]

    def close(self) -> None:
        """Gives all memory back."""
        self._layers = []
        self._codes.close()
        if self._scales is not None:
            self._scales.close()

    def _layer(self, index: int) -> LayerCache:
        rows = self.num_blocks, self._shape.kv_heads, BLOCK_SIZE

        def tensors(pool: DevicePool, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
            keys, values = (self._tensor_at(pool.address(2 * index + side), shape, dtype) for side in range(2))
            return keys, values

        codes = tensors(self._codes, (*rows, self._shape.head_dim), self._shape.dtype)
        scales = (None, None) if self._scales is None else tensors(self._scales, rows, torch.float32)
        return LayerCache(*codes, *scales)


def new_cache(device: torch.device, shape: CacheShape, max_blocks: int) -> KvCache:
    if device.type != "cuda":
        return HostCache(shape, max_blocks)
    from busload_runtime.executors.torch_model.cuda_driver import CudaDriver, tensor_at

    def at(address: int, sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return tensor_at(address, sizes, dtype, device.index)

    return DeviceCache(shape, max_blocks, CudaDriver(device.index), at)
