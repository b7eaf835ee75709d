"""The one place where kernels are launched.

Within `recording()` nothing is launched: the launches are kept instead, so that the ahead-of-time gate and a dry run
see exactly what serving would run, made by the same wrappers from tensors without data (device "meta").
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import triton

from .errors import GpuKernelError


@dataclass(frozen=True, slots=True)
class Tile:
    """How a kernel is cut: compile-time sizes by parameter name, warps of a program, stages of its pipelined loop."""

    sizes: Mapping[str, int] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 1


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch: arguments by parameter name, tensors and compile-time values among them."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    tile: Tile


_recorded: ContextVar[list[Launch] | None] = ContextVar("recorded launches", default=None)


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """Keeps launches instead of doing them."""
    launches: list[Launch] = []
    token = _recorded.set(launches)
    try:
        yield launches
    finally:
        _recorded.reset(token)


def launch(kernel: Any, grid: tuple[int, ...], tile: Tile, **arguments: Any) -> None:
    """Launches `kernel` over `grid` programs, or keeps the launch. An empty grid is no launch.

    Compiled with fused multiply-adds, said aloud because Triton changes its default.
    """
    if 0 in grid:
        return
    if any(size > 65535 for size in grid[1:]) or grid[0] > 2**31 - 1:
        raise GpuKernelError(f"a grid of {grid} programs; CUDA allows at most (2147483647, 65535, 65535)")
    recorded = _recorded.get()
    if recorded is not None:
        recorded.append(Launch(kernel, grid, arguments | dict(tile.sizes), tile))
        return
    tensors = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    if not triton.knobs.runtime.interpret:
        for name, tensor in tensors.items():
            if tensor.device.type != "cuda":
                raise GpuKernelError(
                    f"{name} is on device {tensor.device}; kernels run on a CUDA device. Without one, "
                    "TRITON_INTERPRET=1 in the environment runs them in Triton's interpreter (slow, for tests)"
                )
    kernel[grid](**arguments, **tile.sizes, num_warps=tile.num_warps, num_stages=tile.num_stages, enable_fp_fusion=True)
