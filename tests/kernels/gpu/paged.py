"""Paged caches made of contiguous keys and values, and plain references. All in fp32 unless said."""

from dataclasses import dataclass

import torch
from measured import MEASURED

EIGHT_BIT_LIMIT = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}
"""Relative error against the reference on the same (dequantised) inputs."""


def relative_error(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """||ours - reference|| / ||reference||; NaN if there is any."""
    ours, reference = ours.double(), reference.double()
    error = float((ours - reference).norm() / reference.norm().clamp_min(1e-30))
    MEASURED.note(error)
    return error


def quantise(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and fp32 scales over the last dimension."""
    scales = x.abs().amax(-1).clamp_min(1e-20).float() / EIGHT_BIT_LIMIT[dtype]
    codes = x.float() / scales[..., None]
    return (codes.round() if dtype == torch.int8 else codes).to(dtype), scales


def check_quantised(codes: torch.Tensor, scales: torch.Tensor, values: torch.Tensor) -> None:
    """Asserts that codes and scales over the last dimension are those of `values`.

    int8: every code within half a step (and rounding of fp32). fp8: the interpreter's cast forgets the carry into the
    exponent (7.9 becomes 4) and rounds ties up, so one value in twenty may be off, by a factor of two at most.
    """
    assert torch.allclose(scales.double() * EIGHT_BIT_LIMIT[codes.dtype], values.abs().amax(-1).double(), rtol=2e-3)
    relative_error(codes.double() * scales.double()[..., None], values)
    exact = values.double() / scales[..., None]
    if codes.dtype == torch.int8:
        assert (codes.double() - exact).abs().max() < 0.501
    else:
        error = (codes.double() - exact).abs() / exact.abs().clamp_min(2**-6)
        assert (error > 2**-4 + 1e-5).double().mean() < 0.05
        assert error.max() < 0.53


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory that shows what was not written: NaN, or the code -128, which no kernel writes."""
    return torch.full(shape, -128 if dtype == torch.int8 else torch.nan, dtype=dtype)


@dataclass
class Paged:
    """Keys and values of some sequences in shuffled pages, and what they are when read back."""

    k_pages: torch.Tensor
    v_pages: torch.Tensor
    k_scales: torch.Tensor | None
    v_scales: torch.Tensor | None
    tables: torch.Tensor
    lengths: torch.Tensor
    keys: list[torch.Tensor]
    """[length, kv_heads, dim] of each sequence, dequantised."""
    values: list[torch.Tensor]


def paged(
    lengths: list[int],
    kv_heads: int,
    dim: int,
    page: int,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> Paged:
    """Random sequences. What no sequence owns is poison: unused pages, and slots behind the end of the last page."""
    per_sequence = max(1, max(-(-length // page) for length in lengths))
    needed = sum(-(-length // page) for length in lengths)
    order = torch.randperm(needed + 2, generator=generator).tolist()
    quantised = dtype in EIGHT_BIT_LIMIT
    pages = [poisoned(needed + 2, kv_heads, page, dim, dtype=dtype) for _ in range(2)]
    scales = [torch.full((needed + 2, kv_heads, page), torch.nan) if quantised else None for _ in range(2)]
    tables = torch.zeros((len(lengths), per_sequence), dtype=torch.int32)
    read: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for sequence, length in enumerate(lengths):
        mine = [order.pop() for _ in range(-(-length // page))]
        tables[sequence, : len(mine)] = torch.tensor(mine, dtype=torch.int32)
        for which in range(2):
            x = torch.randn((length, kv_heads, dim), generator=generator)
            codes, factors = quantise(x, dtype) if quantised else (x.to(dtype), torch.ones(length, kv_heads))
            for slot in range(length):
                at = mine[slot // page], slice(None), slot % page
                pages[which][at] = codes[slot]
                if (scale := scales[which]) is not None:
                    scale[at] = factors[slot]
            read[which].append(codes.float() * factors[..., None])
    return Paged(*pages, *scales, tables, torch.tensor(lengths, dtype=torch.int32), *read)


def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention of the last len(q) positions.

    q [queries, heads, dim], keys and values [length, kv_heads, dim]; returns [queries, heads, dim] in fp64.
    """
    queries, heads, _ = q.shape
    length, kv_heads, _ = keys.shape
    k = keys.double().repeat_interleave(heads // kv_heads, 1)
    v = values.double().repeat_interleave(heads // kv_heads, 1)
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    place = torch.arange(length - queries, length)
    hidden = torch.arange(length)[None, :] > place[:, None]
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
