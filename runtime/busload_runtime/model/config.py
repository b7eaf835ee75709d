"""The numbers of a Llama-family model, read from GGUF metadata and checked before anything is allocated."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from busload_runtime.model.errors import ModelError

ARCHITECTURE = "llama"
_MAX_DIMENSION = 2**24


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a Llama-family decoder (RMSNorm, rotary positions, SwiGLU, grouped-query attention)."""

    name: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    ffn_size: int
    vocab_size: int
    context_length: int
    """Longest sequence the model was made for, in tokens."""
    norm_eps: float
    rope_theta: float
    rope_linear_factor: float
    """Positions are divided by this (linear scaling, 1 for none). Llama 3 scaling is in the weights: see `Weights`."""
    tied_embeddings: bool
    """The output head is the embedding table."""

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of fp32 keys and values of one token over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * 4


def config_from_metadata(file: str, metadata: Mapping[str, Any], vocab_size: int, tied: bool) -> ModelConfig:
    """Reads the config from GGUF `metadata` of `file`; `vocab_size` counts the tokens of the vocabulary.

    Raises `ModelError` for another architecture and for any value outside what the executors compute.
    """
    architecture = metadata.get("general.architecture")
    if architecture != ARCHITECTURE:
        raise ModelError(
            f"{file}: general.architecture is {architecture!r:.80}; supported: {ARCHITECTURE!r} (Llama 2, Llama 3, "
            "Mistral, SmolLM and others with that layout); convert or choose such a model"
        )
    fields = _Fields(file, metadata)
    if experts := metadata.get("llama.expert_count"):
        raise ModelError(f"{file}: llama.expert_count is {experts!r:.80}; only dense models are supported (0)")
    heads = fields.integer("attention.head_count", 1, 4096)
    kv_heads = fields.integer("attention.head_count_kv", 1, 4096, default=heads)
    if heads % kv_heads:
        raise fields.bad("attention.head_count_kv", kv_heads, f"a divisor of attention.head_count ({heads})")
    hidden = fields.integer("embedding_length", 1, _MAX_DIMENSION)
    head_dim = fields.integer("attention.key_length", 2, 4096, default=hidden // heads)
    if head_dim % 2 or head_dim == 0:
        raise fields.bad("attention.key_length", head_dim, "an even number of at least 2 (embedding_length / heads)")
    for key in ("attention.value_length", "rope.dimension_count"):
        if (length := fields.integer(key, 1, 4096, default=head_dim)) != head_dim:
            raise fields.bad(key, length, f"the head dimension {head_dim} (no partial rotation)")
    declared = fields.integer("vocab_size", 1, _MAX_DIMENSION, default=vocab_size)
    if declared != vocab_size:
        raise fields.bad("vocab_size", declared, f"the number of tokens in tokenizer.ggml.tokens ({vocab_size})")
    return ModelConfig(
        name=str(metadata.get("general.name", "")),
        num_layers=fields.integer("block_count", 1, 4096),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        hidden_size=hidden,
        ffn_size=fields.integer("feed_forward_length", 1, _MAX_DIMENSION),
        vocab_size=vocab_size,
        context_length=fields.integer("context_length", 1, _MAX_DIMENSION),
        norm_eps=fields.number("attention.layer_norm_rms_epsilon", 0.0, 1.0),
        rope_theta=fields.number("rope.freq_base", 1.0, 1e12, default=10000.0),
        rope_linear_factor=_linear_factor(fields),
        tied_embeddings=tied,
    )


def _linear_factor(fields: "_Fields") -> float:
    kind = fields.metadata.get("llama.rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise fields.bad(
            "rope.scaling.type", kind, "none or linear (Llama 3 scaling comes as tensor rope_freqs.weight)"
        )
    if kind == "none":
        return fields.number("rope.scale_linear", 1e-3, 1e6, default=1.0)
    return fields.number("rope.scaling.factor", 1e-3, 1e6)


@dataclass(frozen=True, slots=True)
class _Fields:
    file: str
    metadata: Mapping[str, Any]

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        value = self.metadata.get(f"llama.{key}", default)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.bad(key, value, f"an integer from {low} to {high}")
        return value

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        value = self.metadata.get(f"llama.{key}", default)
        if not isinstance(value, float) or not math.isfinite(value) or not low <= value <= high:
            raise self.bad(key, value, f"a number from {low:g} to {high:g}")
        return value

    def bad(self, key: str, value: object, allowed: str) -> ModelError:
        got = "missing" if value is None else f"{value!r:.80}"
        return ModelError(f"{self.file}: llama.{key} is {got}; must be {allowed}; the file is corrupt or unsupported")
