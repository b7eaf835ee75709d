"""Decode steps as captured graphs, one for each size of batch in `buckets`: a launch from Python costs more time than
most kernels of such a step take, a graph's launches cost nothing.

A graph computes what it was captured with: the same addresses, the same shapes. So a step is padded to its bucket (rows
that write nothing and attend to nothing) and copied to the bucket's own buffers. All of it runs on the CPU too, where
replaying is calling again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from busload_runtime.executors.torch_model.ops import Tensor
from busload_runtime.executors.torch_model.step import Arrays, Staging

LARGEST = 512
"""Requests of the largest bucket; a step of more runs without a graph."""


def buckets() -> tuple[int, ...]:
    """1, 2, 4, then multiples of 8 to 64, of 16 to 128, of 32 to 256, of 64: at most a fifth is padding beyond 40."""
    return (1, 2, 4, *range(8, 64, 8), *range(64, 128, 16), *range(128, 256, 32), *range(256, LARGEST + 1, 64))


def bucket_for(batch: int) -> int | None:
    """The smallest bucket that holds `batch` requests."""
    return next((bucket for bucket in buckets() if bucket >= batch), None)


def padded(arrays: Arrays, bucket: int, width: int) -> Arrays:
    """The arrays of `step.arrange` for decodes alone, with rows up to `bucket` and block tables `width` blocks wide.

    A row that is added writes nowhere (slot -1) and has no cached tokens. All rows draw.
    """
    rows = len(arrays["tokens"])

    def grown(name: str, fill: int = 0) -> NDArray[Any]:
        return np.concatenate((arrays[name], np.full(bucket - rows, fill, arrays[name].dtype)))

    tables = np.zeros((bucket, width), np.int32)
    tables[:rows, : arrays["decode_tables"].shape[1]] = arrays["decode_tables"]
    return {
        "tokens": grown("tokens"),
        "sources": grown("sources"),
        "positions": grown("positions"),
        "slots": grown("slots", -1),
        "rows": np.arange(bucket, dtype=np.int32),
        "decode_tables": tables,
        "decode_lengths": grown("decode_lengths"),
        "piece_tables": np.zeros((0, width), np.int32),
        "piece_lengths": np.zeros(0, np.int32),
        "piece_starts": np.zeros(1, np.int32),
    }


class Recorded(Protocol):
    """A computation on fixed buffers."""

    outputs: tuple[Tensor, ...]

    def replay(self) -> None:
        """Computes again; `outputs` then hold the new results."""


class CalledAgain:
    """Implements `Recorded` where there are no graphs: computes when it is replayed."""

    def __init__(self, compute: Callable[[], tuple[Tensor, ...]]) -> None:
        self._compute = compute
        self.outputs: tuple[Tensor, ...] = ()

    def replay(self) -> None:
        self.outputs = self._compute()


class CapturedGraph:
    """Implements `Recorded` as a CUDA graph. Graphs that share a memory `pool` must not run at the same time."""

    def __init__(self, pool: object, compute: Callable[[], tuple[Tensor, ...]]) -> None:
        # Outside of the capture first: kernels are compiled and libraries initialised on first use.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            compute()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            self.outputs = compute()

    def replay(self) -> None:
        self._graph.replay()


Record: TypeAlias = Callable[[Callable[[], tuple[Tensor, ...]]], Recorded]


def recorder(device: torch.device) -> Record:
    """How computations are recorded on a device."""
    return partial(CapturedGraph, torch.cuda.graph_pool_handle()) if device.type == "cuda" else CalledAgain


@dataclass(frozen=True, slots=True)
class _Bucket:
    staging: Staging
    recorded: Recorded


class DecodeGraphs:
    """The graphs of one model on one cache, made when a bucket is first met."""

    def __init__(
        self,
        compute: Callable[[dict[str, Tensor]], tuple[Tensor, ...]],
        record: Record,
        device: torch.device,
        room: Callable[[int], dict[str, int]],
    ) -> None:
        """`compute`: a step's tensors -> results; `room`: bucket -> rows of the arrays whose length is not the bucket's
        (lists of work)."""
        self._compute, self._record, self._device, self._room = compute, record, device, room
        self._buckets: dict[int, _Bucket] = {}

    def clear(self) -> None:
        """Forgets all graphs."""
        self._buckets.clear()

    def run(self, bucket: int, arrays: Arrays) -> tuple[tuple[Tensor, ...], dict[str, Tensor]] | None:
        """Results and tensors of a step, whose arrays are `padded` to `bucket`; None when a list of work is longer than
        the bucket has room for. What is returned is overwritten by the next step: whoever wants it later tells the
        device to copy it now."""
        room = self._room(bucket)
        if any(len(arrays[name]) > rows for name, rows in room.items()):
            return None
        known = self._buckets.get(bucket)
        if known is None:
            shapes = {
                name: ((room.get(name, len(array)), *array.shape[1:]), array.dtype) for name, array in arrays.items()
            }
            staging = Staging(shapes, self._device)
            staging.fill(arrays)
            tensors = staging.device
            known = _Bucket(staging, self._record(lambda: self._compute(tensors)))
            self._buckets[bucket] = known
        else:
            known.staging.fill(arrays)
        known.recorded.replay()
        return known.recorded.outputs, known.staging.device
