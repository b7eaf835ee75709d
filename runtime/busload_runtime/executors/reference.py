"""The reference executor: a decoder in numpy, fp32, one page. It is the oracle of all other executors.

`run` computes a ragged batch: single tokens of decoding requests and pieces of prompts, one row per token in every
array. Linear layers take all rows at once; attention goes request by request over its own keys, so neither padding nor
other requests enter a sum (see `linear` for what this means for reproducibility).
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from functools import cached_property
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from busload_runtime.engine.plan import Chunk, Plan, Sampled
from busload_runtime.executors.contract import DeviceMemory
from busload_runtime.executors.errors import ExecutorError
from busload_runtime.executors.kv_pool import KvPool
from busload_runtime.executors.linear import Linear, rows_of, tile, usable_threads
from busload_runtime.executors.plan_check import check_chunks
from busload_runtime.executors.sampling import (
    answers_of,
    apply_mask,
    history_of,
    logprobs_of,
    masks_of,
    not_a_number,
    sample,
    score_all,
    scored_rows,
    shape,
)
from busload_runtime.model.architectures.description import Activation
from busload_runtime.model.config import ModelConfig
from busload_runtime.model.progress import LoadProgress
from busload_runtime.model.weights import LayerVectors, LayerWeights, WeightFile

Array: TypeAlias = NDArray[np.float32]

_BLOCK_SIZE = 16
_BLAS_BUFFER = 2**25
"""Bytes that OpenBLAS maps for each thread to copy panels of a matrix into."""
_QUERY_ROWS = 128
"""Tokens of a prompt piece whose attention scores are in memory at once."""


class ReferenceExecutor:
    """Implements `contract.Executor`."""

    def __init__(self, weights: WeightFile, num_threads: int | None = None) -> None:
        config = weights.config
        self._config = config
        self._linear = Linear(num_threads or usable_threads())
        self._embedding = tile(weights.embedding())
        progress = LoadProgress(weights.file.path, config.num_layers * _matrix_bytes(config))
        self._layers = []
        for index in range(config.num_layers):
            self._layers.append(_tiled(weights.layer(index)))
            progress.add(_matrix_bytes(config))
        progress.finish()
        self._final_norm = weights.final_norm()
        self._output = self._embedding if config.tied_embeddings else tile(weights.output())
        self._rope_frequencies = weights.rope_frequencies()
        self.block_size = _BLOCK_SIZE
        self.bytes_per_block = _BLOCK_SIZE * config.kv_bytes_per_token
        self.weight_bytes = self._count_weight_bytes()
        self.vocab_size = config.vocab_size
        self.context_length = config.context_length
        self.device_memory: DeviceMemory | None = None
        self.reserve(0)

    @cached_property
    def copy_bandwidth(self) -> float:
        return measure_copy_bandwidth()

    def activation_bytes(self, token_budget: int, batch_size: int) -> int:
        config = self._config
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        # Each term counts the arrays that are alive at once in `logits` and its callees, copies included.
        per_token = 6 * config.hidden_size + 7 * (q_size + 2 * kv_size) + 8 * config.ffn_size
        scores = 3 * (config.num_heads + 1) * min(_QUERY_ROWS, token_budget) * config.context_length
        gathered = 2 * kv_size * (config.context_length + _BLOCK_SIZE)
        logits = 3 * (batch_size + 8) * config.vocab_size
        drawing = 16 * config.vocab_size
        arrays = 4 * (token_budget * per_token + scores + gathered + logits + drawing)
        return arrays + self._linear.num_threads * _BLAS_BUFFER + 2**20

    def reserve(self, max_blocks: int) -> None:
        config = self._config
        shape = (self.block_size, config.num_kv_heads, config.head_dim)
        self._pool = KvPool(config.num_layers, shape, max(1, max_blocks))

    def resize(self, num_blocks: int) -> None:
        self._pool.resize(num_blocks)

    def run(self, plan: Plan) -> Sequence[Sampled]:
        check_chunks(plan.chunks, self._pool.blocks.shape[2], _BLOCK_SIZE, self.vocab_size)
        masks = masks_of(plan, self.vocab_size)
        # Decoding requests first: `linear` treats them apart.
        chunks = sorted(plan.chunks, key=lambda chunk: len(chunk.tokens) > 1)
        drawing = [(chunk, end - 1) for chunk, (_, end) in _with_rows(chunks) if chunk.sampling is not None]
        logits = self.logits(chunks, [row for _, row in drawing] + scored_rows(chunks))
        drawn = [
            _draw(chunk, row, masks.get(chunk.request_id)) for (chunk, _), row in zip(drawing, logits, strict=False)
        ]
        return answers_of(plan, drawn, chunks, score_all(chunks, logits[len(drawing) :]))

    def _count_weight_bytes(self) -> int:
        tables = [self._embedding, self._final_norm]
        if self._output is not self._embedding:
            tables.append(self._output)
        for layer in self._layers:
            tables += [layer.qkv, layer.attention_output, layer.gate_up, layer.down]
            vectors = (getattr(layer.vectors, field.name) for field in fields(layer.vectors))
            tables += [vector for vector in vectors if vector is not None]
        return sum(table.nbytes for table in tables)

    def logits(self, chunks: Sequence[Chunk], wanted_rows: Sequence[int]) -> Array:
        """Logits [len(wanted_rows), vocab] after writing keys and values of all chunks."""
        config = self._config
        if not chunks:
            return np.empty((0, config.vocab_size), np.float32)
        num_decodes = sum(len(chunk.tokens) == 1 for chunk in chunks)
        x = rows_of(self._embedding, np.concatenate([chunk.tokens for chunk in chunks]))
        x *= np.float32(config.embedding_scale)
        positions = np.concatenate([np.arange(chunk.start, chunk.length_after) for chunk in chunks])
        blocks = np.concatenate(
            [np.repeat(chunk.blocks, _BLOCK_SIZE)[chunk.start : chunk.length_after] for chunk in chunks]
        )
        slots = blocks * _BLOCK_SIZE + positions % _BLOCK_SIZE
        turns = [positions[:, None, None].astype(np.float32) * rope for rope in self._rope_frequencies]
        rotations = [(np.cos(angles), np.sin(angles)) for angles in turns]
        for layer, kv, how in zip(self._layers, self._pool.blocks, config.layers, strict=True):
            vectors = layer.vectors
            normed = _rms_norm(x, vectors.attention_norm, config.norm_eps)
            heads = self._heads(self._linear(normed, layer.qkv, num_decodes), vectors, rotations[how.rope])
            attended = self._attention(*heads, chunks, kv, slots, how.window)
            added = self._linear(attended, layer.attention_output, num_decodes)[:, : config.hidden_size]
            x += self._optional_norm(added, vectors.post_attention_norm)
            normed = _rms_norm(x, vectors.ffn_norm, config.norm_eps)
            x += self._optional_norm(self._feed_forward(normed, layer, num_decodes), vectors.post_ffn_norm)
        last = _rms_norm(x[wanted_rows], self._final_norm, config.norm_eps)
        return self._linear(last, self._output, len(last))[:, : config.vocab_size]

    def _heads(self, qkv: Array, vectors: LayerVectors, rotation: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        """Queries [tokens, heads, head_dim], keys and values [tokens, kv_heads, head_dim], ready for attention."""
        config = self._config
        num_heads = config.num_heads + 2 * config.num_kv_heads
        qkv = qkv[:, : num_heads * config.head_dim]
        if vectors.qkv_bias is not None:
            qkv = qkv + vectors.qkv_bias
        heads = qkv.reshape(len(qkv), num_heads, config.head_dim)
        queries, keys, values = np.split(heads, [config.num_heads, config.num_heads + config.num_kv_heads], axis=1)
        queries = _rotate(self._optional_norm(queries, vectors.query_norm), *rotation)
        keys = _rotate(self._optional_norm(keys, vectors.key_norm), *rotation)
        return queries, keys, values

    def _attention(
        self,
        queries: Array,
        keys: Array,
        values: Array,
        chunks: Sequence[Chunk],
        kv: Array,
        slots: NDArray[np.intp],
        window: int,
    ) -> Array:
        """Writes keys and values of all rows, then attends chunk by chunk. Returns [tokens, heads * head_dim]."""
        config = self._config
        flat = kv.reshape(2, -1, config.num_kv_heads, config.head_dim)
        flat[0][slots] = keys
        flat[1][slots] = values
        result = np.empty_like(queries)
        for chunk, (begin, end) in _with_rows(chunks):
            keys, values = _gather(kv[0], chunk), _gather(kv[1], chunk)
            for first in range(begin, end, _QUERY_ROWS):
                last = min(first + _QUERY_ROWS, end)
                visible = chunk.start + last - begin
                oldest = max(0, chunk.start + first - begin - window + 1) if window else 0
                seen = slice(oldest, visible)
                result[first:last] = _attend(
                    queries[first:last], keys[seen], values[seen], config.attention_scale, window
                )
        return result.reshape(len(queries), -1)

    def _optional_norm(self, x: Array, gain: Array | None) -> Array:
        return x if gain is None else _rms_norm(x, gain, self._config.norm_eps)

    def _feed_forward(self, x: Array, layer: LayerWeights, num_decodes: int) -> Array:
        """down(activation(gate) * up)"""
        size = self._config.ffn_size
        gate_up = self._linear(x, layer.gate_up, num_decodes)
        gate, up = gate_up[:, :size], gate_up[:, size : 2 * size]
        hidden = _ACTIVATIONS[self._config.activation](gate) * up
        return self._linear(hidden, layer.down, num_decodes)[:, : self._config.hidden_size]


def _silu(x: Array) -> Array:
    with np.errstate(over="ignore"):  # exp(-x) may overflow: then the result is 0, as it should be
        result: Array = x / (1 + np.exp(-x))
    return result


def _gelu_tanh(x: Array) -> Array:
    inner = x * x
    inner *= np.float32(0.044715)
    inner += 1
    inner *= x
    inner *= np.float32(np.sqrt(2 / np.pi))
    np.tanh(inner, out=inner)
    inner += 1
    inner *= x
    inner *= np.float32(0.5)
    return inner


_ACTIVATIONS = {Activation.SILU: _silu, Activation.GELU_TANH: _gelu_tanh}


def _matrix_bytes(config: ModelConfig) -> int:
    """Of one layer in fp32."""
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return 4 * config.hidden_size * (2 * q_size + 2 * kv_size + 3 * config.ffn_size)


def _tiled(layer: LayerWeights) -> LayerWeights:
    """The same layer with its matrices as tiles."""
    return replace(
        layer,
        qkv=tile(layer.qkv),
        attention_output=tile(layer.attention_output),
        gate_up=tile(layer.gate_up),
        down=tile(layer.down),
    )


def _with_rows(chunks: Sequence[Chunk]) -> Iterator[tuple[Chunk, tuple[int, int]]]:
    """Each chunk with the first and the last + 1 of its rows."""
    ends = np.cumsum([0, *(len(chunk.tokens) for chunk in chunks)]).tolist()
    return zip(chunks, pairwise(ends), strict=True)


def _rms_norm(x: Array, gain: Array, eps: float) -> Array:
    """Zhang and Sennrich 2019."""
    scale: Array = np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + np.float32(eps))
    return x / scale * gain


def _rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotary positions (Su et al. 2021) for x [tokens, heads, head_dim]: dimension i turns with i + head_dim / 2."""
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)


def _gather(pool: Array, chunk: Chunk) -> Array:
    """Keys or values [length, kv_heads, head_dim] of a chunk's request; a view where its blocks lie in a row."""
    first, count = chunk.blocks[0], len(chunk.blocks)
    in_a_row = chunk.blocks == tuple(range(first, first + count))
    blocks = pool[first : first + count] if in_a_row else pool[list(chunk.blocks)]
    return blocks.reshape(-1, *pool.shape[2:])[: chunk.length_after]


def _attend(queries: Array, keys: Array, values: Array, scale: float, window: int) -> Array:
    """Causal grouped-query attention; the queries are at the last positions of the keys.

    queries [n, heads, head_dim], keys and values [length, kv_heads, head_dim]; returns [n, heads, head_dim]. A query
    sees `window` keys, its own included; 0: all.
    """
    n, num_heads, head_dim = queries.shape
    length, num_kv_heads, _ = keys.shape
    # [kv_heads, group * n, head_dim]: the heads that share keys become rows of one product.
    rows = queries.reshape(n, num_kv_heads, -1, head_dim).transpose(1, 2, 0, 3).reshape(num_kv_heads, -1, head_dim)
    scores: Array = rows @ keys.transpose(1, 2, 0)
    scores *= np.float32(scale)
    if n > 1:
        distance = np.arange(length - n, length)[:, None] - np.arange(length)
        hidden = distance < 0
        if window:
            hidden |= distance >= window
        scores.reshape(num_kv_heads, -1, n, length)[:, :, hidden] = -np.inf
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    mixed: Array = scores @ values.transpose(1, 0, 2)
    return mixed.reshape(num_kv_heads, -1, n, head_dim).transpose(2, 0, 1, 3).reshape(n, num_heads, head_dim)


def _draw(chunk: Chunk, logits: Array, mask: bytes | None) -> Sampled:
    if not np.isfinite(logits).all():
        raise ExecutorError(not_a_number(chunk))
    params = chunk.sampling
    assert params is not None
    shaped = logits
    if params.shaping is not None:
        history = history_of(chunk)
        shaped = shape(logits, params.shaping, history, min(chunk.sample_index, len(history)))
    if mask is not None:
        shaped = apply_mask(shaped, mask)
    token = sample(shaped, params, chunk.sample_index)
    return Sampled(
        chunk.request_id, token, None if params.logprobs is None else logprobs_of(logits, token, params.logprobs)
    )


def measure_copy_bandwidth(num_bytes: int = 2**25) -> float:
    """Bytes per second, read plus write, of the best of a few copies of an array larger than the caches."""
    source = np.ones(num_bytes, np.uint8)
    target = np.ones_like(source)
    seconds = []
    for _ in range(4):
        begin = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - begin)
    return 2 * num_bytes / min(seconds)
