"""What is checked: every kernel in every type that serving meets, on small shapes with ragged edges.

A case makes its tensors, calls a kernel as serving does, and says how far the result is from plain torch in fp32.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from busload_kernels.gpu.decode_attention import DecodeBuffers, decode_attention, decode_work
from busload_kernels.gpu.linear import linear
from busload_kernels.gpu.norm import rms_norm
from busload_kernels.gpu.prefill_attention import prefill_attention, prefill_work
from busload_kernels.gpu.rope_write import rope_and_write
from busload_kernels.gpu.sampling import SamplingBuffers, sample
from busload_kernels.gpu.tiles import tile_for
from busload_runtime.engine.plan import SamplingParams

from .place import (
    BF16,
    FP8,
    FP16,
    FP32,
    INT4,
    INT8,
    PAGE,
    SHORT,
    TOLERANCE,
    Paged,
    Place,
    matrix,
    paged,
    relative_error,
)

SPLIT = 512
LENGTHS = (1, 15, 16, 17, 63, 64, 65, 511, 512, 513, 1300, 0)
PIECES = ((1, 40), (17, 17), (64, 300), (100, 513))
"""Queries of a prompt piece, and cached tokens with them."""


@dataclass(frozen=True)
class Work:
    """A call, and how wrong what it returned is. Both may be run again."""

    call: Callable[[], torch.Tensor]
    error: Callable[[torch.Tensor], float]


@dataclass(frozen=True)
class Case:
    kernel: str
    name: str
    tolerance: float
    make: Callable[[Place], Work]


def cases() -> list[Case]:
    return [*_norms(), *_ropes(), *_decodes(), *_far_pages(), *_prefills(), *_linears(), *_samplings()]


def _norms() -> Iterator[Case]:
    for hidden, (dtype, out) in itertools.product(
        (576, 1024, 4096), ((BF16, BF16), (FP16, FP16), (BF16, INT8), (BF16, FP8))
    ):
        # Rounding to 8 bits: half a step of 1/127 of the largest, or 3 bits of mantissa.
        tolerance = {INT8: 2e-2, FP8: 4e-2}.get(out, TOLERANCE[dtype])
        yield Case(
            "norm", f"hidden {hidden}, {SHORT[dtype]} to {SHORT[out]}", tolerance, partial(norm, hidden, dtype, out)
        )


def norm(hidden: int, dtype: torch.dtype, out: torch.dtype, place: Place) -> Work:
    x, residual = place.normal(33, hidden, dtype=dtype), place.normal(33, hidden, dtype=dtype)
    gain = place.normal(hidden, dtype=dtype)
    result = place.poisoned(33, hidden, dtype=out)
    scales = place.poisoned(33, dtype=FP32) if out in (INT8, FP8) else None
    total = x.float() + residual.float()
    running = torch.empty_like(residual)

    def call() -> torch.Tensor:
        running.copy_(residual)
        return rms_norm(x, gain, 1e-5, result, residual=running, scales=scales)

    def error(found: torch.Tensor) -> float:
        value = found.float() if scales is None else found.float() * scales[:, None]
        rounded = total.to(dtype).float()
        expected = rounded * torch.rsqrt(rounded.square().mean(-1, keepdim=True) + 1e-5) * gain.float()
        return max(relative_error(value, expected), relative_error(running, total))

    return Work(call, error)


def _attention_shapes() -> Iterator[tuple[int, int, torch.dtype, torch.dtype]]:
    """Head dimension, query heads for each of keys, activations, cache."""
    for dim, group in ((64, 3), (64, 8), (128, 1), (128, 2), (128, 4), (128, 8)):
        for dtype, cache in ((BF16, BF16), (FP16, FP16), (BF16, INT8), (BF16, FP8)):
            yield dim, group, dtype, cache


def _ropes() -> Iterator[Case]:
    for dim, group, dtype, cache in _attention_shapes():
        for head_norm in (False, True) if dim == 128 else (False,):
            name = f"dim {dim}, group {group}, cache {SHORT[cache]}{', head norm' if head_norm else ''}"
            tolerance = {INT8: 2e-2, FP8: 4e-2}.get(cache, TOLERANCE[dtype])
            yield Case("rope_write", name, tolerance, partial(rope_write, dim, group, dtype, cache, head_norm))


def rope_write(dim: int, group: int, dtype: torch.dtype, cache: torch.dtype, head_norm: bool, place: Place) -> Work:
    tokens, kv_heads, pages = 19, 2, 8
    heads = kv_heads * group
    qkv = place.normal(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    angles = place.normal(4096, dim // 2)
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1)
    positions = place.whole(0, 4096, tokens)
    slots = place.shuffled(pages * PAGE)[:tokens].clone()
    slots[-1] = -1  # padding
    sides = [place.poisoned(pages, kv_heads, PAGE, dim, dtype=cache) for _ in range(2)]
    scales = [place.poisoned(pages, kv_heads, PAGE, dtype=FP32) if cache in (INT8, FP8) else None for _ in range(2)]
    gains = [place.normal(dim, dtype=dtype) if head_norm else None for _ in range(2)]
    q_out = place.poisoned(tokens, heads, dim, dtype=dtype)

    def call() -> torch.Tensor:
        return rope_and_write(
            qkv, cos_sin, positions, slots, q_out, sides[0], sides[1],
            k_scales=scales[0], v_scales=scales[1], q_norm=gains[0], k_norm=gains[1], eps=1e-6,
        )  # fmt: skip

    def error(found: torch.Tensor) -> float:
        queries, keys, values = qkv.float().view(tokens, -1, dim).split([heads, kv_heads, kv_heads], 1)
        turn = cos_sin[positions.long()][:, None]
        expected = [_rotate(_head_norm(queries, gains[0]), turn), _rotate(_head_norm(keys, gains[1]), turn), values]
        written = [_slots_of(side, scale, slots[:-1]) for side, scale in zip(sides, scales, strict=True)]
        return max(
            relative_error(found, expected[0]),
            relative_error(written[0], expected[1][:-1]),
            relative_error(written[1], expected[2][:-1]),
        )

    return Work(call, error)


def _slots_of(pages: torch.Tensor, scales: torch.Tensor | None, slots: torch.Tensor) -> torch.Tensor:
    """[slots, kv_heads, dim] fp32"""
    page, place = slots // PAGE, slots % PAGE
    if scales is None:
        return pages[page, :, place].float()
    return pages.view(INT8)[page, :, place].view(pages.dtype).float() * scales[page, :, place][..., None]


def _head_norm(heads: torch.Tensor, gain: torch.Tensor | None) -> torch.Tensor:
    if gain is None:
        return heads
    return heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + 1e-6) * gain.float()


def _rotate(heads: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    cos, sin = turn.chunk(2, -1)
    a, b = heads.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def _decodes() -> Iterator[Case]:
    for dim, group, dtype, cache in _attention_shapes():
        name = f"dim {dim}, group {group}, cache {SHORT[cache]}"
        make = partial(decode, LENGTHS, 2, dim, group, dtype, cache)
        yield Case("decode_attention", name, TOLERANCE[dtype], make)


def decode(
    lengths: tuple[int, ...], kv_heads: int, dim: int, group: int, dtype: torch.dtype, cache: torch.dtype, place: Place
) -> Work:
    caches = paged(place, lengths, kv_heads, dim, cache)
    return decode_over(caches, lengths, kv_heads, dim, group, dtype, place)


def decode_over(
    caches: Paged, lengths: tuple[int, ...], kv_heads: int, dim: int, group: int, dtype: torch.dtype, place: Place
) -> Work:
    heads = kv_heads * group
    q = place.normal(len(lengths), heads, dim, dtype=dtype)
    out = place.poisoned(len(lengths), heads, dim, dtype=dtype)
    buffers = decode_buffers(lengths, heads, dim, place)
    tile = tile_for("decode_attention", place.name, dim=dim, cache_bits=8 * caches.k_pages.dtype.itemsize)

    def call() -> torch.Tensor:
        return decode_attention(
            q, caches.k_pages, caches.v_pages, caches.tables, caches.lengths, dim**-0.5, out, buffers, SPLIT, tile,
            min(256, len(buffers.work)), **caches.scales,
        )  # fmt: skip

    def error(found: torch.Tensor) -> float:
        expected = torch.zeros(found.shape, device=place.device)
        for sequence, length in enumerate(lengths):
            if length:
                expected[sequence] = attend(q[sequence][None], *caches.read(sequence, length), dim**-0.5)[0]
        return relative_error(found, expected)

    return Work(call, error)


def decode_buffers(lengths: tuple[int, ...], heads: int, dim: int, place: Place) -> DecodeBuffers:
    work, first = decode_work(lengths, SPLIT)
    items = max(1, len(work))
    return DecodeBuffers(
        work=place.put(work),
        num_work=place.put([len(work)]),
        first_work=place.put(first),
        partial=place.poisoned(items, heads, dim, dtype=FP32),
        peaks=place.poisoned(items, heads, dtype=FP32),
        totals=place.poisoned(items, heads, dtype=FP32),
    )


def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention in fp32 of the last len(q) positions: q [queries, heads, dim], keys [length, kv_heads, dim]."""
    queries, heads, _ = q.shape
    length, kv_heads, _ = keys.shape
    keys, values = (side.repeat_interleave(heads // kv_heads, 1) for side in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * scale
    seen = torch.arange(length - queries, length, device=q.device)
    hidden = torch.arange(length, device=q.device)[None, :] > seen[:, None]
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)


def _far_pages() -> Iterator[Case]:
    """Pages behind 2^31 numbers, where 32-bit offsets overflow: 4.4 GB."""
    yield Case("decode_attention", "pages beyond 2^31 numbers, cache int8", TOLERANCE[BF16], far_pages)


def far_pages(place: Place) -> Work:
    lengths, kv_heads, dim = (70, 130), 8, 128
    near = paged(place, lengths, kv_heads, dim, INT8)
    if place.device.type == "cpu":
        raise MemoryError("4.4 GB of pages: for a GPU only")
    count = near.k_pages.shape[0]
    total = 2**31 // (kv_heads * PAGE * dim) + 1 + count

    def moved(pages: torch.Tensor | None) -> torch.Tensor | None:
        if pages is None:
            return None
        far = torch.empty((total, *pages.shape[1:]), dtype=pages.dtype, device=place.device)
        far[-count:] = pages
        return far

    k_pages, v_pages = moved(near.k_pages), moved(near.v_pages)
    assert k_pages is not None
    assert v_pages is not None
    far = Paged(
        k_pages, v_pages, moved(near.k_scales), moved(near.v_scales),
        near.tables + (total - count), near.lengths, near.num_tokens,
    )  # fmt: skip
    return decode_over(far, lengths, kv_heads, dim, 4, BF16, place)


def _prefills() -> Iterator[Case]:
    for dim, group, dtype, cache in _attention_shapes():
        name = f"dim {dim}, group {group}, cache {SHORT[cache]}"
        yield Case("prefill_attention", name, TOLERANCE[dtype], partial(prefill, PIECES, 2, dim, group, dtype, cache))


def prefill(
    pieces: tuple[tuple[int, int], ...],
    kv_heads: int,
    dim: int,
    group: int,
    dtype: torch.dtype,
    cache: torch.dtype,
    place: Place,
) -> Work:
    heads = kv_heads * group
    queries, lengths = zip(*pieces, strict=True)
    caches = paged(place, lengths, kv_heads, dim, cache)
    starts = np.cumsum([0, *queries])
    q = place.normal(int(starts[-1]), heads, dim, dtype=dtype)
    out = place.poisoned(*q.shape, dtype=dtype)
    tile = tile_for("prefill_attention", place.name, dim=dim, cache_bits=8 * cache.itemsize)
    work, query_starts = place.put(prefill_work(queries, group, tile)), place.put(starts)

    def call() -> torch.Tensor:
        return prefill_attention(
            q, caches.k_pages, caches.v_pages, caches.tables, caches.lengths, query_starts, work, dim**-0.5, out, tile,
            **caches.scales,
        )  # fmt: skip

    def error(found: torch.Tensor) -> float:
        expected = [
            attend(q[starts[index] : starts[index + 1]], *caches.read(index, length), dim**-0.5)
            for index, length in enumerate(lengths)
        ]
        return relative_error(found, torch.cat(expected))

    return Work(call, error)


FORMATS = {
    "w16a16 bf16": (BF16, BF16),
    "w16a16 fp16": (FP16, FP16),
    "w8a16 int8": (BF16, INT8),
    "w8a16 fp8": (BF16, FP8),
    "w8a8 int8": (INT8, INT8),
    "w8a8 fp8": (FP8, FP8),
    "w4a16 int4": (BF16, INT4),
}


def _linears() -> Iterator[Case]:
    for name, rows, (n, k, gated) in itertools.product(
        FORMATS, (1, 16, 33, 512), ((1536, 1024, False), (3072, 1024, True), (576, 1536, False))
    ):
        x, _ = FORMATS[name]
        shape = f"{k} to {'gated ' if gated else ''}{n // 2 if gated else n}"
        tolerance = TOLERANCE[x if x in TOLERANCE else BF16]
        yield Case("linear", f"{name}, {shape}, {rows} rows", tolerance, partial(layer, name, rows, n, k, gated))


def layer(form: str, rows: int, n: int, k: int, gated: bool, place: Place) -> Work:
    x_type, w_type = FORMATS[form]
    x, w = matrix(place, rows, k, x_type), matrix(place, n, k, w_type)
    dtype = x_type if x_type in TOLERANCE else BF16
    out = place.poisoned(rows, n // 2 if gated else n, dtype=dtype)
    bias = None if gated else place.normal(n, dtype=dtype)
    tile = linear_tile(place, form, rows, n, k)
    partial_sums = place.poisoned(tile.sizes["SPLIT_K"] * rows * n, dtype=FP32)

    def call() -> torch.Tensor:
        return linear(
            x.codes, w.codes, out, tile,
            x_scales=x.scales, w_scales=w.scales, bias=bias, gated=gated, partial=partial_sums,
        )  # fmt: skip

    def error(found: torch.Tensor) -> float:
        expected = x.value() @ w.value().T
        if bias is not None:
            expected = expected + bias.float()
        if gated:
            expected = torch.nn.functional.silu(expected[:, ::2]) * expected[:, 1::2]
        return relative_error(found, expected)

    return Work(call, error)


def linear_tile(place: Place, form: str, rows: int, n: int, k: int):  # type: ignore[no-untyped-def]
    kind, dtype = form.split()
    return tile_for("linear", place.name, rows=rows, format=kind, dtype=dtype, n=n, k=k)


def _samplings() -> Iterator[Case]:
    for vocab in (49152, 151936):
        for how in ("greedy", "mixed"):
            # A token at the very edge of a threshold may fall to either side: one row in 50.
            tolerance = 0.0 if how == "greedy" else 0.02
            yield Case("sampling", f"vocabulary {vocab}, {how}", tolerance, partial(draw, vocab, how == "greedy"))


def draw(vocab: int, greedy: bool, place: Place) -> Work:
    rows = 64
    logits = 3 * place.normal(rows, vocab)
    params = [
        SamplingParams(
            temperature=0.0 if greedy else (0.5, 1.0, 1.5)[row % 3],
            top_p=(1.0, 0.9, 0.5)[row // 3 % 3],
            top_k=(0, 50, 5)[row // 9 % 3],
            min_p=(0.0, 0.05)[row // 27 % 2],
            seed=row,
        )
        for row in range(rows)
    ]
    room = SamplingBuffers.allocate(rows, vocab, place.device)
    buffers = SamplingBuffers(
        temperature=place.put([one.temperature for one in params], FP32),
        top_k=place.put([one.top_k for one in params]),
        top_p=place.put([one.top_p for one in params], FP32),
        min_p=place.put([one.min_p for one in params], FP32),
        seed=place.put([one.seed for one in params], torch.int64),
        sample_index=place.put(list(range(rows))),
        thresholds=room.thresholds,
        scores=room.scores,
        tokens=room.tokens,
    )
    out = torch.full((rows,), -1, dtype=torch.int32, device=place.device)

    def error(found: torch.Tensor) -> float:
        """Share of rows whose token may not be drawn; random numbers are the kernel's own."""
        ranks = (logits > logits.gather(1, found.long()[:, None])).sum(1).tolist()
        wrong = [rank >= drawable(row, one) for rank, row, one in zip(ranks, logits, params, strict=True)]
        return float(np.mean(wrong))

    return Work(lambda: sample(logits, buffers, out), error)


def drawable(logits: torch.Tensor, params: SamplingParams) -> int:
    """How many of the most likely tokens may be drawn: min-p, then top-k, then top-p of what those leave."""
    if params.temperature == 0:
        return 1
    weights = (logits.double() / params.temperature).softmax(0).sort(descending=True).values
    weights = weights[weights >= params.min_p * weights[0]]
    if params.top_k:
        weights = weights[: params.top_k]
    before = weights.cumsum(0) - weights
    return int((before < params.top_p * weights.sum()).sum())
