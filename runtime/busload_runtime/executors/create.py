"""Executors by name."""

from busload_runtime.executors.contract import Executor
from busload_runtime.executors.errors import ExecutorError

NAMES = ("reference", "cpu")


def create_executor(name: str, source: str, kv_precision: str | None = None, room: int | None = None) -> Executor:
    """The executor `name` with the model `source` loaded, and a KV cache of `kv_precision` (its own default if None).

    `room` is the memory in bytes that weights may take, if the executor knows before it takes it (cpu).
    Raises `ExecutorError` or `ModelError`.
    """
    if name == "reference":
        if kv_precision not in (None, "fp32"):
            raise ExecutorError(
                f"--kv-precision is {kv_precision!r:.80}; the reference executor has fp32 only; drop the flag, or "
                "choose --executor cpu"
            )
        from busload_runtime.executors.reference import ReferenceExecutor
        from busload_runtime.model.load import load_weights

        return ReferenceExecutor(load_weights(source))
    if name == "cpu":
        from busload_runtime.executors.cpu import CpuExecutor
        from busload_runtime.model.load import load_weights

        return CpuExecutor(
            load_weights(source), kv_precision="int8" if kv_precision is None else kv_precision, room=room
        )
    raise ExecutorError(f"executor {name!r:.80} is unknown; allowed: {', '.join(NAMES)}")
