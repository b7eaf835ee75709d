"""Paged causal attention of prompt pieces against plain attention in fp64, mixed lengths, poisoned unused slots."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged import EIGHT_BIT_LIMIT, TOLERANCE, Paged, attend, paged, poisoned, relative_error

from busload_kernels.gpu.errors import GpuKernelError
from busload_kernels.gpu.launch import Tile
from busload_kernels.gpu.prefill_attention import block_tokens, prefill_attention, prefill_work

TILE = Tile({"ROWS": 32, "TILE": 16})


def case(
    pieces: list[tuple[int, int]], group: int, dim: int, dtype: torch.dtype, cache: torch.dtype
) -> tuple[dict[str, Any], Paged]:
    """Arguments for (tokens cached before, tokens of the piece) of each sequence, and the caches behind them."""
    generator = torch.Generator().manual_seed(dim + group)
    lengths = [before + new for before, new in pieces]
    caches = paged(lengths, 2, dim, 16, cache, generator)
    counts = [new for _, new in pieces]
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    q = torch.randn((sum(counts), 2 * group, dim), generator=generator).to(dtype)
    work = torch.cat((torch.from_numpy(prefill_work(counts, group, TILE)), torch.tensor([[-1, 7]], dtype=torch.int32)))
    return {
        "q": q,
        "k_pages": caches.k_pages,
        "v_pages": caches.v_pages,
        "tables": caches.tables,
        "lengths": caches.lengths,
        "query_starts": starts,
        "work": work,
        "scale": dim**-0.5,
        "out": poisoned(*q.shape, dtype=dtype),
        "tile": TILE,
        "k_scales": caches.k_scales,
        "v_scales": caches.v_scales,
    }, caches


@pytest.mark.parametrize("cache", [None, *EIGHT_BIT_LIMIT])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("group", "dim"), [(1, 16), (3, 64), (8, 32)])
def test_attention_is_that_of_the_formula(dtype: torch.dtype, cache: torch.dtype | None, group: int, dim: int) -> None:
    pieces = [(0, 1), (0, 19), (33, 9), (15, 2), (20, 0), (16, 16)]
    arguments, caches = case(pieces, group, dim, dtype, cache or dtype)
    out = prefill_attention(**arguments)
    starts = arguments["query_starts"].tolist()
    for sequence, (before, new) in enumerate(pieces):
        if new == 0:
            continue
        rows = slice(starts[sequence], starts[sequence + 1])
        expected = attend(arguments["q"][rows], caches.keys[sequence], caches.values[sequence], dim**-0.5)
        assert relative_error(out[rows], expected) < TOLERANCE[dtype], (before, new)


def test_pieces_of_a_prompt_give_what_the_whole_gives() -> None:
    whole, caches = case([(0, 40)], 3, 16, torch.float32, torch.int8)
    expected = prefill_attention(**whole)
    for start, end in [(0, 13), (13, 32), (32, 40)]:
        piece = {
            **whole,
            "q": whole["q"][start:end].clone(),
            "lengths": torch.tensor([end], dtype=torch.int32),
            "query_starts": torch.tensor([0, end - start], dtype=torch.int32),
            "work": torch.from_numpy(prefill_work([end - start], 3, TILE)),
            "out": poisoned(end - start, 6, 16, dtype=torch.float32),
        }
        assert relative_error(prefill_attention(**piece), expected[start:end]) < 1e-6
    assert len(caches.keys[0]) == 40


@settings(max_examples=100)
@given(st.lists(st.integers(0, 100), max_size=10), st.integers(1, 16))
def test_work_covers_every_query_once(counts: list[int], group: int) -> None:
    tokens = block_tokens(group, TILE)
    covered = [
        (sequence, query)
        for sequence, first in prefill_work(counts, group, TILE).tolist()
        for query in range(first, min(first + tokens, counts[sequence]))
    ]
    assert sorted(covered) == [(sequence, query) for sequence, count in enumerate(counts) for query in range(count)]


def test_messages_name_the_tensor_and_what_is_allowed() -> None:
    arguments, _ = case([(0, 5)], 3, 64, torch.float16, torch.float16)
    for name, bad, message in [
        ("query_starts", torch.zeros(1, dtype=torch.int32), r"query_starts has shape \[1\]; it must be \[2\]"),
        ("work", torch.zeros((1, 3), dtype=torch.int32), r"work has shape \[1, 3\]; it must be \[items, 2\]"),
        ("tile", Tile({"ROWS": 2, "TILE": 16}), "a tile of 2 rows holds no group of 3 heads"),
        ("k_scales", torch.ones(3), "k_scales are given for float16 values"),
    ]:
        with pytest.raises(GpuKernelError, match=message):
            prefill_attention(**{**arguments, name: bad})
