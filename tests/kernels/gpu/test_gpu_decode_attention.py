"""Paged decode attention against plain attention in fp64, over shuffled pages whose unused slots are poison."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged import EIGHT_BIT_LIMIT, TOLERANCE, Paged, attend, paged, poisoned, relative_error

from busload_kernels.gpu.decode_attention import DecodeBuffers, decode_attention, decode_work
from busload_kernels.gpu.errors import GpuKernelError
from busload_kernels.gpu.launch import Tile

PAGE, SPLIT = 16, 32
TILE = Tile({"TILE": 16})


def buffers_for(lengths: list[int], heads: int, dim: int) -> DecodeBuffers:
    work, first = decode_work(lengths, SPLIT)
    buffers = DecodeBuffers.allocate(len(work) + 2, len(lengths), heads, dim, "cpu")
    buffers.work[: len(work)] = torch.from_numpy(work)
    buffers.work[len(work) :] = 2**30  # read by nobody
    buffers.num_work[0] = len(work)
    buffers.first_work[:] = torch.from_numpy(first)
    for tensor in (buffers.partial, buffers.peaks, buffers.totals):
        tensor.fill_(torch.nan)
    return buffers


def case(
    lengths: list[int], group: int, dim: int, dtype: torch.dtype, cache: torch.dtype
) -> tuple[dict[str, Any], Paged]:
    """Arguments of `decode_attention`, and the caches behind them."""
    generator = torch.Generator().manual_seed(sum(lengths) * dim + group)
    caches = paged(lengths, 2, dim, PAGE, cache, generator)
    q = torch.randn((len(lengths), 2 * group, dim), generator=generator).to(dtype)
    arguments = {
        "q": q,
        "k_pages": caches.k_pages,
        "v_pages": caches.v_pages,
        "tables": caches.tables,
        "lengths": caches.lengths,
        "scale": dim**-0.5,
        "out": poisoned(*q.shape, dtype=dtype),
        "buffers": buffers_for(lengths, 2 * group, dim),
        "split": SPLIT,
        "tile": TILE,
        "programs": 3,
        "k_scales": caches.k_scales,
        "v_scales": caches.v_scales,
    }
    return arguments, caches


@pytest.mark.parametrize("cache", [None, *EIGHT_BIT_LIMIT])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("group", "dim"), [(1, 16), (3, 64), (8, 32)])
def test_attention_is_that_of_the_formula(dtype: torch.dtype, cache: torch.dtype | None, group: int, dim: int) -> None:
    lengths = [1, 15, 16, 17, 0, 32, 75]
    arguments, caches = case(lengths, group, dim, dtype, cache or dtype)
    out = decode_attention(**arguments)
    for sequence, length in enumerate(lengths):
        if length == 0:
            assert not out[sequence].any()
            continue
        expected = attend(arguments["q"][sequence][None], caches.keys[sequence], caches.values[sequence], dim**-0.5)
        assert relative_error(out[sequence][None], expected) < TOLERANCE[dtype], length


def test_result_does_not_depend_on_the_batch_or_the_grid() -> None:
    arguments, caches = case([70, 40, 33], 3, 16, torch.float32, torch.int8)
    together = decode_attention(**arguments).clone()
    alone = {
        **arguments,
        "q": arguments["q"][:1].clone(),
        "out": poisoned(1, 6, 16, dtype=torch.float32),
        "tables": caches.tables[:1].clone(),
        "lengths": caches.lengths[:1].clone(),
        "buffers": buffers_for([70], 6, 16),
        "programs": 1,
    }
    assert torch.equal(decode_attention(**alone)[0], together[0])


@settings(max_examples=200)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=20), st.sampled_from([16, 64, 256]))
def test_work_lists_every_token_once(lengths: list[int], split: int) -> None:
    work, first = decode_work(lengths, split)
    for sequence, length in enumerate(lengths):
        mine = work[first[sequence] : first[sequence + 1]]
        assert (mine[:, 0] == sequence).all()
        covered = [token for _, part in mine.tolist() for token in range(part * split, min((part + 1) * split, length))]
        assert covered == list(range(length))
        assert all(part * split < length for _, part in mine.tolist())
    assert first[-1] == len(work) <= sum(lengths) // split + len(lengths)


def test_messages_name_the_tensor_and_what_is_allowed() -> None:
    arguments, _ = case([20], 3, 64, torch.float16, torch.float16)
    for name, bad, message in [
        ("q", arguments["q"].double(), "q is float64; allowed: float32, float16, bfloat16"),
        (
            "q",
            torch.zeros(1, 5, 64, dtype=torch.float16),
            "q has 5 heads for 2 of keys; it must be 1 to 16",
        ),
        ("k_pages", arguments["k_pages"].float(), "k_pages is float32; allowed: float16, int8, float8_e4m3fn"),
        ("split", 24, "split is 24 tokens; it must be a multiple of the page size, 16"),
        ("tile", Tile({"TILE": 64}), "TILE is 64; it must be a power of two from 16 to 16"),
        ("lengths", torch.zeros(3, dtype=torch.int32), r"lengths has shape \[3\]; it must be \[1\]"),
        ("buffers", buffers_for([20, 20], 6, 64), r"buffers.first_work has shape \[3\]; it must be \[2\]"),
    ]:
        with pytest.raises(GpuKernelError, match=message):
            decode_attention(**{**arguments, name: bad})
    with pytest.raises(GpuKernelError, match="lengths has -1; a sequence has 0"):
        decode_work([3, -1], 16)
