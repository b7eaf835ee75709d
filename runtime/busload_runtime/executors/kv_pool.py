"""Memory of the paged KV cache: address space is reserved once, pages are committed when first written."""

import mmap
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from busload_runtime.executors.errors import ExecutorError

Array: TypeAlias = NDArray[Any]


class KvPool:
    """Keys and values as `blocks` [layers, 2, num_blocks, *block_shape] of one type."""

    def __init__(
        self, num_layers: int, block_shape: tuple[int, ...], max_blocks: int, dtype: DTypeLike = np.float32
    ) -> None:
        """Reserves `max_blocks` blocks of `block_shape`, what one layer has of keys in a block; none is usable yet."""
        shape = (num_layers, 2, max_blocks, *block_shape)
        size = int(np.prod(shape, dtype=object)) * np.dtype(dtype).itemsize
        try:
            self._memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError) as error:
            raise ExecutorError(
                f"cannot reserve {max_blocks} KV blocks ({size} bytes of address space): {error}; "
                "is --memory more than the machine has?"
            ) from None
        # A huge page would commit memory of blocks that nobody has written: the pool must cost what is counted.
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            self._memory.madvise(mmap.MADV_NOHUGEPAGE)
        self._all: Array = np.frombuffer(self._memory, dtype).reshape(shape)
        self.blocks = self._all[:, :, :0]

    def resize(self, num_blocks: int) -> None:
        """Makes the first `num_blocks` usable; pages that lie wholly in the others go back to the system."""
        max_blocks = self._all.shape[2]
        if not 0 <= num_blocks <= max_blocks:
            raise ExecutorError(f"cannot resize the KV cache to {num_blocks} blocks; reserved: {max_blocks}")
        if num_blocks < self.blocks.shape[2]:
            region = max_blocks * self._all.strides[2]
            for start in range(0, len(self._memory), region):
                first = -(-(start + num_blocks * self._all.strides[2]) // mmap.PAGESIZE) * mmap.PAGESIZE
                last = (
                    (start + region) // mmap.PAGESIZE * mmap.PAGESIZE
                    if start + region < len(self._memory)
                    else len(self._memory)
                )
                if first < last:
                    self._memory.madvise(mmap.MADV_DONTNEED, first, last - first)
        self.blocks = self._all[:, :, :num_blocks]
