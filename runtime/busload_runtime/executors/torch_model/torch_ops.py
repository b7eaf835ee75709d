"""The operations in plain torch, as their formulas say: the oracle of the kernels, on any device. Slow on purpose."""

import numpy as np
import torch

from busload_runtime.engine.plan import SamplingParams
from busload_runtime.executors import sampling
from busload_runtime.executors.torch_model.ops import Draws, HeadNorms, LayerCache, Tensor, Weight
from busload_runtime.executors.torch_model.quantise import quantise_rows, unpack_int4
from busload_runtime.executors.torch_model.step import Arrays, Step


class TorchOps:
    """Implements `ops.Ops`."""

    def extras(self, arrays: Arrays) -> Arrays:
        return {}

    def room(self, bucket: int, cached_tokens: int, longest: int) -> dict[str, int]:
        return {}

    def norm(self, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        """Zhang and Sennrich 2019."""
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * gain.float()).to(x.dtype)

    def add_norm(self, x: Tensor, residual: Tensor, gain: Tensor, eps: float) -> Tensor:
        residual += x
        return self.norm(residual, gain, eps)

    def linear(self, x: Tensor, weight: Weight) -> Tensor:
        return self.logits(x, weight).to(x.dtype)

    def logits(self, x: Tensor, weight: Weight) -> Tensor:
        bias = None if weight.bias is None else weight.bias.float()
        return torch.nn.functional.linear(x.float(), dequantised(weight), bias)

    def gated(self, x: Tensor, weight: Weight) -> Tensor:
        gate, up = self.logits(x, weight).unflatten(-1, (-1, 2)).unbind(-1)
        return (torch.nn.functional.silu(gate) * up).to(x.dtype)

    def rope_and_write(
        self, qkv: Tensor, cos_sin: Tensor, step: Step, cache: LayerCache, norms: HeadNorms | None, eps: float
    ) -> Tensor:
        _, kv_heads, block_size, dim = cache.keys.shape
        heads = qkv.view(len(qkv), -1, dim)
        queries, keys, values = heads.split([heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads], 1)
        if norms is not None:
            queries, keys = self.norm(queries, norms.query, eps), self.norm(keys, norms.key, eps)
        turn = cos_sin[step.positions.long()][:, None]
        real = step.slots >= 0
        block, place = step.slots[real] // block_size, step.slots[real] % block_size
        for new, pages, scales in (
            (_rotated(keys, turn), cache.keys, cache.key_scales),
            (values.float(), cache.values, cache.value_scales),
        ):
            if scales is None:
                pages[block, :, place] = new[real].to(pages.dtype)
            else:
                codes, factors = quantise_rows(new[real], pages.dtype)
                # Advanced indexing does not know fp8.
                pages.view(torch.int8)[block, :, place] = codes.view(torch.int8)
                scales[block, :, place] = factors
        return _rotated(queries, turn).to(qkv.dtype)

    def attend(self, queries: Tensor, step: Step, cache: LayerCache, scale: float) -> Tensor:
        out = torch.empty_like(queries)
        for row, (table, length) in enumerate(zip(step.decode_tables, step.decode_lengths.tolist(), strict=True)):
            keys, values = _cached(cache, table, length)
            out[row : row + 1] = _attend(queries[row : row + 1], keys, values, scale) if length else 0
        starts = [step.num_decodes + start for start in step.piece_starts.tolist()]
        for piece, (table, length) in enumerate(zip(step.piece_tables, step.piece_lengths.tolist(), strict=True)):
            rows = slice(starts[piece], starts[piece + 1])
            out[rows] = _attend(queries[rows], *_cached(cache, table, length), scale)
        return out

    def sample(self, logits: Tensor, draws: Draws) -> Tensor:
        """The draw that all executors define by (`executors.sampling`), row by row on the host."""
        columns = (draws.temperature, draws.top_p, draws.top_k, draws.seed, draws.min_p)
        params = zip(*(column.tolist() for column in columns), strict=True)
        rows = zip(logits.cpu().numpy(), params, draws.sample_index.tolist(), strict=True)
        tokens = [sampling.sample(row, SamplingParams(*one), index) for row, one, index in rows]
        return torch.from_numpy(np.array(tokens, np.int32)).to(logits.device)


def dequantised(weight: Weight) -> Tensor:
    """[outputs, inputs] fp32"""
    if weight.scales is None:
        return weight.values.float()
    if weight.values.dtype == torch.uint8:
        codes = unpack_int4(weight.values, weight.scales.shape[1]).float()
        return (codes * weight.scales.float()[..., None]).flatten(1)
    return weight.values.float() * weight.scales[:, None]


def _rotated(heads: Tensor, turn: Tensor) -> Tensor:
    """Rotary positions (Su et al. 2021) for heads [tokens, heads, dim]: dimension i turns with i + dim / 2."""
    cos, sin = turn.chunk(2, -1)
    a, b = heads.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def _cached(cache: LayerCache, table: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Keys and values [length, kv_heads, dim] fp32 of a request."""
    _, kv_heads, block_size, dim = cache.keys.shape
    used = table[: -(-length // block_size)].long()

    def read(pages: Tensor, scales: Tensor | None) -> Tensor:
        found = pages.view(torch.int8)[used].view(pages.dtype) if scales is not None else pages[used]
        found = found.float() if scales is None else found.float() * scales[used][..., None]
        return found.transpose(1, 2).reshape(-1, kv_heads, dim)[:length]

    return read(cache.keys, cache.key_scales), read(cache.values, cache.value_scales)


def _attend(queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """The queries [n, heads, dim] are at the last positions of keys and values [length, kv_heads, dim]."""
    n, heads, dim = queries.shape
    length, kv_heads, _ = keys.shape
    grouped = queries.float().view(n, kv_heads, heads // kv_heads, dim)
    scores = torch.einsum("nkgd,lkd->kgnl", grouped, keys) * scale
    if n > 1:
        place = torch.arange(length, device=keys.device)
        scores.masked_fill_(place > place[length - n :, None], -torch.inf)
    mixed = torch.einsum("kgnl,lkd->nkgd", scores.softmax(-1), values)
    return mixed.reshape(n, heads, dim).to(queries.dtype)
