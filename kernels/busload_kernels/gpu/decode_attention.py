"""Attention of one new token per sequence to its paged cache, split over the cache (Flash-Decoding, Dao et al. 2023).

A sequence is cut into splits of fixed *length*, not into a fixed number of them, so that a token's result depends on
its own sequence alone and not on the batch around it. The list of splits (`decode_work`) is made on the host, which
knows all lengths when it plans a step, and read on the device; the grid only bounds how many of its programs run at a
time. So one captured graph serves every step whose sequences fit its buffers.

Two launches: `_decode_kernel` attends the splits, one program for a split and key/value head with its whole group of
queries; `_reduce_kernel` joins the splits of each query head.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from .attend_tile import attend_tile
from .checks import EIGHT_BIT, FLOATS, check_power_of_two, check_scales, check_tensor
from .errors import GpuKernelError
from .launch import Tile, launch

LOG2_E = 1.4426950408889634
ROWS = 16
"""Query heads of a tile: what a matrix instruction takes at least. Groups are smaller and padded."""
REDUCED_AT_ONCE = 16
"""Splits that the reduction reads at a time."""


@triton.jit(do_not_specialize=["table_width"])
def _decode_kernel(
    q,
    k_pages,
    v_pages,
    k_scales,
    v_scales,
    tables,
    lengths,
    work,
    num_work,
    partial,
    peaks,
    totals,
    scale_log2,
    table_width,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
):
    head = tl.program_id(1)
    member = tl.arange(0, ROWS)
    dim = tl.arange(0, DIM)
    slot = tl.arange(0, TILE)
    for item in range(tl.program_id(0), tl.load(num_work), tl.num_programs(0)):
        sequence = tl.load(work + 2 * item).to(tl.int64)
        start = tl.load(work + 2 * item + 1) * SPLIT
        end = tl.minimum(start + SPLIT, tl.load(lengths + sequence))
        table = tables + sequence * table_width
        query = (sequence * KV_HEADS + head) * GROUP + member
        queries = tl.load(q + query[:, None] * DIM + dim[None, :], mask=member[:, None] < GROUP, other=0.0)
        acc = tl.zeros([ROWS, DIM], tl.float32)
        peak = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        whole = start + (end - start) // TILE * TILE
        seen = slot[None, :] < end - whole
        for at in range(start, whole, TILE):
            row = (tl.load(table + at // PAGE).to(tl.int64) * KV_HEADS + head) * PAGE + at % PAGE
            acc, peak, total = attend_tile(
                queries, acc, peak, total, k_pages, v_pages, k_scales, v_scales, row, None, scale_log2, DIM, TILE
            )
        if whole < end:
            row = (tl.load(table + whole // PAGE).to(tl.int64) * KV_HEADS + head) * PAGE + whole % PAGE
            acc, peak, total = attend_tile(
                queries, acc, peak, total, k_pages, v_pages, k_scales, v_scales, row, seen, scale_log2, DIM, TILE
            )
        result = ((item * KV_HEADS + head) * GROUP + member).to(tl.int64)
        tl.store(partial + result[:, None] * DIM + dim[None, :], acc, mask=member[:, None] < GROUP)
        tl.store(peaks + result, peak, mask=member < GROUP)
        tl.store(totals + result, total, mask=member < GROUP)


@triton.jit
def _reduce_kernel(
    partial,
    peaks,
    totals,
    first_work,
    out,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dim = tl.arange(0, DIM)
    first = tl.load(first_work + sequence)
    last = tl.load(first_work + sequence + 1)
    peak = float("-inf")
    total = 0.0
    acc = tl.zeros([DIM], tl.float32)
    for at in range(first, last, AT_ONCE):
        item = at + tl.arange(0, AT_ONCE)
        row = item.to(tl.int64) * HEADS + head
        split_peak = tl.load(peaks + row, mask=item < last, other=float("-inf"))
        new_peak = tl.maximum(peak, tl.max(split_peak, 0))
        kept = tl.exp2(peak - new_peak)
        weight = tl.exp2(split_peak - new_peak)
        total = total * kept + tl.sum(weight * tl.load(totals + row, mask=item < last, other=0.0), 0)
        values = tl.load(partial + row[:, None] * DIM + dim[None, :], mask=item[:, None] < last, other=0.0)
        acc = acc * kept + tl.sum(weight[:, None] * values, 0)
        peak = new_peak
    acc = acc / tl.where(last > first, total, 1.0)  # a padded sequence has no splits
    tl.store(out + (sequence * HEADS + head) * DIM + dim, acc.to(out.dtype.element_ty))


@dataclass(frozen=True, slots=True)
class DecodeBuffers:
    """Device memory between the two launches and the list of splits, for up to `work.shape[0]` splits.

    work [items, 2] int32 (sequence, number of the split within it), num_work [1] int32, first_work [sequences + 1]
    int32 (where the splits of a sequence begin in `work`), partial [items, heads, dim], peaks and totals [items,
    heads] fp32.
    """

    work: torch.Tensor
    num_work: torch.Tensor
    first_work: torch.Tensor
    partial: torch.Tensor
    peaks: torch.Tensor
    totals: torch.Tensor

    @classmethod
    def allocate(cls, items: int, sequences: int, heads: int, dim: int, device: torch.device | str) -> "DecodeBuffers":
        """For `items` splits in all: a pool of T tokens and S sequences needs at most T / split + S."""
        return cls(
            work=torch.zeros((items, 2), dtype=torch.int32, device=device),
            num_work=torch.zeros(1, dtype=torch.int32, device=device),
            first_work=torch.zeros(sequences + 1, dtype=torch.int32, device=device),
            partial=torch.empty((items, heads, dim), dtype=torch.float32, device=device),
            peaks=torch.empty((items, heads), dtype=torch.float32, device=device),
            totals=torch.empty((items, heads), dtype=torch.float32, device=device),
        )


def decode_work(lengths: Sequence[int], split: int) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """`work` [items, 2] and `first_work` [sequences + 1] of `DecodeBuffers` for cached tokens per sequence, the new one
    among them. A length of 0 is padding and has no split."""
    if any(length < 0 for length in lengths):
        raise GpuKernelError(f"lengths has {min(lengths)}; a sequence has 0 (padding) or more cached tokens")
    splits = -(-np.asarray(lengths, np.int64) // split)
    first = np.concatenate(([0], np.cumsum(splits)))
    sequence = np.repeat(np.arange(len(splits)), splits)
    return (
        np.stack((sequence, np.arange(first[-1]) - first[sequence]), 1).astype(np.int32),
        first.astype(np.int32),
    )


def decode_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    buffers: DecodeBuffers,
    split: int,
    tile: Tile,
    programs: int,
    *,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """out = softmax(q k^T * scale) v over the cached tokens of each sequence.

    q and out [sequences, heads, dim] floats; k_pages and v_pages [pages, kv_heads, page size, dim] of q's type or 8-bit
    with fp32 scales [pages, kv_heads, page size]; tables [sequences, pages of the longest] int32; lengths [sequences]
    int32, tokens with the new one, whose key and value are in the cache. `buffers` hold `decode_work(lengths, split)`.
    split: tokens, a multiple of the page size. `programs`: how many work on the list at a time (more do not help once
    there are as many as splits). A sequence of length 0 is padding: zeros. Returns out.
    """
    check_tensor("q", q, ("sequences", "heads", "dim"), FLOATS)
    sequences, heads, dim = q.shape
    kv_heads, page = check_pages(k_pages, v_pages, k_scales, v_scales, q, tile.sizes["TILE"])
    check_tensor("tables", tables, (sequences, "pages of the longest"), (torch.int32,))
    check_tensor("lengths", lengths, (sequences,), (torch.int32,))
    check_tensor("out", out, (sequences, heads, dim), (q.dtype,))
    items = buffers.work.shape[0]
    check_tensor("buffers.first_work", buffers.first_work, (sequences + 1,), (torch.int32,))
    check_tensor("buffers.partial", buffers.partial, (items, heads, dim), (torch.float32,))
    if split % page or split < page:
        raise GpuKernelError(f"split is {split} tokens; it must be a multiple of the page size, {page}")
    launch(
        _decode_kernel,
        (programs, kv_heads),
        Tile({"ROWS": ROWS, **tile.sizes}, tile.num_warps, tile.num_stages),
        q=q,
        k_pages=k_pages,
        v_pages=v_pages,
        k_scales=k_scales,
        v_scales=v_scales,
        tables=tables,
        lengths=lengths,
        work=buffers.work,
        num_work=buffers.num_work,
        partial=buffers.partial,
        peaks=buffers.peaks,
        totals=buffers.totals,
        scale_log2=scale * LOG2_E,
        table_width=tables.shape[1],
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        DIM=dim,
        PAGE=page,
        SPLIT=split,
    )
    launch(
        _reduce_kernel,
        (sequences, heads),
        Tile({"AT_ONCE": REDUCED_AT_ONCE}, num_warps=2),
        partial=buffers.partial,
        peaks=buffers.peaks,
        totals=buffers.totals,
        first_work=buffers.first_work,
        out=out,
        HEADS=heads,
        DIM=dim,
    )
    return out


def check_pages(
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    k_scales: torch.Tensor | None,
    v_scales: torch.Tensor | None,
    q: torch.Tensor,
    tile: int,
) -> tuple[int, int]:
    """Checks a paged cache against queries [any, heads, dim]; returns kv heads and page size."""
    _, heads, dim = q.shape
    check_tensor("k_pages", k_pages, ("pages", "kv_heads", "page", dim), (q.dtype, *EIGHT_BIT))
    pages, kv_heads, page, _ = k_pages.shape
    check_tensor("v_pages", v_pages, (pages, kv_heads, page, dim), (k_pages.dtype,))
    check_scales("k_scales", k_scales, k_pages, (pages, kv_heads, page))
    check_scales("v_scales", v_scales, v_pages, (pages, kv_heads, page))
    check_power_of_two("dim of q", dim, 16, 256)
    check_power_of_two("page size of k_pages", page, 16, 256)
    check_power_of_two("TILE", tile, 16, page)
    if heads % kv_heads or not 1 <= heads // kv_heads <= ROWS:
        raise GpuKernelError(f"q has {heads} heads for {kv_heads} of keys; it must be 1 to {ROWS} times as many")
    return kv_heads, page
