"""Attention of the prompt pieces of a step to their paged caches, causal, over any mixture of sequences.

One program takes a block of queries of one sequence with the whole group of heads that shares a key/value head: rows of
its tile are (token, head of the group), so that a page is read once for all of them. Tiles that all its queries see are
computed without a mask, and those that none sees are skipped. The list of blocks is made on the host (`prefill_work`).
"""

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from .attend_tile import attend_tile
from .checks import FLOATS, check_tensor
from .decode_attention import LOG2_E, check_pages
from .errors import GpuKernelError
from .launch import Tile, launch


@triton.jit(do_not_specialize=["table_width"])
def _prefill_kernel(
    q,
    k_pages,
    v_pages,
    k_scales,
    v_scales,
    tables,
    lengths,
    query_starts,
    work,
    out,
    scale_log2,
    table_width,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
):
    item = tl.program_id(0)
    head = tl.program_id(1)
    sequence = tl.load(work + 2 * item).to(tl.int64)
    if sequence >= 0:
        first = tl.load(work + 2 * item + 1)
        chunk = tl.load(query_starts + sequence)
        queries = tl.load(query_starts + sequence + 1) - chunk
        length = tl.load(lengths + sequence)
        context = length - queries
        table = tables + sequence * table_width

        row = tl.arange(0, ROWS)
        token = first + row // GROUP_ROWS
        member = row % GROUP_ROWS
        real = (token < queries) & (member < GROUP)
        dim = tl.arange(0, DIM)
        query = ((chunk + token).to(tl.int64) * KV_HEADS + head) * GROUP + member
        at_q = query[:, None] * DIM + dim[None, :]
        tile = tl.load(q + at_q, mask=real[:, None], other=0.0)

        acc = tl.zeros([ROWS, DIM], tl.float32)
        peak = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        slot = tl.arange(0, TILE)
        seen_by_all = (context + first + 1) // TILE * TILE
        end = tl.minimum(context + first + ROWS // GROUP_ROWS, length)
        for at in range(0, seen_by_all, TILE):
            page_row = (tl.load(table + at // PAGE).to(tl.int64) * KV_HEADS + head) * PAGE + at % PAGE
            acc, peak, total = attend_tile(
                tile, acc, peak, total, k_pages, v_pages, k_scales, v_scales, page_row, None, scale_log2, DIM, TILE
            )
        for at in range(seen_by_all, end, TILE):
            page_row = (tl.load(table + at // PAGE).to(tl.int64) * KV_HEADS + head) * PAGE + at % PAGE
            seen = (at + slot)[None, :] <= tl.minimum(context + token, length - 1)[:, None]
            acc, peak, total = attend_tile(
                tile, acc, peak, total, k_pages, v_pages, k_scales, v_scales, page_row, seen, scale_log2, DIM, TILE
            )
        tl.store(out + at_q, (acc / total[:, None]).to(out.dtype.element_ty), mask=real[:, None])


def prefill_work(queries: Sequence[int], group: int, tile: Tile) -> NDArray[np.int32]:
    """Blocks [items, 2] (sequence, its first query) for sequences with this many queries each, longest-running last
    blocks first: they see most of the cache, and what starts late should be short."""
    tokens = block_tokens(group, tile)
    blocks = [(sequence, first) for sequence, count in enumerate(queries) for first in range(0, count, tokens)]
    return np.array(sorted(blocks, key=lambda block: -block[1]), np.int32).reshape(-1, 2)


def block_tokens(group: int, tile: Tile) -> int:
    """Queries of a program."""
    return tile.sizes["ROWS"] // (1 << (group - 1).bit_length())


def prefill_attention(
    q: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    query_starts: torch.Tensor,
    work: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    tile: Tile,
    *,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """out = softmax(q k^T * scale, causal) v for the last queries of each sequence.

    q and out [tokens, heads, dim] floats; query_starts [sequences + 1] int32: sequence s has rows query_starts[s] to
    query_starts[s + 1] of q, which are its last positions. Pages, scales, tables and lengths are as in
    `decode_attention`, the queries' own keys and values in the cache. work [items, 2] int32: `prefill_work` of the same
    tile; items of sequence -1 are padding. Rows that no item covers are not written. Returns out.
    """
    check_tensor("q", q, ("tokens", "heads", "dim"), FLOATS)
    tokens, heads, dim = q.shape
    kv_heads, page = check_pages(k_pages, v_pages, k_scales, v_scales, q, tile.sizes["TILE"])
    check_tensor("tables", tables, ("sequences", "pages of the longest"), (torch.int32,))
    sequences, width = tables.shape
    check_tensor("lengths", lengths, (sequences,), (torch.int32,))
    check_tensor("query_starts", query_starts, (sequences + 1,), (torch.int32,))
    check_tensor("work", work, ("items", 2), (torch.int32,))
    check_tensor("out", out, (tokens, heads, dim), (q.dtype,))
    group = heads // kv_heads
    if block_tokens(group, tile) < 1:
        raise GpuKernelError(f"a tile of {tile.sizes['ROWS']} rows holds no group of {group} heads")
    launch(
        _prefill_kernel,
        (work.shape[0], kv_heads),
        tile,
        q=q,
        k_pages=k_pages,
        v_pages=v_pages,
        k_scales=k_scales,
        v_scales=v_scales,
        tables=tables,
        lengths=lengths,
        query_starts=query_starts,
        work=work,
        out=out,
        scale_log2=scale * LOG2_E,
        table_width=width,
        KV_HEADS=kv_heads,
        GROUP=group,
        GROUP_ROWS=triton.next_power_of_2(group),
        DIM=dim,
        PAGE=page,
    )
    return out
