"""The weights of a model file as fp32 arrays."""

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
        config = self.config
        queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

        def read(part: str) -> Array:
            return self.file.read(f"blk.{index}.{part}.weight", _layer_shapes(config)[part])

        return LayerWeights(
            attention_norm=read("attn_norm"),
            qkv=np.concatenate(
                (
                    _by_halves(read("attn_q"), queries, config.head_dim),
                    _by_halves(read("attn_k"), keys, config.head_dim),
                    read("attn_v"),
                )
            ),
            attention_output=read("attn_output"),
            ffn_norm=read("ffn_norm"),
            gate_up=np.concatenate((read("ffn_gate"), read("ffn_up"))),
            down=read("ffn_down"),
        )

    def rope_frequencies(self) -> Array:
        """[head_dim / 2] radians per position: theta ** (-2i / head_dim) (Su et al. 2021).

        Divided by the linear scaling factor and by Llama 3's factors, if any.
        """
        half = self.config.head_dim // 2
        exponents = np.arange(half, dtype=np.float64) / half
        frequencies = self.config.rope_theta**-exponents / self.config.rope_linear_factor
        if _ROPE_FACTORS in self.file.tensors:
            factors = self.file.read(_ROPE_FACTORS, (half,))
            if not (np.isfinite(factors).all() and (factors > 0).all()):
                raise ModelError(f"{self.file.path}: tensor {_ROPE_FACTORS} holds values that are not positive numbers")
            frequencies = frequencies / factors
        return frequencies.astype(np.float32)


def open_weight_file(file: GgufFile, config: ModelConfig) -> WeightFile:
    """Raises `ModelError` unless the file holds exactly the tensors of `config`, each of the right shape."""
    table = config.vocab_size, config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": table, "output_norm.weight": (config.hidden_size,)}
    if not config.tied_embeddings:
        shapes["output.weight"] = table
    if _ROPE_FACTORS in file.tensors:
        shapes[_ROPE_FACTORS] = (config.head_dim // 2,)
    # Layer by layer, so that a corrupt layer count ends at the first tensor that is missing.
    file.check_shapes(shapes)
    for index in range(config.num_layers):
        layer = {f"blk.{index}.{part}.weight": shape for part, shape in _layer_shapes(config).items()}
        file.check_shapes(layer)
        shapes |= layer
    # A tensor that we would ignore (a bias, an expert, a layer too many) would give wrong text.
    if unexpected := sorted(set(file.tensors) - set(shapes)):
        raise ModelError(
            f"{file.path}: tensor {unexpected[0]!r:.80} is not part of a plain {config.num_layers}-layer Llama model; "
            "biases, experts and other additions are not supported"
        )
    return WeightFile(file, config)


_ROPE_FACTORS = "rope_freqs.weight"


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, ffn = config.hidden_size, config.ffn_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        "attn_norm": (hidden,),
        "attn_q": (queries, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_output": (hidden, queries),
        "ffn_norm": (hidden,),
        "ffn_gate": (ffn, hidden),
        "ffn_up": (ffn, hidden),
        "ffn_down": (hidden, ffn),
    }


def _by_halves(matrix: Array, rows: int, head_dim: int) -> Array:
    """Undoes llama.cpp's reordering: GGUF rows of a head are rotated as pairs (2i, 2i + 1), ours as (i, i + half)."""
    pairs = matrix.reshape(rows // head_dim, head_dim // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(rows, -1)
