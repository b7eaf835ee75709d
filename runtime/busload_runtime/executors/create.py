"""Executors by name."""

from busload_runtime.executors.contract import Executor
from busload_runtime.executors.errors import ExecutorError

NAMES = ("reference", "cpu")


def create_executor(name: str, source: str) -> Executor:
    """The executor `name` with the model `source` loaded. Raises `ExecutorError` or `ModelError`."""
    if name == "reference":
        from busload_runtime.executors.reference import ReferenceExecutor
        from busload_runtime.model.load import load_weights

        return ReferenceExecutor(load_weights(source))
    if name == "cpu":
        from busload_runtime.executors.cpu import CpuExecutor
        from busload_runtime.model.load import load_weights

        return CpuExecutor(load_weights(source))
    raise ExecutorError(f"executor {name!r:.80} is unknown; allowed: {', '.join(NAMES)}")
