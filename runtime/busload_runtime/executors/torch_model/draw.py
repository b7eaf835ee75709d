"""From logits to tokens: what requests ask for is put on the device with the step, and applied there to all rows."""

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from busload_runtime.engine.plan import Chunk, Sampled, SamplingParams, Shaping
from busload_runtime.executors.errors import ExecutorError
from busload_runtime.executors.sampling import history_of, logprobs_of, not_a_number
from busload_runtime.executors.torch_model.ops import Draws, Ops, Tensor
from busload_runtime.executors.torch_model.step import Arrays

_PREFIX = "draw_"
_FIELDS = {
    "temperature": np.float32,
    "top_k": np.int32,
    "top_p": np.float32,
    "min_p": np.float32,
    "seed": np.int64,
    "sample_index": np.int32,
}
NOT_FINITE = -1
"""In place of a token where the logits were not numbers."""


class DrawnTokens:
    """What the last step drew, where the next one finds it on the device: `table` [1 + rows] int32.

    Place 0 holds a number below all tokens. So the larger of a known token and place 0 is the token, and the larger of
    0 and another place is what was drawn there (0 for `NOT_FINITE`: the result of that step is an error anyway).
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self._table = torch.full((1 + rows,), -1, dtype=torch.int32, device=device)
        self.places: dict[int, int] = {}
        """Place of each request for which the last step drew."""

    def keep(self, drawing: Sequence[Chunk], tokens: Tensor) -> None:
        """`tokens` [rows] were drawn. No part of a recorded step, which is computed twice when it is recorded: the
        second time it must find what the first one found."""
        self._table[1 : 1 + len(drawing)].copy_(tokens)
        self.places = {chunk.request_id: place for place, chunk in enumerate(drawing, 1)}

    def put_in(self, tokens: Tensor, sources: Tensor) -> Tensor:
        """`tokens` [T] with those that `step.arrange` left to be put in."""
        return torch.maximum(tokens, self._table.index_select(0, sources))


def draw_arrays(drawing: Sequence[Chunk], rows: int) -> Arrays:
    """The columns of `Draws` for chunks that draw, each named with a prefix, and greedy rows up to `rows`."""
    params = [params_of(chunk) for chunk in drawing]
    columns: dict[str, list[float]] = {
        "temperature": [one.temperature for one in params],
        "top_k": [min(one.top_k, 2**31 - 1) for one in params],
        "top_p": [one.top_p for one in params],
        "min_p": [one.min_p for one in params],
        "seed": [(one.seed + 2**63) % 2**64 - 2**63 for one in params],
        "sample_index": [chunk.sample_index for chunk in drawing],
    }
    arrays = {_PREFIX + name: np.zeros(rows, dtype) for name, dtype in _FIELDS.items()}
    for name, column in columns.items():
        arrays[_PREFIX + name][: len(column)] = column
    return arrays


def draws_of(tensors: Mapping[str, Tensor], rows: int | None = None) -> Draws:
    """Of the first `rows`; None: of all."""
    return Draws(**{name: tensors[_PREFIX + name][:rows] for name in _FIELDS})


def draw(logits: Tensor, draws: Draws, ops: Ops) -> Tensor:
    """Tokens [rows] int32 for logits [rows, vocab], `NOT_FINITE` for rows that hold what is not a number."""
    finite = torch.isfinite(logits).all(1)
    return torch.where(finite, ops.sample(logits.nan_to_num(), draws), NOT_FINITE)


def draw_shaped(logits: Tensor, drawing: Sequence[Chunk], masks: Mapping[int, bytes], draws: Draws, ops: Ops) -> Tensor:
    """`draw` after bias, penalties and masks, where there are any."""
    finite = torch.isfinite(logits).all(1)
    shaped = logits.nan_to_num()
    for row, chunk in zip(shaped, drawing, strict=True):
        shaping = params_of(chunk).shaping
        if shaping is not None:
            history = history_of(chunk)
            shape(row, shaping, history, min(chunk.sample_index, len(history)))
        if chunk.request_id in masks:
            _apply_mask(row, masks[chunk.request_id])
    return torch.where(finite, ops.sample(shaped, draws), NOT_FINITE)


def needs_shaping(drawing: Sequence[Chunk], masks: Mapping[int, bytes]) -> bool:
    return bool(masks) or any(params_of(chunk).shaping is not None for chunk in drawing)


def shape(row: Tensor, shaping: Shaping, history: "array[int]", num_drawn: int) -> None:
    """`executors.sampling.shape` on a device, in place: only the tokens concerned travel."""
    if shaping.logit_bias:
        ids, biases = zip(*shaping.logit_bias, strict=True)
        added = _moved(np.array(biases, np.float64), row.device)
        _update(row, np.array(ids), lambda x: x + added)
    if not len(history):
        return
    tokens = np.frombuffer(history, np.intc)
    seen = np.unique(tokens)
    counts = np.bincount(tokens[len(tokens) - num_drawn :], minlength=int(seen[-1]) + 1)[seen]
    taken = _moved(shaping.frequency_penalty * counts + shaping.presence_penalty * (counts > 0), row.device)
    factor = shaping.repetition_penalty
    _update(row, seen, lambda x: torch.where(x > 0, x / factor, x * factor) - taken)


def sampled(
    drawing: Sequence[Chunk], tokens: Sequence[int], logits: Mapping[int, NDArray[np.float32]]
) -> list[Sampled]:
    """The answers, with log-probabilities where asked, from `logits` by row. Raises `ExecutorError` at `NOT_FINITE`."""
    answers = []
    for row, (chunk, token) in enumerate(zip(drawing, tokens, strict=True)):
        if token == NOT_FINITE:
            raise ExecutorError(not_a_number(chunk))
        wanted = params_of(chunk).logprobs
        logprobs = None if wanted is None else logprobs_of(logits[row], token, wanted)
        answers.append(Sampled(chunk.request_id, token, logprobs))
    return answers


def params_of(chunk: Chunk) -> SamplingParams:
    assert chunk.sampling is not None
    return chunk.sampling


def _update(row: Tensor, ids: NDArray[Any], change: Callable[[Tensor], Tensor]) -> None:
    at = _moved(ids.astype(np.int64), row.device)
    row[at] = change(row[at].double()).float()


def _apply_mask(row: Tensor, mask: bytes) -> None:
    packed = _moved(np.frombuffer(mask, np.uint8).copy(), row.device)
    bits = packed[:, None] >> torch.arange(8, dtype=torch.uint8, device=row.device) & 1
    row.masked_fill_(bits.flatten()[: len(row)] == 0, -torch.inf)


def _moved(values: NDArray[Any], device: torch.device) -> Tensor:
    """On the device, without waiting for it: a copy from memory that is not pinned would."""
    host = torch.from_numpy(values)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
