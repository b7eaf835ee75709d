"""The numbers of a decoder model, read from GGUF metadata and checked before anything is allocated."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from busload_runtime.model.architectures.description import Activation, Architecture, LayerAttention, Rope
from busload_runtime.model.architectures.registry import ARCHITECTURES
from busload_runtime.model.errors import ModelError
from busload_runtime.model.fields import MAX_DIMENSION, Fields


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a decoder: RMSNorm, rotary positions, grouped-query attention, a gated feed-forward.

    `architecture` says which of the optional parts there are; its numbers are here.
    """

    name: str
    architecture: Architecture
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
    ropes: tuple[Rope, ...]
    """Llama 3 scaling is in the weights: see `WeightFile.rope_frequencies`."""
    layers: tuple[LayerAttention, ...]
    """[num_layers]"""
    attention_scale: float
    """Of query times key."""
    embedding_scale: float
    tied_embeddings: bool
    """The output head is the embedding table."""

    @property
    def activation(self) -> Activation:
        return self.architecture.activation

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of fp32 keys and values of one token over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * 4


def config_from_metadata(file: str, metadata: Mapping[str, Any], vocab_size: int, tied: bool) -> ModelConfig:
    """Reads the config from GGUF `metadata` of `file`; `vocab_size` counts the tokens of the vocabulary.

    Raises `ModelError` for another architecture and for any value outside what the executors compute.
    """
    name = metadata.get("general.architecture")
    architecture = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if architecture is None:
        known = ", ".join(f"{one.name!r} ({one.models})" for one in ARCHITECTURES.values())
        raise ModelError(
            f"{file}: general.architecture is {name!r:.80}; supported: {known}; convert or choose such a model"
        )
    fields = Fields(file, architecture.name, metadata)
    fields.refuse("expert_count", "only dense models are supported")
    for key in architecture.without:
        fields.refuse(key, f"not computed for {architecture.name}")
    heads = fields.integer("attention.head_count", 1, 4096)
    kv_heads = fields.integer("attention.head_count_kv", 1, 4096, default=heads)
    if heads % kv_heads:
        raise fields.bad("attention.head_count_kv", kv_heads, f"a divisor of attention.head_count ({heads})")
    hidden = fields.integer("embedding_length", 1, MAX_DIMENSION)
    head_dim = _head_dim(fields, hidden // heads)
    declared = fields.integer("vocab_size", 1, MAX_DIMENSION, default=vocab_size)
    if declared != vocab_size:
        raise fields.bad("vocab_size", declared, f"the number of tokens in tokenizer.ggml.tokens ({vocab_size})")
    num_layers = fields.integer("block_count", 1, 4096)
    attention = architecture.attention(fields, num_layers)
    return ModelConfig(
        name=str(metadata.get("general.name", "")),
        architecture=architecture,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        hidden_size=hidden,
        ffn_size=fields.integer("feed_forward_length", 1, MAX_DIMENSION),
        vocab_size=vocab_size,
        context_length=fields.integer("context_length", 1, MAX_DIMENSION),
        # Above 0: an embedding of zeros (padding) would become 0 / 0, and end the engine with the request that has it.
        norm_eps=fields.number("attention.layer_norm_rms_epsilon", 1e-12, 1.0),
        ropes=attention.ropes,
        layers=attention.layers,
        attention_scale=head_dim**-0.5 if attention.scale is None else attention.scale,
        embedding_scale=math.sqrt(hidden) if architecture.scales_embedding else 1.0,
        tied_embeddings=tied,
    )


def _head_dim(fields: Fields, default: int) -> int:
    head_dim = fields.integer("attention.key_length", 2, 4096, default=default)
    if head_dim % 2:
        raise fields.bad("attention.key_length", head_dim, "an even number of at least 2 (embedding_length / heads)")
    for key in ("attention.value_length", "rope.dimension_count"):
        if (length := fields.integer(key, 1, 4096, default=head_dim)) != head_dim:
            raise fields.bad(key, length, f"the head dimension {head_dim} (no partial rotation)")
    return head_dim
