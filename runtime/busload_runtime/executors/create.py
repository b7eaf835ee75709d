"""Executors by name."""

from busload_runtime.executors.contract import Executor
from busload_runtime.executors.errors import ExecutorError

NAMES = ("reference", "cpu", "cuda")


def create_executor(
    name: str,
    source: str,
    kv_precision: str | None = None,
    room: int | None = None,
    *,
    device: str | None = None,
    weight_precision: str | None = None,
    allow_int4: bool = False,
) -> Executor:
    """The executor `name` with the model `source` loaded, and a KV cache of `kv_precision` (its own default if None).

    `room` is the memory in bytes that weights may take, if the executor knows before it takes it (cpu, cuda). `device`,
    `weight_precision` and `allow_int4` are for cuda alone: see `cuda.CudaOptions`.
    Raises `ExecutorError` or `ModelError`.
    """
    if name not in NAMES:
        raise ExecutorError(f"executor {name!r:.80} is unknown; allowed: {', '.join(NAMES)}")
    if name == "cuda":
        return _cuda(source, kv_precision, room, device or "cuda", weight_precision, allow_int4)
    cudas = {"--device": device, "--weight-precision": weight_precision, "--allow-int4": allow_int4 or None}
    for flag, value in cudas.items():
        if value is not None:
            raise ExecutorError(
                f"{flag} is {value!r:.80}; the {name} executor has no such choice; drop the flag, or choose "
                "--executor cuda"
            )
    from busload_runtime.model.load import load_weights

    if name == "cpu":
        from busload_runtime.executors.cpu import CpuExecutor

        return CpuExecutor(
            load_weights(source), kv_precision="int8" if kv_precision is None else kv_precision, room=room
        )
    if kv_precision not in (None, "fp32"):
        raise ExecutorError(
            f"--kv-precision is {kv_precision!r:.80}; the reference executor has fp32 only; drop the flag, or "
            "choose --executor cpu"
        )
    from busload_runtime.executors.reference import ReferenceExecutor

    return ReferenceExecutor(load_weights(source))


def _cuda(
    source: str,
    kv_precision: str | None,
    room: int | None,
    device: str,
    weight_precision: str | None,
    allow_int4: bool,
) -> Executor:
    try:
        import torch  # noqa: F401
        import triton  # noqa: F401
    except ImportError as error:
        raise ExecutorError(
            f"--executor cuda needs torch and Triton ({error}): use the GPU image, or pip install "
            "'busload[runtime,gpu]', or choose --executor cpu"
        ) from None
    from busload_runtime.executors.cuda import CudaExecutor, CudaOptions
    from busload_runtime.executors.torch_model.open import open_checkpoint

    options = CudaOptions(device, weight_precision, kv_precision, room)
    return CudaExecutor(open_checkpoint(source, allow_int4), options)
