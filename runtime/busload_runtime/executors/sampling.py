"""Drawing the next token from logits."""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from busload_runtime.engine.plan import SamplingParams

Array: TypeAlias = NDArray[np.float32]

_LIKELY = 512
"""Tokens sorted first for top-p; most often they hold the whole nucleus and the vocabulary need not be sorted."""


def sample(logits: Array, params: SamplingParams, sample_index: int) -> int:
    """One token id from `logits` [vocab] (finite): temperature, then top-k, then top-p (Holtzman et al. 2019).

    The draw depends on the logits, `params` and `sample_index` alone: the generator is Philox, a function of a key and
    a counter, so nothing has to be remembered between steps. Tokens as likely as the k-th all stay.
    """
    if params.temperature == 0:
        return int(np.argmax(logits))
    tokens = _most_likely(logits, params.top_k)
    weights = np.exp((logits[tokens].astype(np.float64) - logits.max()) / params.temperature)
    if params.top_p < 1:
        kept = _nucleus(weights, params.top_p)
        tokens, weights = tokens[kept], weights[kept]
    cumulative = np.cumsum(weights)
    place = int(np.searchsorted(cumulative, uniform(params.seed, sample_index) * cumulative[-1], side="right"))
    # The product can round up to the total; the last token with any weight is then the one meant.
    return int(tokens[min(place, int(np.flatnonzero(weights)[-1]))])


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
