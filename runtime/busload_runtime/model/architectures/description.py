"""What a decoder architecture is made of, as data. One file beside this one describes one architecture.

All are the same skeleton: RMSNorm, grouped-query attention with rotary positions, a gated feed-forward. A description
says what an architecture adds to it and where the file keeps it; executors read the result from `ModelConfig` and know
no architecture by name.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from busload_runtime.model.fields import MAX_DIMENSION, Fields


class Activation(Enum):
    """Of the gate: down(activation(gate) * up)."""

    SILU = "silu"
    """x * sigmoid(x) (SwiGLU, Shazeer 2020)."""
    GELU_TANH = "gelu_tanh"
    """GELU in its tanh form (GeGLU, Shazeer 2020; Hendrycks and Gimpel 2016)."""


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions (Su et al. 2021): dimension pair i turns by position * theta ** (-2i / head_dim) / factor."""

    theta: float
    linear_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """How one layer attends."""

    rope: int = 0
    """Index into `Attention.ropes`."""
    window: int = 0
    """Tokens a query sees, itself included; 0: all before it."""


@dataclass(frozen=True, slots=True)
class Attention:
    """How all layers attend."""

    ropes: tuple[Rope, ...]
    layers: tuple[LayerAttention, ...]
    scale: float | None = None
    """Of query times key; None: head_dim ** -0.5."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """One architecture. The defaults are Llama's."""

    name: str
    """`general.architecture`, and the prefix of the metadata keys."""
    models: str
    """What people call the models, for messages."""
    attention: Callable[[Fields, int], Attention]
    """From metadata and the number of layers."""
    rotates_pairs: bool = False
    """Query and key rows of a head lie as pairs (2i, 2i + 1) that turn together; otherwise (i, i + head_dim / 2)."""
    rope_factors: bool = False
    """Tensor `rope_freqs.weight` may divide the frequencies (Llama 3)."""
    qkv_bias: bool = False
    """`attn_q.bias`, `attn_k.bias`, `attn_v.bias` are added before rotation."""
    query_key_norm: bool = False
    """RMSNorm of each query and key head before rotation: `attn_q_norm.weight`, `attn_k_norm.weight`."""
    post_norms: bool = False
    """RMSNorm of what attention and feed-forward add: `post_attention_norm.weight`, `post_ffw_norm.weight`."""
    activation: Activation = Activation.SILU
    scales_embedding: bool = False
    """Token embeddings are multiplied by sqrt(hidden size)."""
    without: tuple[str, ...] = ()
    """Metadata keys of variants that are not computed: missing or 0."""


def theta(fields: Fields, default: float = 10_000.0) -> float:
    return fields.number("rope.freq_base", 1.0, 1e12, default=default)


def linear_factor(fields: Fields) -> float:
    """Linear RoPE scaling. Raises for other kinds, but Llama 3's, which comes as a tensor."""
    kind = fields.get("rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise fields.bad(
            "rope.scaling.type", kind, "none or linear (Llama 3 scaling comes as tensor rope_freqs.weight)"
        )
    if kind == "none":
        return fields.number("rope.scale_linear", 1e-3, 1e6, default=1.0)
    return fields.number("rope.scaling.factor", 1e-3, 1e6)


def window(fields: Fields) -> int:
    return fields.integer("attention.sliding_window", 0, MAX_DIMENSION, default=0)


def full_attention(fields: Fields, num_layers: int) -> Attention:
    """Every query sees all tokens before it."""
    return Attention((Rope(theta(fields), linear_factor(fields)),), (LayerAttention(),) * num_layers)


def sliding_attention(fields: Fields, num_layers: int) -> Attention:
    """The same window in all layers, if the file has one."""
    return Attention((Rope(theta(fields), linear_factor(fields)),), (LayerAttention(0, window(fields)),) * num_layers)
