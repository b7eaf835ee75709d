"""What every wrapper says about bad tensors, in one wording. Checks look at shapes and types only, never at values:
those are on the device, and reading them would wait for it."""

from collections.abc import Sequence

import torch

from .errors import GpuKernelError

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
"""What activations may be. fp32 is for tests: matrix products in it are slow on every GPU."""
EIGHT_BIT = (torch.int8, torch.float8_e4m3fn)
"""What quantised tensors may be. fp8 is e4m3 without infinities, largest value 448."""


def check_tensor(name: str, tensor: torch.Tensor, shape: Sequence[int | str], dtypes: Sequence[torch.dtype]) -> None:
    """Raises `GpuKernelError` unless `tensor` has this shape (a name stands for any size) and one of these types, and
    is contiguous from an address that 16 divides, which the wide loads rely on."""
    fits = len(tensor.shape) == len(shape) and all(
        isinstance(want, str) or have == want for have, want in zip(tensor.shape, shape, strict=True)
    )
    if not fits:
        raise GpuKernelError(f"{name} has shape {list(tensor.shape)}; it must be [{', '.join(map(str, shape))}]")
    if tensor.dtype not in dtypes:
        raise GpuKernelError(f"{name} is {short(tensor.dtype)}; allowed: {', '.join(map(short, dtypes))}")
    if not tensor.is_contiguous():
        raise GpuKernelError(
            f"{name} has strides {list(tensor.stride())} for shape {list(tensor.shape)}; it must be contiguous: "
            "call .contiguous() once, when it is made"
        )
    if tensor.device.type != "meta" and tensor.data_ptr() % 16:
        raise GpuKernelError(f"{name} starts {tensor.data_ptr() % 16} bytes past a multiple of 16; it must be at one")


def check_scales(name: str, scales: torch.Tensor | None, values: torch.Tensor, shape: Sequence[int | str]) -> None:
    """Raises unless fp32 scales of this shape are there exactly when `values` are quantised."""
    if values.dtype not in EIGHT_BIT:
        if scales is not None:
            raise GpuKernelError(f"{name} are given for {short(values.dtype)} values, which have none: leave them out")
    elif scales is None:
        raise GpuKernelError(f"{name} are missing: {short(values.dtype)} values need fp32 scales {list(shape)}")
    else:
        check_tensor(name, scales, shape, (torch.float32,))


def check_power_of_two(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most or value & (value - 1):
        raise GpuKernelError(f"{name} is {value}; it must be a power of two from {least} to {most}")


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
