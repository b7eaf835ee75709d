"""The models that are measured: shapes only, their weights are random. Figures from the models' published configs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    name: str
    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool
    rope_theta: float

    def linears(self) -> Iterator[tuple[str, int, int, bool]]:
        """Name, outputs, inputs of each kind of linear layer, and whether it is gated."""
        attended = self.heads * self.head_dim
        yield "qkv", attended + 2 * self.kv_heads * self.head_dim, self.hidden, False
        yield "attention output", self.hidden, attended, False
        yield "gate and up", 2 * self.ffn, self.hidden, True
        yield "down", self.hidden, self.ffn, False
        yield "logits", self.vocab, self.hidden, False


SMALL = Shape("0.6B", "qwen3", 28, 1024, 16, 8, 128, 3072, 151936, True, 1e6)
"""Qwen3-0.6B."""
LARGE = Shape("8B", "llama", 32, 4096, 32, 8, 128, 14336, 128256, False, 5e5)
"""Llama-3.1-8B."""
TINY = Shape("tiny", "qwen3", 2, 64, 4, 2, 16, 128, 256, True, 1e4)
"""For machines without a GPU."""
