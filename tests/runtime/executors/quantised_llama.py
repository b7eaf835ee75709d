"""What the CPU engine computes, in numpy and fp64, rounding where it rounds. The fp32 reference says how much that
rounding costs; this says that nothing but the rounding is different."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from busload_runtime.model.weights import WeightFile

Array: TypeAlias = NDArray[np.float64]

_GROUP = 32
_SPAN = 128
# Where the products of neighbours are added in 16 bits, it is the largest sum of the sizes of two neighbouring dims of
# a query that becomes 127, not the largest size, and the largest sum of the weights of two neighbouring tokens that
# becomes 255.
SUMS_PAIRS = ("avx2",)


def logits(weights: WeightFile, tokens: Sequence[int], isa: str, kv_precision: str = "int8") -> Array:
    """[len(tokens), vocab] of a prompt. An int8 cache makes attention round, a little more with SUMS_PAIRS."""
    config = weights.config
    n, dim, kv_heads = len(tokens), config.head_dim, config.num_kv_heads
    angles = np.arange(n)[:, None, None] * weights.rope_frequencies()[0].astype(np.float64)
    x = _stored(weights.embedding())[list(tokens)]
    for index in range(config.num_layers):
        layer = weights.layer(index)
        normed = _rounded(_norm(x, layer.vectors.attention_norm, config.norm_eps), _GROUP, 127)
        heads = (normed @ _stored(layer.qkv).T).reshape(n, -1, dim)
        queries = _rotate(heads[:, : config.num_heads], angles)
        keys, values = _rotate(heads[:, config.num_heads : -kv_heads], angles), heads[:, -kv_heads:]
        if kv_precision == "int8":
            whole, scales = _quantise(values, dim, 127)
            keys = _rounded(keys, dim, 127)
            if isa in SUMS_PAIRS:
                pairs = np.abs(queries).reshape(n, -1, dim // 2, 2).sum(axis=-1)
                step = pairs.max(axis=-1, keepdims=True) / 127
                attended = _attend(np.rint(queries / step) * step, keys, whole, scales[..., 0], _pairs_to_bytes)
            else:
                attended = _attend(_rounded(queries, dim, 127), keys, whole, scales[..., 0], _to_bytes)
        else:
            attended = _attend(queries, keys, values)
        x = x + _rounded(attended.reshape(n, -1), _GROUP, 127) @ _stored(layer.attention_output).T
        normed = _rounded(_norm(x, layer.vectors.ffn_norm, config.norm_eps), _GROUP, 127)
        gate, up = np.split(normed @ _stored(layer.gate_up).T, 2, axis=-1)
        x = x + _rounded(gate / (1 + np.exp(-gate)) * up, _GROUP, 127) @ _stored(layer.down).T
    last = _rounded(_norm(x, weights.final_norm(), config.norm_eps), _GROUP, 127)
    head = weights.embedding() if config.tied_embeddings else weights.output()
    return last @ _stored(head).T


def _attend(
    queries: Array,
    keys: Array,
    values: Array,
    scales: Array | None = None,
    rounded: Callable[[Array], Array] | None = None,
) -> Array:
    """Causal. Softmax weights times value scales are `rounded` in each span of 128 tokens, as shares of their largest
    possible product."""
    n, heads, dim = queries.shape
    result = np.empty_like(queries)
    for head in range(heads):
        kv = head * keys.shape[1] // heads
        scores = queries[:, head] @ keys[:, kv].T / np.sqrt(dim)
        scores[np.triu_indices(n, 1)] = -np.inf
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        if scales is None or rounded is None:
            result[:, head] = weights @ values[:, kv]
            continue
        visible = np.tril(np.broadcast_to(scales[:, kv], (n, n)))
        for first in range(0, n, _SPAN):
            tile = slice(first, first + _SPAN)
            top = weights[:, tile].max(axis=1, keepdims=True) * visible[:, tile].max(axis=1, keepdims=True)
            whole = np.divide(
                weights[:, tile] * visible[:, tile], top, out=np.zeros((n, len(range(n)[tile]))), where=top > 0
            )
            weights[:, tile] = rounded(whole) * top
        result[:, head] = weights @ values[:, kv]
    return result


def _to_bytes(shares: Array) -> Array:
    """Of at most 1, rounded to steps of 1 / 255."""
    whole: Array = np.rint(shares * 255) / 255
    return whole


def _pairs_to_bytes(shares: Array) -> Array:
    """[rows, tokens] of at most 1, rounded to 15 bits, then by a whole factor / 2^15 which leaves no pair above 255."""
    wide = np.rint(shares * 32767)
    pairs = np.pad(wide, ((0, 0), (0, wide.shape[1] % 2))).reshape(len(wide), -1, 2).sum(axis=-1)
    factor = np.minimum(255 * 2**15 // np.maximum(pairs.max(axis=1, keepdims=True), 1), 32767)
    whole: Array = np.floor(wide * factor / 2**15 + 0.5) / factor * 2**15 / 32767
    return whole


def _quantise(x: Array, group: int, steps: int) -> tuple[Array, Array]:
    """Whole numbers up to `steps` in the shape of x, and the scale of each group [..., groups]."""
    groups = x.reshape(*x.shape[:-1], -1, group)
    scale = np.abs(groups).max(axis=-1) / steps
    whole = np.rint(np.divide(groups, scale[..., None], out=np.zeros_like(groups), where=scale[..., None] > 0))
    return whole.reshape(x.shape), scale


def _rounded(x: Array, group: int, steps: int) -> Array:
    whole, scale = _quantise(x, group, steps)
    return whole * np.repeat(scale, group, axis=-1)


def _stored(matrix: NDArray[np.float32]) -> Array:
    """For models whose file holds nothing but Q4_0, Q4_1 and Q8_0 matrices: the weights as they are."""
    return matrix.astype(np.float64)


def _norm(x: Array, gain: NDArray[np.float32], eps: float) -> Array:
    scaled: Array = x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + eps) * gain
    return scaled


def _rotate(x: Array, angles: Array) -> Array:
    first, second = np.split(x, 2, axis=-1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)
