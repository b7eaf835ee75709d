"""What a pod on a GPU has beside what every runtime pod has."""

from typing import Any

from busload_operator.api.units import parse_bytes
from busload_operator.api.v1alpha1 import GPU, Spec
from busload_operator.resources.settings import RuntimeSettings

SHARED_MEMORY = "1Gi"
"""Size of /dev/shm: a container runtime's own 64 MiB is less than torch's processes share. It is memory of the pod, and
counts against its limit as it is used."""
CACHE_DIRECTORY = "/var/cache/busload"
CACHE_SIZE = "4Gi"
"""Compiled kernels. They outlive a restart of the container, so that it compiles nothing again, but not the pod."""
_CACHES = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "PYTORCH_KERNEL_CACHE_PATH": "torch",
    "CUDA_CACHE_PATH": "cuda",
}
_PRECISIONS = {"FP16": "bf16", "INT8": "int8", "FP8": "fp8"}
TOLERATIONS = [{"key": GPU, "operator": "Exists", "effect": "NoSchedule"}]
"""The taint that keeps other pods from the nodes with GPUs, by the convention of NVIDIA's device plugin."""


class NoGpuImageError(ValueError):
    """A service wants a GPU, and the operator was given no image for one."""


def wants_gpu(spec: Spec) -> bool:
    return spec.resources.limits.gpus is not None


def weight_bits(spec: Spec) -> int:
    """Bits of a weight on the GPU, without scales."""
    return 16 if spec.model.weight_precision == "FP16" else 8


def gpu_budget(spec: Spec) -> int | None:
    """Bytes of its GPU that a pod may use, where the spec says so."""
    return None if spec.resources.gpu_memory is None else parse_bytes(spec.resources.gpu_memory)


def image(settings: RuntimeSettings) -> str:
    """Raises `NoGpuImageError`."""
    if settings.gpu_image is None:
        raise NoGpuImageError(
            f"the service asks for {GPU}, but the operator has no runtime image for GPUs: set "
            "BUSLOAD_GPU_RUNTIME_IMAGE of the operator (image.gpuRuntime of its chart), or remove the GPU from "
            "spec.resources.limits"
        )
    return settings.gpu_image


def arguments(spec: Spec) -> list[str]:
    """The executor; its memory, else it measures what its GPU has free; its weights, else it has its own default."""
    budget, precision = gpu_budget(spec), _PRECISIONS.get(spec.model.weight_precision)
    return [
        "--executor=cuda",
        *([] if budget is None else [f"--memory={budget}"]),
        *([] if precision is None else [f"--weight-precision={precision}"]),
    ]


def environment() -> list[dict[str, Any]]:
    return [{"name": name, "value": f"{CACHE_DIRECTORY}/{folder}"} for name, folder in _CACHES.items()]


def volumes() -> list[dict[str, Any]]:
    return [
        {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": SHARED_MEMORY}},
        {"name": "kernel-cache", "emptyDir": {"sizeLimit": CACHE_SIZE}},
    ]


def volume_mounts() -> list[dict[str, Any]]:
    return [
        {"name": "shared-memory", "mountPath": "/dev/shm"},
        {"name": "kernel-cache", "mountPath": CACHE_DIRECTORY},
    ]
