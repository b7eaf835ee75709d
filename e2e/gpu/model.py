"""A checkpoint that was never trained: random weights of a shape, made where they are wanted."""

from __future__ import annotations

from typing import Any

import torch

from busload_runtime.executors.torch_model.loading import LayerTensors
from busload_runtime.model.config import ModelConfig, config_from_metadata

from .shapes import Shape

SPREAD = 0.02
"""Standard deviation of weights, as models are initialised."""


class RandomCheckpoint:
    """Implements `loading.Checkpoint`."""

    def __init__(self, shape: Shape, context: int, device: torch.device) -> None:
        self.config = _config(shape, context)
        self._shape, self._device = shape, device
        self._generator = torch.Generator(device).manual_seed(1)

    @property
    def path(self) -> str:
        return f"random {self._shape.name}"

    def _matrix(self, rows: int, columns: int) -> torch.Tensor:
        half = torch.bfloat16 if self._device.type == "cuda" else torch.float32
        numbers = torch.empty((rows, columns), dtype=half, device=self._device)
        return numbers.normal_(0, SPREAD, generator=self._generator)

    def _ones(self, count: int) -> torch.Tensor:
        return torch.ones(count, device=self._device)

    def embedding(self) -> torch.Tensor:
        return self._matrix(self._shape.vocab, self._shape.hidden)

    def output(self) -> torch.Tensor:
        return self._matrix(self._shape.vocab, self._shape.hidden)

    def final_norm(self) -> torch.Tensor:
        return self._ones(self._shape.hidden)

    def rope_frequencies(self) -> torch.Tensor:
        steps = torch.arange(0, self._shape.head_dim, 2, dtype=torch.float64) / self._shape.head_dim
        return (self._shape.rope_theta**-steps).float()

    def layer(self, index: int) -> LayerTensors:
        shape = self._shape
        attended, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        head_norm = self._ones(shape.head_dim) if shape.architecture == "qwen3" else None
        return LayerTensors(
            attention_norm=self._ones(shape.hidden),
            ffn_norm=self._ones(shape.hidden),
            qkv=(self._matrix(attended + 2 * keys, shape.hidden),),
            qkv_bias=(),
            query_norm=head_norm,
            key_norm=head_norm,
            attention_output=self._matrix(shape.hidden, attended),
            gate=self._matrix(shape.ffn, shape.hidden),
            up=self._matrix(shape.ffn, shape.hidden),
            down=self._matrix(shape.hidden, shape.ffn),
        )


def _config(shape: Shape, context: int) -> ModelConfig:
    fields = {
        "block_count": shape.layers,
        "embedding_length": shape.hidden,
        "feed_forward_length": shape.ffn,
        "context_length": context,
        "attention.head_count": shape.heads,
        "attention.head_count_kv": shape.kv_heads,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "rope.dimension_count": shape.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": shape.rope_theta,
    }
    metadata: dict[str, Any] = {f"{shape.architecture}.{name}": value for name, value in fields.items()}
    metadata |= {"general.architecture": shape.architecture, "general.name": shape.name}
    return config_from_metadata(f"random {shape.name}", metadata, shape.vocab, shape.tied)
