"""Drawing the next token from logits."""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from busload_runtime.engine.plan import NO_TOKEN, Chunk, Logprobs, Plan, Sampled, SamplingParams, Shaping, mask_bytes
from busload_runtime.executors.errors import ExecutorError

Array: TypeAlias = NDArray[np.float32]

_LIKELY = 512
"""Tokens sorted first for top-p; most often they hold the whole nucleus and the vocabulary need not be sorted."""


def history_of(chunk: Chunk) -> "array[int]":
    """What the penalties of a drawing chunk look at; empty when it has none. Raises `ExecutorError`."""
    shaping = chunk.sampling.shaping if chunk.sampling is not None else None
    if shaping is None or not shaping.penalises:
        return array("i")
    history = chunk.history or array("i")
    if len(history) != chunk.length_after or chunk.sample_index > len(history):
        raise ExecutorError(
            f"request {chunk.request_id}: the plan asks for penalties with a history of {len(history)} tokens, "
            f"{chunk.sample_index} of them drawn; it must be all {chunk.length_after} tokens so far"
        )
    return history


def shape(logits: Array, shaping: Shaping, history: Sequence[int], num_drawn: int) -> Array:
    """Logits [vocab] with bias and penalties, each computed in fp64 and rounded to fp32.

    The last `num_drawn` tokens of `history` were drawn, the others are the prompt. In the order of vLLM and
    transformers: bias; repetition penalty (Keskar et al. 2019) on all tokens of `history`; then for each drawn token
    frequency penalty times its count plus presence penalty off (OpenAI API reference).
    """
    shaped = logits.copy()
    for token, bias in shaping.logit_bias:
        shaped[token] = np.float64(logits[token]) + bias
    tokens = np.asarray(history, np.intp)
    seen = np.unique(tokens)
    counts = np.bincount(tokens[len(tokens) - num_drawn :], minlength=len(logits))[seen]
    x = shaped[seen].astype(np.float64)
    x = np.where(x > 0, x / shaping.repetition_penalty, x * shaping.repetition_penalty)
    shaped[seen] = x - (shaping.frequency_penalty * counts + shaping.presence_penalty * (counts > 0))
    return shaped


def apply_mask(logits: Array, mask: bytes) -> Array:
    """Logits [vocab] with minus infinity for the tokens that `mask`, one of `Plan.masks`, leaves out."""
    may = np.unpackbits(np.frombuffer(mask, np.uint8), count=len(logits), bitorder="little")
    return np.where(may, logits, np.float32(-np.inf))


def masks_of(plan: Plan, vocab_size: int) -> Mapping[int, bytes]:
    """The masks of a plan. Raises `ExecutorError` for one of another length than the vocabulary needs."""
    for request_id, mask in plan.masks.items():
        if len(mask) != mask_bytes(vocab_size):
            raise ExecutorError(
                f"request {request_id}: the plan has a mask of {len(mask)} bytes; a vocabulary of {vocab_size} tokens "
                f"needs {mask_bytes(vocab_size)}"
            )
    return plan.masks


def scored_rows(chunks: Sequence[Chunk]) -> list[int]:
    """Rows, over all tokens of the chunks, whose logits `Chunk.scoring` asks for."""
    rows: list[int] = []
    begin = 0
    for chunk in chunks:
        if chunk.scoring is not None:
            first = begin + chunk.scoring.first
            rows += range(first, first + len(chunk.scoring.targets))
        begin += len(chunk.tokens)
    return rows


def answers_of(
    plan: Plan, drawn: Iterable[Sampled], chunks: Sequence[Chunk], scores: Iterable[Logprobs]
) -> list[Sampled]:
    """What `Executor.run` returns: one answer per chunk that draws or scores, in the order of the plan.

    `scores` are those of `scored_rows(chunks)`.
    """
    by_request = {answer.request_id: answer for answer in drawn}
    each = iter(scores)
    for chunk in chunks:
        if chunk.scoring is not None:
            answer = by_request.setdefault(chunk.request_id, Sampled(chunk.request_id, NO_TOKEN))
            answer.prompt = tuple(islice(each, len(chunk.scoring.targets)))
    return [by_request[chunk.request_id] for chunk in plan.chunks if chunk.request_id in by_request]


def score_all(chunks: Sequence[Chunk], logits: Iterable[Array]) -> Iterator[Logprobs]:
    """The log-probabilities of all targets, from logits [vocab] of `scored_rows`. Raises `ExecutorError`."""
    rows = iter(logits)
    for chunk in chunks:
        scoring = chunk.scoring
        for target in scoring.targets if scoring is not None else ():
            row = next(rows)
            if not np.isfinite(row).all():
                raise ExecutorError(not_a_number(chunk))
            assert scoring is not None
            yield logprobs_of(row, target, scoring.num_top)


def not_a_number(chunk: Chunk) -> str:
    return (
        f"request {chunk.request_id}: the model's output is not a number at position {chunk.length_after}; "
        "its weights are corrupt, download the model again"
    )


def sample(logits: Array, params: SamplingParams, sample_index: int) -> int:
    """One token id from `logits` [vocab]: temperature, min-p, top-k, then top-p (Holtzman et al. 2019).

    Logits are finite, or minus infinity for tokens that must not be drawn.

    The draw depends on the logits, `params` and `sample_index` alone: the generator is Philox, a function of a key and
    a counter, so nothing has to be remembered between steps. Tokens as likely as the k-th all stay.
    """
    if params.temperature == 0:
        return int(np.argmax(logits))
    tokens = _most_likely(logits, params.top_k)
    weights = np.exp((logits[tokens].astype(np.float64) - logits.max()) / params.temperature)
    if params.min_p > 0:
        likely = weights >= params.min_p  # weights are relative to the most likely token's
        tokens, weights = tokens[likely], weights[likely]
    if params.top_p < 1:
        kept = _nucleus(weights, params.top_p)
        tokens, weights = tokens[kept], weights[kept]
    cumulative = np.cumsum(weights)
    place = int(np.searchsorted(cumulative, uniform(params.seed, sample_index) * cumulative[-1], side="right"))
    # The product can round up to the total; the last token with any weight is then the one meant.
    return int(tokens[min(place, int(np.flatnonzero(weights)[-1]))])


def logprobs_of(logits: Array, drawn: int, num_top: int) -> Logprobs:
    """Log-softmax of `logits` [vocab] (finite), computed in fp64, for the drawn token and the `num_top` likeliest."""
    peak = float(logits.max())
    normaliser = peak + float(np.log(np.exp(logits.astype(np.float64) - peak).sum()))
    likely = _most_likely(logits, max(1, num_top))
    ranked = likely[np.argsort(-logits[likely], kind="stable")][:num_top]
    top = tuple((token, float(logits[token]) - normaliser) for token in ranked.tolist())
    return Logprobs(float(logits[drawn]) - normaliser, top)


def uniform(seed: int, sample_index: int) -> float:
    """A number in [0, 1) that only `seed` (taken modulo 2**64) and `sample_index` determine."""
    generator = np.random.Philox(key=seed % 2**64, counter=sample_index)
    return float(np.random.Generator(generator).random())


def _most_likely(logits: Array, count: int) -> NDArray[np.intp]:
    """Ids of the `count` largest logits and of those equal to the smallest of them; all ids for a count of 0."""
    if not 0 < count < len(logits):
        return np.arange(len(logits))
    return np.flatnonzero(logits >= np.partition(logits, -count)[-count])


def _nucleus(weights: NDArray[np.float64], top_p: float) -> NDArray[np.intp]:
    """Places of the fewest largest weights that together have at least `top_p` of the mass, largest first."""
    wanted = top_p * weights.sum()
    likely = np.arange(len(weights))
    if len(weights) > _LIKELY:
        likely = np.flatnonzero(weights >= np.partition(weights, -_LIKELY)[-_LIKELY])
        if weights[likely].sum() < wanted:
            likely = np.arange(len(weights))
    ranked = likely[np.argsort(-weights[likely], kind="stable")]
    return ranked[: int(np.searchsorted(np.cumsum(weights[ranked]), wanted)) + 1]
