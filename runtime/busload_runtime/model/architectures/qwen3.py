"""Qwen3, dense (Yang et al. 2025): normed queries and keys; heads need not add up to the hidden size."""

from busload_runtime.model.architectures.description import Architecture, full_attention

QWEN3 = Architecture(
    name="qwen3",
    models="Qwen3 (dense)",
    attention=full_attention,
    query_key_norm=True,
    without=("attention.sliding_window",),
)
