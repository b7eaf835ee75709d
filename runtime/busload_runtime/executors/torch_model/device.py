"""The device that a model runs on: found, named and measured."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from busload_runtime.executors.errors import ExecutorError

DEVICES = ("cuda", "cpu")
_COPY_BYTES = {"cuda": 2**30, "cpu": 2**25}


@dataclass(frozen=True, slots=True)
class Device:
    torch: torch.device
    name: str
    """As the driver names it: `NVIDIA H200`."""
    float_name: str
    """Type of activations, a name of `loading.FLOATS`."""

    @property
    def is_gpu(self) -> bool:
        return bool(self.torch.type == "cuda")


def open_device(name: str) -> Device:
    """`cuda`: the first GPU that is visible. `cpu`: plain torch in fp32, to test without one.

    Raises `ExecutorError` without a GPU, or with one that the kernels are not made for.
    """
    if name == "cpu":
        # More threads would wait for each other at hundreds of barriers a step, on cores that others use too.
        torch.set_num_threads(1)
        return Device(torch.device("cpu"), "cpu", "fp32")
    if name != "cuda":
        raise ExecutorError(f"--device is {name!r:.80}; the cuda executor has {', '.join(DEVICES)}; choose one")
    if torch.version.cuda is None:
        raise ExecutorError(
            f"torch {torch.__version__} is built without CUDA; install a CUDA build (pip install 'busload[gpu]'), or "
            "choose --executor cpu"
        )
    if not torch.cuda.is_available():
        raise ExecutorError(
            f"no CUDA GPU is visible (torch {torch.__version__} for CUDA {torch.version.cuda}): give the pod "
            "resources.limits nvidia.com/gpu: 1, check the node's driver with nvidia-smi, or choose --executor cpu"
        )
    major, minor = torch.cuda.get_device_capability(0)
    if major < 8:
        raise ExecutorError(
            f"{torch.cuda.get_device_name(0)} has compute capability {major}.{minor}; the kernels need 8.0 (A100) or "
            "later; choose --executor cpu"
        )
    return Device(torch.device("cuda", 0), torch.cuda.get_device_name(0), "bf16")


@contextmanager
def memory_enough(what: str) -> Iterator[None]:
    """Says what was done when the GPU ran out of memory, as `ExecutorError`."""
    try:
        yield
    except torch.cuda.OutOfMemoryError:
        free, total = torch.cuda.mem_get_info()
        raise ExecutorError(
            f"the GPU ran out of memory {what} ({free / 2**20:.0f} of its {total / 2**20:.0f} MiB are free): lower "
            "--memory, tokenBudget or batchSize, or end what else uses the GPU"
        ) from None


def measure_copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read plus write, of the best of a few copies of an array larger than the caches."""
    source = torch.ones(_COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    seconds = []
    for _ in range(5):
        _wait(device)
        begin = time.perf_counter()
        target.copy_(source)
        _wait(device)
        seconds.append(time.perf_counter() - begin)
    return float(2 * source.nbytes / min(seconds))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
