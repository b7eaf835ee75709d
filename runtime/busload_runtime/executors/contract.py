"""What the engine asks of an executor. `reference` is the oracle for all others; all run the same conformance tests."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

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
