"""What a step looks like to the model: flat arrays over all its tokens, made from a plan's chunks on the host.

Decoding requests (one token) come first, prompt pieces after them: attention has a kernel for each. Everything travels
to the device in one copy (`Staging`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from busload_runtime.engine.plan import PENDING, Chunk

Arrays: TypeAlias = dict[str, NDArray[Any]]

_ALIGNMENT = 16
"""Bytes at whose multiples kernels want tensors to begin."""
NOTHING_DRAWN: Mapping[int, int] = MappingProxyType({})
_TORCH = {"i": torch.int32, "l": torch.int64, "f": torch.float32}


@dataclass(frozen=True, slots=True)
class Step:
    """A step on the device. T tokens, of which the first D decode; P prompt pieces; R drawing rows; W blocks of the
    longest request."""

    tokens: torch.Tensor
    """[T] int32"""
    positions: torch.Tensor
    """[T] int32"""
    slots: torch.Tensor
    """[T] int64: block * block size + place, where keys and values go; negative: padding, nowhere."""
    rows: torch.Tensor
    """[R] int32: which tokens are followed by a draw."""
    decode_tables: torch.Tensor
    """[D, W] int32"""
    decode_lengths: torch.Tensor
    """[D] int32: cached tokens, the new one among them; 0: padding."""
    piece_tables: torch.Tensor
    """[P, W] int32"""
    piece_lengths: torch.Tensor
    """[P] int32"""
    piece_starts: torch.Tensor
    """[P + 1] int32: piece p has the tokens D + piece_starts[p] .. D + piece_starts[p + 1] - 1."""
    extras: Mapping[str, torch.Tensor]
    """What else the operations asked for: lists of work of the attention kernels."""

    @property
    def num_decodes(self) -> int:
        return len(self.decode_lengths)


def in_order(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Decodes, then prompt pieces, each in the order of the plan."""
    return sorted(chunks, key=lambda chunk: len(chunk.tokens) > 1)


def arrange(
    chunks: Sequence[Chunk], rows: Sequence[int], block_size: int, drawn: Mapping[int, int] = NOTHING_DRAWN
) -> Arrays:
    """The arrays of `Step` for `chunks`, which are `in_order`; `rows` are the drawing tokens, counted over all.

    Besides `sources` [T] int32: for a `PENDING` token its place in `draw.DrawnTokens`, by request in `drawn`, else 0.
    """
    counts = [len(chunk.tokens) for chunk in chunks]
    starts = np.array([chunk.start for chunk in chunks], np.int32)
    lengths = starts + np.array(counts, np.int32)
    num_decodes = sum(count == 1 for count in counts)
    used = -(-lengths // block_size)
    tables = np.zeros((len(chunks), used.max(initial=0)), np.int32)
    blocks_of = (chunk.blocks[:count] for chunk, count in zip(chunks, used.tolist(), strict=True))
    # All tables at once: an assignment for each costs more than its numbers.
    inside = np.arange(tables.shape[1]) < used[:, None]
    tables[inside] = np.fromiter(chain.from_iterable(blocks_of), np.int32, int(used.sum()))
    request = np.repeat(np.arange(len(chunks)), counts)
    first = np.cumsum([0, *counts])
    positions = starts[request] + (np.arange(first[-1]) - first[request]).astype(np.int32)
    blocks = tables[request, positions // block_size].astype(np.int64)
    tokens = np.array([token for chunk in chunks for token in chunk.tokens], np.int32)
    sources = np.zeros_like(tokens)
    if drawn and (pending := tokens == PENDING).any():
        sources[pending] = [drawn[chunk.request_id] for chunk in chunks if chunk.tokens[0] == PENDING]
        tokens[pending] = 0
    return {
        "tokens": tokens,
        "sources": sources,
        "positions": positions.astype(np.int32),
        "slots": blocks * block_size + positions % block_size,
        "rows": np.array(rows, np.int32),
        "decode_tables": tables[:num_decodes],
        "decode_lengths": lengths[:num_decodes],
        "piece_tables": tables[num_decodes:],
        "piece_lengths": lengths[num_decodes:],
        "piece_starts": (first[num_decodes:] - num_decodes).astype(np.int32),
    }


def step_of(tensors: Mapping[str, torch.Tensor]) -> Step:
    """The step of `arrange`'s tensors; those that it does not know are the operations' own."""
    own = {name: tensors[name] for name in Step.__slots__ if name != "extras"}
    return Step(**own, extras={name: tensor for name, tensor in tensors.items() if name not in own})


def worst_case(tokens: int, batch: int, longest: int) -> list[Chunk]:
    """A step of `tokens` tokens in pieces of up to `longest`, after `batch` - 1 decodes, or of decodes alone. All of it
    lies in block 0."""
    decodes = tokens if batch >= tokens else max(0, batch - 1)
    chunks = [Chunk(index, (0,), 0, (0,), None) for index in range(decodes)]
    left = tokens - decodes
    while left > 0:
        size = min(left, longest)
        chunks.append(Chunk(len(chunks), (0,) * size, 0, (0,) * size, None))
        left -= size
    return chunks


class Staging:
    """Host arrays and device tensors of fixed shapes, by name, each side in one piece of memory: one copy moves all.

    The host side is pinned where the device is a GPU, so that the copy runs beside the host's work.
    """

    def __init__(self, shapes: Mapping[str, tuple[tuple[int, ...], DTypeLike]], device: torch.device) -> None:
        offsets, size = {}, 0
        for name, (shape, dtype) in shapes.items():
            offsets[name] = size
            size += -(-int(np.prod(shape)) * np.dtype(dtype).itemsize // _ALIGNMENT) * _ALIGNMENT
        self._host = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._device = torch.zeros(size, dtype=torch.uint8, device=device)
        self._copied = torch.cuda.Event() if device.type == "cuda" else None
        self.host: Arrays = {}
        self.device: dict[str, torch.Tensor] = {}
        for name, (shape, dtype) in shapes.items():
            part = slice(offsets[name], offsets[name] + int(np.prod(shape)) * np.dtype(dtype).itemsize)
            self.host[name] = self._host[part].numpy().view(dtype).reshape(shape)
            self.device[name] = self._device[part].view(_TORCH[np.dtype(dtype).char]).view(shape)

    @classmethod
    def of(cls, arrays: Arrays, device: torch.device) -> "Staging":
        """Filled with `arrays`, and uploaded."""
        staging = cls({name: (array.shape, array.dtype) for name, array in arrays.items()}, device)
        staging.fill(arrays)
        return staging

    def fill(self, arrays: Arrays) -> None:
        """Puts arrays, which may be shorter, on the device: ordered before what the device is told next, and behind all
        it was told before, so a step that is running keeps its own. Waits until the last copy has left the host side,
        which it does when that step begins."""
        if self._copied is not None:
            self._copied.synchronize()
        for name, array in arrays.items():
            self.host[name][: len(array)] = array
        self._device.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()
