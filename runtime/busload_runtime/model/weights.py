"""The weights of a model file as fp32 arrays."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from busload_runtime.model.architectures.description import Rope
from busload_runtime.model.config import ModelConfig
from busload_runtime.model.errors import ModelError
from busload_runtime.model.gguf_file import GgufFile

Array: TypeAlias = NDArray[np.float32]
Shapes: TypeAlias = Mapping[str, tuple[int, ...]]

_ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True)
class LayerVectors:
    """What a decoder layer has beside its matrices. None: not in this architecture."""

    attention_norm: Array
    """[hidden]"""
    ffn_norm: Array
    """[hidden]"""
    qkv_bias: Array | None
    """[(heads + 2 * kv_heads) * head_dim]"""
    query_norm: Array | None
    """[head_dim]"""
    key_norm: Array | None
    """[head_dim]"""
    post_attention_norm: Array | None
    """[hidden]"""
    post_ffn_norm: Array | None
    """[hidden]"""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. Matrices are [outputs, inputs], as stored: `y = x @ w.T`."""

    vectors: LayerVectors
    qkv: Array
    """[(heads + 2 * kv_heads) * head_dim, hidden]: queries, keys, values on top of each other."""
    attention_output: Array
    """[hidden, heads * head_dim]"""
    gate_up: Array
    """[2 * ffn, hidden]: gate above up."""
    down: Array
    """[hidden, ffn]"""


@dataclass(frozen=True, slots=True)
class WeightFile:
    """The tensors of one model file, read when asked for, so that an executor never holds them twice.

    Queries and keys come laid out for rotation by halves (dimension i turns with i + head_dim / 2).
    """

    file: GgufFile
    config: ModelConfig

    def embedding(self) -> Array:
        """[vocab, hidden]"""
        return self.file.read("token_embd.weight", (self.config.vocab_size, self.config.hidden_size))

    def output(self) -> Array:
        """[vocab, hidden]; not in the file when `config.tied_embeddings`."""
        return self.file.read("output.weight", (self.config.vocab_size, self.config.hidden_size))

    def final_norm(self) -> Array:
        """[hidden]"""
        return self.file.read("output_norm.weight", (self.config.hidden_size,))

    def layer(self, index: int) -> LayerWeights:
        return LayerWeights(
            vectors=self.vectors(index),
            qkv=self._qkv(index, "weight"),
            attention_output=self._read(index, "attn_output.weight"),
            gate_up=np.concatenate((self._read(index, "ffn_gate.weight"), self._read(index, "ffn_up.weight"))),
            down=self._read(index, "ffn_down.weight"),
        )

    def vectors(self, index: int) -> LayerVectors:
        """Norms and biases of a layer, without its matrices."""
        shapes = _layer_shapes(self.config)

        def read(part: str) -> Array | None:
            return self._read(index, part) if part in shapes else None

        return LayerVectors(
            attention_norm=self._read(index, "attn_norm.weight"),
            ffn_norm=self._read(index, "ffn_norm.weight"),
            qkv_bias=self._qkv(index, "bias") if self.config.architecture.qkv_bias else None,
            query_norm=read("attn_q_norm.weight"),
            key_norm=read("attn_k_norm.weight"),
            post_attention_norm=read("post_attention_norm.weight"),
            post_ffn_norm=read("post_ffw_norm.weight"),
        )

    def rope_frequencies(self) -> Array:
        """[number of ropes, head_dim / 2] radians per position, see `Rope`; divided by Llama 3's factors, if any."""
        half = self.config.head_dim // 2
        frequencies = np.stack([_frequencies(rope, half) for rope in self.config.ropes])
        if _ROPE_FACTORS in self.file.tensors:
            factors = self.file.read(_ROPE_FACTORS, (half,))
            if not (np.isfinite(factors).all() and (factors > 0).all()):
                raise ModelError(f"{self.file.path}: tensor {_ROPE_FACTORS} holds values that are not positive numbers")
            frequencies = frequencies / factors
        return frequencies.astype(np.float32)

    def _read(self, index: int, part: str) -> Array:
        return self.file.read(f"blk.{index}.{part}", _layer_shapes(self.config)[part])

    def _qkv(self, index: int, kind: str) -> Array:
        queries, keys, values = (self._read(index, f"attn_{part}.{kind}") for part in "qkv")
        if self.config.architecture.rotates_pairs:
            queries, keys = (_by_halves(rows, self.config.head_dim) for rows in (queries, keys))
        return np.concatenate((queries, keys, values))


def open_weight_file(file: GgufFile, config: ModelConfig) -> WeightFile:
    """Raises `ModelError` unless the file holds exactly the tensors of `config`, each of the right shape."""
    table = config.vocab_size, config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": table, "output_norm.weight": (config.hidden_size,)}
    if not config.tied_embeddings:
        shapes["output.weight"] = table
    if config.architecture.rope_factors and _ROPE_FACTORS in file.tensors:
        shapes[_ROPE_FACTORS] = (config.head_dim // 2,)
    # Layer by layer, so that a corrupt layer count ends at the first tensor that is missing.
    file.check_shapes(shapes)
    for index in range(config.num_layers):
        layer = {f"blk.{index}.{part}": shape for part, shape in _layer_shapes(config).items()}
        file.check_shapes(layer)
        shapes |= layer
    # A tensor that we would ignore (a bias, an expert, a layer too many) would give wrong text.
    if unexpected := sorted(set(file.tensors) - set(shapes)):
        name = config.architecture.name
        raise ModelError(
            f"{file.path}: tensor {unexpected[0]!r:.80} is not part of a plain {config.num_layers}-layer {name} model; "
            f"a layer has {', '.join(_layer_shapes(config))}; other biases, experts and additions are not supported"
        )
    return WeightFile(file, config)


def _layer_shapes(config: ModelConfig) -> Shapes:
    """Tensors of a layer, as files name them, in the order in which a step reads them."""
    has = config.architecture
    hidden, ffn = config.hidden_size, config.ffn_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    biases = {"attn_q.bias": (queries,), "attn_k.bias": (keys,), "attn_v.bias": (keys,)}
    head_norms = {"attn_q_norm.weight": (config.head_dim,), "attn_k_norm.weight": (config.head_dim,)}
    return {
        "attn_norm.weight": (hidden,),
        "attn_q.weight": (queries, hidden),
        "attn_k.weight": (keys, hidden),
        "attn_v.weight": (keys, hidden),
        **(biases if has.qkv_bias else {}),
        **(head_norms if has.query_key_norm else {}),
        "attn_output.weight": (hidden, queries),
        **({"post_attention_norm.weight": (hidden,)} if has.post_norms else {}),
        "ffn_norm.weight": (hidden,),
        "ffn_gate.weight": (ffn, hidden),
        "ffn_up.weight": (ffn, hidden),
        "ffn_down.weight": (hidden, ffn),
        **({"post_ffw_norm.weight": (hidden,)} if has.post_norms else {}),
    }


def _frequencies(rope: Rope, half: int) -> NDArray[np.float64]:
    exponents = np.arange(half, dtype=np.float64) / half
    frequencies: NDArray[np.float64] = rope.theta**-exponents / rope.linear_factor
    return frequencies


def _by_halves(rows: Array, head_dim: int) -> Array:
    """Undoes llama.cpp's reordering: GGUF rows of a head are rotated as pairs (2i, 2i + 1), ours as (i, i + half)."""
    pairs = rows.reshape(len(rows) // head_dim, head_dim // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(rows.shape)
