"""Rotary position embedding (Su et al. 2021) of queries and keys, and the write of keys and values to their pages.

One program takes what one token has for one key/value head: its group of queries, the key and the value. So the fused
projection is read once, and an 8-bit cache is quantised before it ever reaches memory.

Pages are [page][kv head][slot][dim]: the slots of one head lie side by side, which is what attention reads. Quantised
pages have one fp32 scale for each token and head, [page][kv head][slot].
"""

import torch
import triton
import triton.language as tl

from .checks import EIGHT_BIT, FLOATS, check_power_of_two, check_scales, check_tensor
from .errors import GpuKernelError
from .launch import Tile, launch
from .quantise import row_scale, to_codes


@triton.jit
def _head_norm(a, b, weight, eps, HALF: tl.constexpr):
    """RMSNorm over heads whose halves are a and b [heads, HALF], with one gain for all of them."""
    half = tl.arange(0, HALF)
    inverse = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)[:, None]
    gain_a = tl.load(weight + half).to(tl.float32)[None, :]
    gain_b = tl.load(weight + HALF + half).to(tl.float32)[None, :]
    return a * inverse * gain_a, b * inverse * gain_b


@triton.jit
def _write_head(a, b, pages, scales, row, HALF: tl.constexpr):
    """Writes one head, halves a and b [1, HALF] in fp32, as row `row` of the pages."""
    at = pages + row * (2 * HALF) + tl.arange(0, HALF)[None, :]
    if scales is not None:
        largest = tl.maximum(tl.max(tl.abs(a), 1), tl.max(tl.abs(b), 1))
        scale = row_scale(largest, pages.dtype.element_ty)
        tl.store(scales + row + tl.arange(0, 1), scale)
        tl.store(at, to_codes(a, scale[:, None], pages.dtype.element_ty))
        tl.store(at + HALF, to_codes(b, scale[:, None], pages.dtype.element_ty))
    else:
        tl.store(at, a.to(pages.dtype.element_ty))
        tl.store(at + HALF, b.to(pages.dtype.element_ty))


@triton.jit
def _rope_write_kernel(
    qkv,
    cos_sin,
    positions,
    slots,
    q_out,
    k_pages,
    v_pages,
    k_scales,
    v_scales,
    q_norm,
    k_norm,
    eps,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
):
    DIM: tl.constexpr = 2 * HALF
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    half = tl.arange(0, HALF)[None, :]
    angle = cos_sin + tl.load(positions + token).to(tl.int64) * DIM + half
    cos = tl.load(angle)
    sin = tl.load(angle + HALF)
    heads = qkv + token * (KV_HEADS * (GROUP + 2) * DIM)

    member = tl.arange(0, GROUP_ROWS)[:, None]
    at = (head * GROUP + member) * DIM + half
    a = tl.load(heads + at, mask=member < GROUP, other=0.0).to(tl.float32)
    b = tl.load(heads + at + HALF, mask=member < GROUP, other=0.0).to(tl.float32)
    if q_norm is not None:
        a, b = _head_norm(a, b, q_norm, eps, HALF)
    target = q_out + token * (KV_HEADS * GROUP * DIM) + at
    tl.store(target, (a * cos - b * sin).to(q_out.dtype.element_ty), mask=member < GROUP)
    tl.store(target + HALF, (b * cos + a * sin).to(q_out.dtype.element_ty), mask=member < GROUP)

    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        row = ((slot // PAGE) * KV_HEADS + head) * PAGE + slot % PAGE
        at_k = heads + (KV_HEADS * GROUP + head) * DIM + half
        k_a = tl.load(at_k).to(tl.float32)
        k_b = tl.load(at_k + HALF).to(tl.float32)
        if k_norm is not None:
            k_a, k_b = _head_norm(k_a, k_b, k_norm, eps, HALF)
        _write_head(k_a * cos - k_b * sin, k_b * cos + k_a * sin, k_pages, k_scales, row, HALF)
        at_v = heads + (KV_HEADS * (GROUP + 1) + head) * DIM + half
        _write_head(tl.load(at_v).to(tl.float32), tl.load(at_v + HALF).to(tl.float32), v_pages, v_scales, row, HALF)


def rope_and_write(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    q_out: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    *,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """Rotates queries into q_out [tokens, heads, dim]; rotates keys and writes them and the values to their pages.

    qkv [tokens, (heads + 2 kv_heads) * dim]: all queries, then keys, then values. cos_sin [positions, dim] fp32:
    cosines, then sines; the first half of a head is rotated with the second. positions [tokens] int32, each a row of
    cos_sin. slots [tokens] int64: page * page size + slot within the page; a negative one is padding and writes
    nothing. k_pages, v_pages [pages, kv_heads, page size, dim]: of qkv's type, or int8 or fp8 with fp32 scales
    [pages, kv_heads, page size]. q_norm, k_norm [dim]: gains of a norm over each head before the rotation, with `eps`
    (Qwen 3). Returns q_out.
    """
    check_tensor("k_pages", k_pages, ("pages", "kv_heads", "page", "dim"), (qkv.dtype, *EIGHT_BIT))
    pages, kv_heads, page, dim = k_pages.shape
    check_power_of_two("dim of k_pages", dim, 16, 256)
    check_power_of_two("page size of k_pages", page, 16, 256)
    check_tensor("v_pages", v_pages, (pages, kv_heads, page, dim), (k_pages.dtype,))
    check_scales("k_scales", k_scales, k_pages, (pages, kv_heads, page))
    check_scales("v_scales", v_scales, v_pages, (pages, kv_heads, page))
    check_tensor("qkv", qkv, ("tokens", "(heads + 2 kv_heads) * dim"), FLOATS)
    tokens = qkv.shape[0]
    check_tensor("q_out", q_out, (tokens, "heads", dim), (qkv.dtype,))
    heads = q_out.shape[1]
    if heads % kv_heads or not 1 <= heads // kv_heads <= 16:
        raise GpuKernelError(f"q_out has {heads} heads for {kv_heads} of keys; it must be 1 to 16 times as many")
    check_tensor("qkv", qkv, (tokens, (heads + 2 * kv_heads) * dim), FLOATS)
    check_tensor("cos_sin", cos_sin, ("positions", dim), (torch.float32,))
    check_tensor("positions", positions, (tokens,), (torch.int32,))
    check_tensor("slots", slots, (tokens,), (torch.int64,))
    for name, gain in (("q_norm", q_norm), ("k_norm", k_norm)):
        if gain is not None:
            check_tensor(name, gain, (dim,), FLOATS)
    group = heads // kv_heads
    launch(
        _rope_write_kernel,
        (tokens, kv_heads),
        Tile({"GROUP_ROWS": triton.next_power_of_2(group)}, num_warps=1 if group * dim <= 512 else 2),
        qkv=qkv,
        cos_sin=cos_sin,
        positions=positions,
        slots=slots,
        q_out=q_out,
        k_pages=k_pages,
        v_pages=v_pages,
        k_scales=k_scales,
        v_scales=v_scales,
        q_norm=q_norm,
        k_norm=k_norm,
        eps=eps,
        KV_HEADS=kv_heads,
        GROUP=group,
        HALF=dim // 2,
        PAGE=page,
    )
    return q_out
