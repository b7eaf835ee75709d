"""`device_pool.Driver` on a GPU: virtual memory management of the CUDA Driver API. torch brings `cuda-bindings`."""

from typing import Any

import cuda.bindings.driver as driver
import torch

from busload_runtime.executors.errors import ExecutorError
from busload_runtime.executors.torch_model.device_pool import OutOfMemory
from busload_runtime.executors.torch_model.ops import Tensor


class CudaDriver:
    """Implements `device_pool.Driver`."""

    def __init__(self, device: int) -> None:
        torch.cuda.init()  # the driver wants a context
        torch.zeros(1, device=torch.device("cuda", device))
        self._device = device
        self._kind = driver.CUmemAllocationProp()
        self._kind.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._kind.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._kind.location.id = device
        self._access = driver.CUmemAccessDesc()
        self._access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._access.location.id = device
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self.granularity = int(_checked(driver.cuMemGetAllocationGranularity(self._kind, minimum)))
        self._handles: dict[int, Any] = {}

    def reserve(self, size: int) -> int:
        return int(_checked(driver.cuMemAddressReserve(size, 0, driver.CUdeviceptr(0), 0)))

    def free(self, address: int, size: int) -> None:
        _checked(driver.cuMemAddressFree(driver.CUdeviceptr(address), size))

    def map(self, address: int, size: int) -> None:
        handle = _checked(driver.cuMemCreate(size, self._kind, 0))
        try:
            _checked(driver.cuMemMap(driver.CUdeviceptr(address), size, 0, handle, 0))
            _checked(driver.cuMemSetAccess(driver.CUdeviceptr(address), size, [self._access], 1))
        except BaseException:
            driver.cuMemRelease(handle)
            raise
        self._handles[address] = handle

    def unmap(self, address: int, size: int) -> None:
        torch.cuda.synchronize(self._device)
        _checked(driver.cuMemUnmap(driver.CUdeviceptr(address), size))
        _checked(driver.cuMemRelease(self._handles.pop(address)))


class _Memory:
    """What torch needs to know to see memory that is not its own."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def tensor_at(address: int, shape: tuple[int, ...], dtype: torch.dtype, device: int) -> Tensor:
    """A tensor in mapped memory, which must outlive it."""
    numbers = 1
    for size in shape:
        numbers *= size
    if not numbers:
        return torch.empty(shape, dtype=dtype, device=torch.device("cuda", device))
    raw = torch.as_tensor(_Memory(address, numbers * dtype.itemsize), device=torch.device("cuda", device))
    return raw.view(dtype).view(shape)


def _checked(answer: tuple[Any, ...]) -> Any:
    """What a driver call returned beside its code. Raises `OutOfMemory` or `ExecutorError`."""
    code, *values = answer
    if code == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
        raise OutOfMemory("the GPU is out of memory")
    if code != driver.CUresult.CUDA_SUCCESS:
        raise ExecutorError(f"the CUDA driver says {code.name}; look at the node's kernel log (dmesg, Xid)")
    return values[0] if values else None
