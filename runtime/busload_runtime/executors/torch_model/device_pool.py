"""GPU memory that grows and shrinks in place, so that captured graphs keep their addresses: address space is reserved
once, and physical memory mapped behind the part in use (CUDA virtual memory management, through `cuda-bindings`)."""

from typing import Protocol

from busload_runtime.executors.errors import ExecutorError

_MOST_CHUNKS = 65536
"""Mappings of a pool; each takes the driver some microseconds."""


class OutOfMemory(Exception):
    """The device has no memory left for a chunk."""


class Driver(Protocol):
    """The calls of the CUDA driver that a pool needs, on one device. Sizes are multiples of `granularity`."""

    granularity: int

    def reserve(self, size: int) -> int:
        """An address with `size` bytes of address space."""

    def free(self, address: int, size: int) -> None: ...

    def map(self, address: int, size: int) -> None:
        """Puts new memory behind an address. Raises `OutOfMemory`."""

    def unmap(self, address: int, size: int) -> None:
        """Gives back what one `map` put there. Waits for the device first."""


class DevicePool:
    """`regions` arrays of blocks, `block_bytes` each, of which all have the same number of blocks in use."""

    def __init__(self, driver: Driver, regions: int, block_bytes: int, max_blocks: int) -> None:
        """Reserves; no block is usable yet. Raises `ExecutorError`."""
        self._driver, self._block_bytes, self._regions = driver, block_bytes, regions
        total = regions * block_bytes * max_blocks
        self._chunk = driver.granularity * max(1, -(-total // (driver.granularity * _MOST_CHUNKS)))
        self._stride = -(-block_bytes * max_blocks // self._chunk) * self._chunk
        self._max_blocks = max_blocks
        self._mapped = 0
        try:
            self._address = driver.reserve(regions * self._stride)
        except OutOfMemory as error:
            raise ExecutorError(
                f"cannot reserve {max_blocks} KV blocks ({total} bytes of address space): {error}; is --memory more "
                "than the GPU has?"
            ) from None

    @property
    def rounding_bytes(self) -> int:
        """What is mapped beyond the blocks, at most."""
        return self._regions * self._chunk

    def address(self, region: int) -> int:
        return self._address + region * self._stride

    def resize(self, num_blocks: int) -> None:
        """Makes the first `num_blocks` of each region usable, and gives back what is mapped behind the others.

        Raises `ExecutorError` when the device has less; then the pool is as before.
        """
        if not 0 <= num_blocks <= self._max_blocks:
            raise ExecutorError(f"cannot resize the KV cache to {num_blocks} blocks; reserved: {self._max_blocks}")
        wanted = -(-num_blocks * self._block_bytes // self._chunk)
        done: list[int] = []
        try:
            for place in range(self._mapped, wanted):
                for region in range(self._regions):
                    at = self.address(region) + place * self._chunk
                    self._driver.map(at, self._chunk)
                    done.append(at)
        except OutOfMemory as error:
            for at in done:
                self._driver.unmap(at, self._chunk)
            needed = (wanted - self._mapped) * self._regions * self._chunk
            raise ExecutorError(
                f"cannot get {needed >> 20} MiB more for {num_blocks} KV blocks: {error}; lower kvCachePercent or "
                "--memory, or end what else uses the GPU"
            ) from None
        for place in range(wanted, self._mapped):
            for region in range(self._regions):
                self._driver.unmap(self.address(region) + place * self._chunk, self._chunk)
        self._mapped = wanted

    def close(self) -> None:
        """Gives everything back."""
        self.resize(0)
        self._driver.free(self._address, self._regions * self._stride)
