"""What the engine asks of an executor. `reference` is the oracle for all others; all run the same conformance tests."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from busload_runtime.engine.plan import Plan, Sampled


class DeviceMemory(NamedTuple):
    """Memory of a device that has its own. Weights, KV cache and steps live there, not in this process's memory."""

    name: str
    """Of the device, for messages."""
    num_bytes: int
    """What it has in all."""
    taken: int
    """What neither weights nor steps nor KV cache take: the driver, other processes, what must stay free."""


class Executor(Protocol):
    """Runs engine steps on one model. Not thread-safe; the engine calls it from one thread."""

    block_size: int
    """Tokens per KV block."""
    bytes_per_block: int
    """KV bytes of one block over all layers."""
    weight_bytes: int
    """Bytes of weights in memory (what one step reads)."""
    vocab_size: int
    context_length: int
    """Longest sequence the model was made for, in tokens."""
    device_memory: DeviceMemory | None
    """None: everything lives in this process's memory."""

    @property
    def copy_bandwidth(self) -> float:
        """Bytes per second, read plus write. Measured when first asked for, which is when nothing else computes."""

    def activation_bytes(self, token_budget: int, batch_size: int) -> int:
        """Upper bound of the memory a step of this size needs beside weights and KV."""

    def reserve(self, max_blocks: int) -> None:
        """Reserves address space for up to `max_blocks`; memory is committed when blocks are first written."""

    def resize(self, num_blocks: int) -> None:
        """Makes blocks 0 .. num_blocks - 1 usable and gives the memory of the others back. Their content is lost."""

    def run(self, plan: Plan) -> Sequence[Sampled]:
        """Computes one step: writes keys and values of all chunks, returns one token per chunk that has `sampling`.

        A chunk with `scoring` has one, too, with the log-probabilities of its targets; `NO_TOKEN` if it does not draw.
        """


class Pending(Protocol):
    """A step that was launched."""

    def result(self) -> Sequence[Sampled]:
        """Waits for the step to end; what `Executor.run` returns for its plan. Taken once, in the order of launches."""


@dataclass(slots=True)
class Computed:
    """Implements `Pending` for a step that had ended when it was launched."""

    sampled: Sequence[Sampled]

    def result(self) -> Sequence[Sampled]:
        return self.sampled


@runtime_checkable
class Overlapping(Protocol):
    """What an executor has beside `Executor` if its steps run beside the caller: the engine then plans and launches a
    step while the one before it runs."""

    def launch(self, plan: Plan) -> Pending:
        """Begins a step behind those launched before, each of which sees all that the ones before it wrote. Chunks may
        have `PENDING` for the token that the step launched last draws for their request. `run` is `launch` and
        `result`. All results are taken before `run`, `resize` and `reserve`, and that of a step that scores a prompt
        before another `launch`."""


def launcher(executor: Executor) -> tuple[Callable[[Plan], Pending], int]:
    """How steps of an executor are launched, and how many may be in flight when the next one is."""
    if isinstance(executor, Overlapping):
        return executor.launch, 1
    return lambda plan: Computed(executor.run(plan)), 0
