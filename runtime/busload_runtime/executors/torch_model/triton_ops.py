"""The operations as Triton kernels (busload_kernels.gpu): fresh outputs, tiles from the tables, lists of work."""

import numpy as np
import torch

from busload_kernels.gpu.decode_attention import DecodeBuffers, decode_attention, decode_work
from busload_kernels.gpu.errors import GpuKernelError
from busload_kernels.gpu.launch import Tile
from busload_kernels.gpu.linear import linear
from busload_kernels.gpu.norm import rms_norm
from busload_kernels.gpu.prefill_attention import prefill_attention, prefill_work
from busload_kernels.gpu.rope_write import rope_and_write
from busload_kernels.gpu.sampling import SamplingBuffers, sample
from busload_kernels.gpu.tiles import tile_for
from busload_runtime.executors.errors import ExecutorError
from busload_runtime.executors.torch_model.ops import Draws, HeadNorms, LayerCache, Tensor, Weight
from busload_runtime.executors.torch_model.step import Arrays, Step
from busload_runtime.model.config import ModelConfig

SPLIT = 512
"""Cached tokens that one program of decode attention attends to."""
LIBRARY_ROWS = 512
"""Rows from which on cuBLAS multiplies floats faster than our kernel."""
_PROGRAMS = 256
"""Programs of decode attention for each key/value head, at most: about two for each multiprocessor."""
_FORMATS = {
    torch.int8: ("w8a16", "int8"),
    torch.float8_e4m3fn: ("w8a16", "fp8"),
    torch.uint8: ("w4a16", "int4"),
    torch.float16: ("w16a16", "fp16"),
}
"""What the tables of tiles call weights of a type."""


class TritonOps:
    """Implements `ops.Ops`."""

    def __init__(self, device_name: str, config: ModelConfig, cache: torch.dtype) -> None:
        """`device_name` is what the tables of tiles know the GPU by. Raises `ExecutorError` for a model whose shape no
        kernel has."""
        self._device_name = device_name
        self._group = config.num_heads // config.num_kv_heads
        dim = config.head_dim
        if dim & (dim - 1) or not 16 <= dim <= 256 or self._group > 16:
            raise ExecutorError(
                f"the model has heads of {dim} and {self._group} query heads for each of keys; the GPU kernels compute "
                "heads of a power of two from 16 to 256, and 1 to 16 of them; choose --executor cpu"
            )
        shape = {"dim": dim, "cache_bits": 8 * cache.itemsize}
        try:
            self._decode_tile = tile_for("decode_attention", device_name, **shape)
            self._prefill_tile = tile_for("prefill_attention", device_name, **shape)
        except GpuKernelError as error:
            raise ExecutorError(str(error)) from None

    def extras(self, arrays: Arrays) -> Arrays:
        """Lists of work for both kinds of attention."""
        work, first_work = decode_work(arrays["decode_lengths"].tolist(), SPLIT)
        starts = arrays["piece_starts"]
        return {
            "work": work,
            "num_work": np.array([len(work)], np.int32),
            "first_work": first_work,
            "piece_work": prefill_work((starts[1:] - starts[:-1]).tolist(), self._group, self._prefill_tile),
        }

    def room(self, bucket: int, cached_tokens: int, longest: int) -> dict[str, int]:
        return {"work": bucket + min(bucket * (longest // SPLIT), cached_tokens // SPLIT)}

    def norm(self, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        return rms_norm(x, gain, eps, torch.empty_like(x))

    def add_norm(self, x: Tensor, residual: Tensor, gain: Tensor, eps: float) -> Tensor:
        return rms_norm(x, gain, eps, torch.empty_like(x), residual=residual)

    def linear(self, x: Tensor, weight: Weight) -> Tensor:
        if len(x) >= LIBRARY_ROWS and weight.scales is None:
            return torch.nn.functional.linear(x, weight.values, weight.bias)
        return self._linear(x, weight, x.dtype, gated=False)

    def logits(self, x: Tensor, weight: Weight) -> Tensor:
        return self._linear(x, weight, torch.float32, gated=False)

    def gated(self, x: Tensor, weight: Weight) -> Tensor:
        return self._linear(x, weight, x.dtype, gated=True)

    def rope_and_write(
        self, qkv: Tensor, cos_sin: Tensor, step: Step, cache: LayerCache, norms: HeadNorms | None, eps: float
    ) -> Tensor:
        _, kv_heads, _, dim = cache.keys.shape
        return rope_and_write(
            qkv,
            cos_sin,
            step.positions,
            step.slots,
            qkv.new_empty((len(qkv), kv_heads * self._group, dim)),
            cache.keys,
            cache.values,
            k_scales=cache.key_scales,
            v_scales=cache.value_scales,
            q_norm=None if norms is None else norms.query,
            k_norm=None if norms is None else norms.key,
            eps=eps,
        )

    def attend(self, queries: Tensor, step: Step, cache: LayerCache, scale: float) -> Tensor:
        out = torch.empty_like(queries)
        decodes, extras = step.num_decodes, step.extras
        _, heads, dim = queries.shape
        pages = {"k_scales": cache.key_scales, "v_scales": cache.value_scales}
        if decodes:
            items = len(extras["work"])
            buffers = DecodeBuffers(
                extras["work"],
                extras["num_work"],
                extras["first_work"],
                partial=queries.new_empty((items, heads, dim), dtype=torch.float32),
                peaks=queries.new_empty((items, heads), dtype=torch.float32),
                totals=queries.new_empty((items, heads), dtype=torch.float32),
            )
            decode_attention(
                queries[:decodes],
                cache.keys,
                cache.values,
                step.decode_tables,
                step.decode_lengths,
                scale,
                out[:decodes],
                buffers,
                SPLIT,
                self._decode_tile,
                min(items, _PROGRAMS),
                **pages,
            )
        if len(step.piece_lengths):
            prefill_attention(
                queries[decodes:],
                cache.keys,
                cache.values,
                step.piece_tables,
                step.piece_lengths,
                step.piece_starts,
                extras["piece_work"],
                scale,
                out[decodes:],
                self._prefill_tile,
                **pages,
            )
        return out

    def sample(self, logits: Tensor, draws: Draws) -> Tensor:
        rows, vocab = logits.shape
        room = SamplingBuffers.allocate(rows, vocab, logits.device)
        buffers = SamplingBuffers(
            draws.temperature,
            draws.top_k,
            draws.top_p,
            draws.min_p,
            draws.seed,
            draws.sample_index,
            room.thresholds,
            room.scores,
            room.tokens,
        )
        return sample(logits, buffers, torch.empty(rows, dtype=torch.int32, device=logits.device))

    def _linear(self, x: Tensor, weight: Weight, dtype: torch.dtype, gated: bool) -> Tensor:
        rows, outputs = len(x), len(weight.values)
        tile = self._tile(rows, weight)
        split = tile.sizes["SPLIT_K"]
        return linear(
            x,
            weight.values,
            x.new_empty((rows, outputs // 2 if gated else outputs), dtype=dtype),
            tile,
            w_scales=weight.scales,
            bias=weight.bias,
            gated=gated,
            partial=x.new_empty(split * rows * outputs, dtype=torch.float32) if split > 1 else None,
        )

    def _tile(self, rows: int, weight: Weight) -> Tile:
        form, name = _FORMATS.get(weight.values.dtype, ("w16a16", "bf16"))
        outputs, inputs = weight.values.shape
        inputs *= 2 if form == "w4a16" else 1
        return tile_for("linear", self._device_name, rows=rows, format=form, dtype=name, n=outputs, k=inputs)
