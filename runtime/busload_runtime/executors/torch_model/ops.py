"""What the decoder asks of its operations. `torch_ops` is the plain definition, `triton_ops` the kernels."""

from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch

from busload_runtime.executors.torch_model.step import Arrays, Step

Tensor: TypeAlias = torch.Tensor


@dataclass(frozen=True, slots=True)
class Weight:
    """A matrix [outputs, inputs], `y = x @ w.T + bias`, in one of four forms:

    floats; int8 or fp8 codes with `scales` [outputs] fp32; uint8 [outputs, inputs / 2] with `scales` [outputs, inputs /
    group], see `busload_kernels.gpu.linear.pack_int4`.
    """

    values: Tensor
    scales: Tensor | None = None
    bias: Tensor | None = None
    """[outputs]"""

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in (self.values, self.scales, self.bias) if part is not None)


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Keys and values of one layer in pages [blocks, kv_heads, block_size, head_dim]: floats, or int8 or fp8 codes with
    fp32 scales [blocks, kv_heads, block_size]."""

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None
    value_scales: Tensor | None


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Gains [head_dim] of the norm over each query and key head before rotation."""

    query: Tensor
    key: Tensor


@dataclass(frozen=True, slots=True)
class Draws:
    """How each row is drawn: temperature, top_p, min_p [rows] fp32, top_k, sample_index [rows] int32, seed [rows]
    int64, as in `busload_kernels.gpu.sampling.SamplingBuffers`."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    sample_index: Tensor


class Ops(Protocol):
    """Rows are tokens. Results are fresh tensors of x's type unless said."""

    def extras(self, arrays: Arrays) -> Arrays:
        """What `attend` wants to know of a step beside the arrays of `step.arrange`."""

    def room(self, bucket: int, cached_tokens: int, longest: int) -> dict[str, int]:
        """Rows of those extras whose length depends on more than the number of requests, for up to `bucket` decoding
        requests, `longest` tokens each and `cached_tokens` in all."""

    def norm(self, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        """RMSNorm of x [rows, hidden]."""

    def add_norm(self, x: Tensor, residual: Tensor, gain: Tensor, eps: float) -> Tensor:
        """RMSNorm of x + residual, which replaces `residual`."""

    def linear(self, x: Tensor, weight: Weight) -> Tensor:
        """[rows, outputs]"""

    def logits(self, x: Tensor, weight: Weight) -> Tensor:
        """`linear` in fp32."""

    def gated(self, x: Tensor, weight: Weight) -> Tensor:
        """silu(gate) * up [rows, outputs / 2]; rows 2 i of the weight are the gate, rows 2 i + 1 up."""

    def rope_and_write(
        self, qkv: Tensor, cos_sin: Tensor, step: Step, cache: LayerCache, norms: HeadNorms | None, eps: float
    ) -> Tensor:
        """Norms and rotates queries [rows, heads, head_dim], which it returns, and keys; writes keys and values to the
        cache. qkv [rows, (heads + 2 kv_heads) * head_dim]; cos_sin [positions, head_dim] fp32: cosines, then sines."""

    def attend(self, queries: Tensor, step: Step, cache: LayerCache, scale: float) -> Tensor:
        """Causal attention of queries [rows, heads, head_dim] to the caches of their requests; the same shape."""

    def sample(self, logits: Tensor, draws: Draws) -> Tensor:
        """A token [rows] int32 for each row of logits [rows, vocab] fp32, finite or minus infinity."""
