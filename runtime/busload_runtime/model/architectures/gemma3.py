"""Gemma 3, text (Gemma Team 2025): five layers with a window and slow rotation before each that sees everything.

Its norms multiply by 1 + w; GGUF files hold the sum. Queries are scaled by head_dim ** -0.5 but in the 27B model.
"""

from busload_runtime.model.architectures.description import (
    Activation,
    Architecture,
    Attention,
    LayerAttention,
    Rope,
    linear_factor,
    theta,
    window,
)
from busload_runtime.model.fields import MAX_DIMENSION, Fields

_PERIOD = 6
_LARGEST = 62
"""Layers of the 27B model, whose queries are scaled by (hidden size / heads) ** -0.5: the file does not say."""


def _attention(fields: Fields, num_layers: int) -> Attention:
    """Every `sliding_window_pattern`-th layer is global; newer files list which layers have the window."""
    everything = Rope(theta(fields, 1_000_000.0), linear_factor(fields))
    nearby = Rope(fields.number("rope.freq_base_swa", 1.0, 1e12, default=10_000.0))
    pattern = fields.get("attention.sliding_window_pattern", _PERIOD)
    if isinstance(pattern, list) and len(pattern) == num_layers:
        is_local = [bool(flag) for flag in pattern]
    elif isinstance(pattern, list):
        raise fields.bad("attention.sliding_window_pattern", pattern, f"a number or one flag per layer ({num_layers})")
    else:
        period = fields.integer("attention.sliding_window_pattern", 1, num_layers + _PERIOD, default=_PERIOD)
        is_local = [(index + 1) % period != 0 for index in range(num_layers)]
    local = LayerAttention(1, window(fields))
    layers = tuple(local if flag else LayerAttention(0) for flag in is_local)
    return Attention((everything, nearby), layers, _scale(fields) if num_layers == _LARGEST else None)


def _scale(fields: Fields) -> float:
    hidden = fields.integer("embedding_length", 1, MAX_DIMENSION)
    return float((hidden / fields.integer("attention.head_count", 1, 4096)) ** -0.5)


GEMMA3 = Architecture(
    name="gemma3",
    models="Gemma 3 (text)",
    attention=_attention,
    query_key_norm=True,
    post_norms=True,
    activation=Activation.GELU_TANH,
    scales_embedding=True,
    without=("final_logit_softcapping", "attn_logit_softcapping"),
)
