"""Qwen2 and Qwen2.5 (Yang et al. 2024): biases on queries, keys and values."""

from busload_runtime.model.architectures.description import Architecture, full_attention

QWEN2 = Architecture(
    name="qwen2",
    models="Qwen2, Qwen2.5",
    attention=full_attention,
    qkv_bias=True,
    without=("attention.sliding_window",),
)
