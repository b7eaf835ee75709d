"""Rotary embedding and the write to pages, against the formula written out."""

from typing import Any

import pytest
import torch
from paged import EIGHT_BIT_LIMIT, TOLERANCE, check_quantised, poisoned, relative_error

from busload_kernels.gpu.errors import GpuKernelError
from busload_kernels.gpu.rope_write import rope_and_write

PAGE, POSITIONS = 16, 64


def cos_sin(dim: int) -> torch.Tensor:
    angle = torch.arange(POSITIONS)[:, None] * 10000.0 ** (-torch.arange(0, dim, 2) / dim)
    return torch.cat((angle.cos(), angle.sin()), 1).float()


def rotated(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """x [tokens, heads, dim]: pairs (i, i + dim / 2) turn by position * base^(-2 i / dim)."""
    a, b = x.double().chunk(2, -1)
    cos, sin = cos_sin(x.shape[-1]).double()[positions.long()][:, None, :].chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def arguments(dtype: torch.dtype, cache: torch.dtype, group: int, dim: int, slots: list[int]) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(group * dim)
    kv_heads, tokens = 2, len(slots)
    scaled = cache in EIGHT_BIT_LIMIT
    return {
        "qkv": torch.randn((tokens, kv_heads * (group + 2) * dim), generator=generator).to(dtype),
        "cos_sin": cos_sin(dim),
        "positions": torch.randint(POSITIONS, (tokens,), generator=generator, dtype=torch.int32),
        "slots": torch.tensor(slots),
        "q_out": poisoned(tokens, kv_heads * group, dim, dtype=dtype),
        "k_pages": poisoned(4, kv_heads, PAGE, dim, dtype=cache),
        "v_pages": poisoned(4, kv_heads, PAGE, dim, dtype=cache),
        "k_scales": torch.full((4, kv_heads, PAGE), torch.nan) if scaled else None,
        "v_scales": torch.full((4, kv_heads, PAGE), torch.nan) if scaled else None,
    }


def heads_of(given: dict[str, Any]) -> list[torch.Tensor]:
    """Queries, keys, values [tokens, heads, dim] of the fused projection."""
    tokens, heads, dim = given["q_out"].shape
    kv_heads = given["k_pages"].shape[1]
    return list(given["qkv"].view(tokens, -1, dim).split([heads, kv_heads, kv_heads], 1))


@pytest.mark.parametrize("cache", [None, *EIGHT_BIT_LIMIT])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("group", "dim"), [(1, 16), (3, 64), (4, 128)])
def test_heads_are_rotated_and_lie_in_their_slots(
    dtype: torch.dtype, cache: torch.dtype | None, group: int, dim: int
) -> None:
    slots = [37, -1, 15, 16, 63]  # a padded token, and both sides of a page edge
    given = arguments(dtype, cache or dtype, group, dim, slots)
    q, k, v = heads_of(given)
    out = rope_and_write(**given)
    assert relative_error(out, rotated(q, given["positions"])) < TOLERANCE[dtype]
    written = torch.zeros(4, PAGE, dtype=torch.bool)
    for token, slot in enumerate(slots):
        if slot < 0:
            continue
        page, place = divmod(slot, PAGE)
        written[page, place] = True
        expected = {"k": rotated(k, given["positions"])[token], "v": v[token]}
        for name, want in expected.items():
            have = given[f"{name}_pages"][page, :, place]
            if cache is None:
                assert relative_error(have, want) < TOLERANCE[dtype], (name, slot)
            else:
                check_quantised(have, given[f"{name}_scales"][page, :, place], want)
    for name in ("k", "v"):
        untouched = given[f"{name}_pages"].transpose(1, 2)[~written].float()
        assert (untouched.isnan() | (untouched == -128)).all()


def test_heads_are_normalised_before_they_turn() -> None:
    given = arguments(torch.float32, torch.float32, 3, 64, [0, 20])
    q_norm, k_norm = torch.linspace(0.5, 2, 64), torch.linspace(2, 0.5, 64)
    q, k, v = heads_of(given)
    out = rope_and_write(**given, q_norm=q_norm, k_norm=k_norm, eps=1e-6)
    norm = torch.nn.functional.rms_norm
    assert relative_error(out, rotated(norm(q, (64,), q_norm, 1e-6), given["positions"])) < 1e-5
    keys = rotated(norm(k, (64,), k_norm, 1e-6), given["positions"])
    assert relative_error(given["k_pages"][1, :, 4], keys[1]) < 1e-5
    assert torch.equal(given["v_pages"][1, :, 4], v[1])


def test_messages_name_the_tensor_and_what_is_allowed() -> None:
    given = arguments(torch.float16, torch.int8, 3, 64, [0])
    for name, bad, message in [
        ("positions", given["positions"].long(), "positions is int64; allowed: int32"),
        ("slots", torch.zeros(2, dtype=torch.int64), r"slots has shape \[2\]; it must be \[1\]"),
        ("k_scales", None, r"k_scales are missing: int8 values need fp32 scales \[4, 2, 16\]"),
        ("v_pages", given["v_pages"].half(), "v_pages is float16; allowed: int8"),
        ("qkv", given["qkv"][:, :320].contiguous(), r"qkv has shape \[1, 320\]; it must be \[1, 640\]"),
        ("q_out", torch.empty(1, 7, 64, dtype=torch.float16), "q_out has 7 heads for 2 of keys"),
        (
            "k_pages",
            torch.zeros(4, 2, 24, 64, dtype=torch.int8),
            "page size of k_pages is 24; it must be a power",
        ),
    ]:
        with pytest.raises(GpuKernelError, match=message):
            rope_and_write(**{**given, name: bad})
