"""All weights of a model as fp32 arrays, in the orientation the executors multiply with."""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from busload_runtime.model.config import ModelConfig
from busload_runtime.model.errors import ModelError
from busload_runtime.model.gguf_file import GgufFile

Array: TypeAlias = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. Matrices are [outputs, inputs], as stored: `y = x @ w.T`."""

    attention_norm: Array
    """[hidden]"""
    qkv: Array
    """[(heads + 2 * kv_heads) * head_dim, hidden]: queries, keys, values on top of each other."""
    attention_output: Array
    """[hidden, heads * head_dim]"""
    ffn_norm: Array
    """[hidden]"""
    gate_up: Array
    """[2 * ffn, hidden]: gate above up."""
    down: Array
    """[hidden, ffn]"""


@dataclass(frozen=True, slots=True)
class Weights:
    """A whole model. Queries and keys are laid out for rotation by halves (dimension i turns with i + head_dim / 2)."""

    config: ModelConfig
    embedding: Array
    """[vocab, hidden]"""
    layers: tuple[LayerWeights, ...]
    final_norm: Array
    """[hidden]"""
    output: Array
    """[vocab, hidden]; the same array as `embedding` when the model ties them."""
    rope_frequencies: Array
    """[head_dim / 2] radians per position, with all scaling applied."""

    @property
    def num_bytes(self) -> int:
        arrays = [self.embedding, self.final_norm, self.rope_frequencies]
        for layer in self.layers:
            arrays += [layer.attention_norm, layer.qkv, layer.attention_output]
            arrays += [layer.ffn_norm, layer.gate_up, layer.down]
        if self.output is not self.embedding:
            arrays.append(self.output)
        return sum(array.nbytes for array in arrays)


def read_weights(file: GgufFile, config: ModelConfig) -> Weights:
    """Reads and dequantises every tensor. Raises `ModelError` for missing, misshapen and unexpected tensors."""
    _refuse_unexpected(file, config)
    embedding = file.read("token_embd.weight", (config.vocab_size, config.hidden_size))
    layers = tuple(_read_layer(file, config, index) for index in range(config.num_layers))
    final_norm = file.read("output_norm.weight", (config.hidden_size,))
    output = embedding if config.tied_embeddings else file.read("output.weight", embedding.shape)
    return Weights(config, embedding, layers, final_norm, output, _rope_frequencies(file, config))


_LAYER_TENSORS = (
    "attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down",
)  # fmt: skip


def _refuse_unexpected(file: GgufFile, config: ModelConfig) -> None:
    """A tensor we would ignore (a bias, an expert, a layer too many) would give wrong text, so it is an error."""
    names = {"token_embd.weight", "output_norm.weight", "output.weight", "rope_freqs.weight"}
    # A corrupt layer count may be far larger than the file: names past its end are found missing later.
    layers = min(config.num_layers, len(file.tensors))
    names |= {f"blk.{index}.{part}.weight" for index in range(layers) for part in _LAYER_TENSORS}
    if unexpected := sorted(set(file.tensors) - names):
        raise ModelError(
            f"{file.path}: tensor {unexpected[0]!r:.80} is not part of a plain {config.num_layers}-layer Llama model; "
            "biases, experts and other additions are not supported"
        )


def _read_layer(file: GgufFile, config: ModelConfig, index: int) -> LayerWeights:
    hidden, ffn, head_dim = config.hidden_size, config.ffn_size, config.head_dim
    queries, keys = config.num_heads * head_dim, config.num_kv_heads * head_dim

    def read(part: str, *shape: int) -> Array:
        return file.read(f"blk.{index}.{part}.weight", shape)

    return LayerWeights(
        attention_norm=read("attn_norm", hidden),
        qkv=np.concatenate(
            (
                _by_halves(read("attn_q", queries, hidden), head_dim),
                _by_halves(read("attn_k", keys, hidden), head_dim),
                read("attn_v", keys, hidden),
            )
        ),
        attention_output=read("attn_output", hidden, queries),
        ffn_norm=read("ffn_norm", hidden),
        gate_up=np.concatenate((read("ffn_gate", ffn, hidden), read("ffn_up", ffn, hidden))),
        down=read("ffn_down", hidden, ffn),
    )


def _by_halves(matrix: Array, head_dim: int) -> Array:
    """Undoes llama.cpp's reordering: GGUF rows of a head are rotated as pairs (2i, 2i + 1), ours as (i, i + half)."""
    rows, inputs = matrix.shape
    pairs = matrix.reshape(rows // head_dim, head_dim // 2, 2, inputs)
    return pairs.swapaxes(1, 2).reshape(rows, inputs)


def _rope_frequencies(file: GgufFile, config: ModelConfig) -> Array:
    """theta ** (-2i / head_dim) (Su et al., RoFormer), divided by linear scaling and Llama 3's factors, if any."""
    half = config.head_dim // 2
    frequencies = config.rope_theta ** (-np.arange(half, dtype=np.float64) / half) / config.rope_linear_factor
    if "rope_freqs.weight" in file.tensors:
        factors = file.read("rope_freqs.weight", (half,))
        if not (np.isfinite(factors).all() and (factors > 0).all()):
            raise ModelError(f"{file.path}: tensor rope_freqs.weight holds factors that are not positive numbers")
        frequencies = frequencies / factors
    return frequencies.astype(np.float32)
