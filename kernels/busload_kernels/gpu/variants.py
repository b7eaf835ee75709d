"""The kernel variants that serving meets, and what their machine code must look like.

Each is made by calling the wrapper that serving calls, with tensors that have a shape and no data, and the tile that
the tables give. `gate.py` compiles them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from .decode_attention import DecodeBuffers, decode_attention
from .launch import Launch, recording
from .linear import linear
from .norm import rms_norm
from .prefill_attention import prefill_attention
from .rope_write import rope_and_write
from .sampling import SamplingBuffers, sample
from .tiles import tile_for

TENSOR_CORE = r"(HMMA|IMMA|QMMA|HGMMA|IGMMA|QGMMA|UTC\w*MMA)\b"
WARP_GROUP_TENSOR_CORE = r"(HGMMA|IGMMA|QGMMA|UTC\w*MMA)\b"
WIDE_ASYNC_COPY = r"LDGSTS\.E(\.BYPASS)?(\.\w+)*\.(64|128)"
WIDE_LOAD = r"LDG\.E(\.\w+)*\.(64|128)"

BF16, FP16, INT8, FP8, FP32 = torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn, torch.float32
SHORT = {BF16: "bf16", FP16: "fp16", INT8: "int8", FP8: "fp8", FP32: "fp32"}
PAGE, SPLIT, KV_HEADS = 64, 512, 8
INT4_GROUP = 128


@dataclass(frozen=True, slots=True)
class Variant:
    name: str
    kernel: str
    """Which of the launches it is about."""
    call: Callable[[], object]
    registers: int
    """Budget for a thread."""
    needs: tuple[str, ...] = ()
    """Regular expressions of instructions; some of each must be there."""
    needs_on_sm_90: tuple[str, ...] = ()
    core: bool = False
    """Compiled by default, and for every compute capability; the others on request."""

    def launch(self) -> Launch:
        with recording() as launches:
            self.call()
        (found,) = (launch for launch in launches if launch.kernel.__name__ == self.kernel)
        return found


def all_variants() -> list[Variant]:
    return [*norms(), *rope_writes(), *decodes(), *prefills(), *linears(), *samplings()]


def norms() -> Iterator[Variant]:
    for hidden in (576, 4096, 8192):
        for dtype, out in ((BF16, BF16), (FP16, FP16), (BF16, INT8), (BF16, FP8)):
            yield Variant(
                f"hidden {hidden}, {SHORT[dtype]} to {SHORT[out]}",
                "_rms_norm_kernel",
                partial(norm, hidden, dtype, out),
                registers=96,
                needs=(WIDE_LOAD,) if hidden > 576 else (),
                core=hidden == 4096 and dtype == BF16,
            )


def norm(hidden: int, dtype: torch.dtype, out: torch.dtype) -> None:
    rms_norm(
        empty(32, hidden, dtype=dtype),
        empty(hidden, dtype=dtype),
        1e-5,
        empty(32, hidden, dtype=out),
        residual=empty(32, hidden, dtype=dtype),
        scales=empty(32, dtype=FP32) if out in (INT8, FP8) else None,
    )


def rope_writes() -> Iterator[Variant]:
    for dim, group, cache, head_norm in attention_shapes(head_norms=True):
        yield Variant(
            f"dim {dim}, group {group}, cache {SHORT[cache]}{', head norm' if head_norm else ''}",
            "_rope_write_kernel",
            partial(rope_write, dim, group, cache, head_norm),
            registers=96,
            core=group == 4 and dim == 128 and cache != FP16,
        )


def rope_write(dim: int, group: int, cache: torch.dtype, head_norm: bool) -> None:
    dtype = activations(cache)
    gain = empty(dim, dtype=dtype) if head_norm else None
    rope_and_write(
        empty(32, KV_HEADS * (group + 2) * dim, dtype=dtype),
        empty(4096, dim, dtype=FP32),
        empty(32, dtype=torch.int32),
        empty(32, dtype=torch.int64),
        empty(32, KV_HEADS * group, dim, dtype=dtype),
        *pages(dim, cache),
        k_scales=scales(cache),
        v_scales=scales(cache),
        q_norm=gain,
        k_norm=gain,
        eps=1e-6,
    )


def decodes() -> Iterator[Variant]:
    for dim, group, cache, _ in attention_shapes():
        yield Variant(
            f"dim {dim}, group {group}, cache {SHORT[cache]}",
            "_decode_kernel",
            partial(decode, dim, group, cache),
            registers=240 if cache in (INT8, FP8) else 176,
            needs=(TENSOR_CORE, WIDE_ASYNC_COPY),
            core=(dim == 128 and group == 4 and cache != FP16) or (dim == 64 and group == 3 and cache == INT8),
        )
    for dim in (64, 128):
        yield Variant(
            f"dim {dim}",
            "_reduce_kernel",
            partial(decode, dim, 4, BF16),
            registers=64,
            needs=(WIDE_LOAD,),
            core=dim == 128,
        )


def decode(dim: int, group: int, cache: torch.dtype) -> None:
    heads, dtype = KV_HEADS * group, activations(cache)
    decode_attention(
        empty(32, heads, dim, dtype=dtype),
        *pages(dim, cache),
        empty(32, 128, dtype=torch.int32),
        empty(32, dtype=torch.int32),
        dim**-0.5,
        empty(32, heads, dim, dtype=dtype),
        DecodeBuffers.allocate(256, 32, heads, dim, "meta"),
        SPLIT,
        tile_for("decode_attention", "default", dim=dim, cache_bits=8 * cache.itemsize),
        256,
        k_scales=scales(cache),
        v_scales=scales(cache),
    )


def prefills() -> Iterator[Variant]:
    for dim, group, cache, _ in attention_shapes():
        yield Variant(
            f"dim {dim}, group {group}, cache {SHORT[cache]}",
            "_prefill_kernel",
            partial(prefill, dim, group, cache),
            registers=255,
            needs=(TENSOR_CORE, WIDE_ASYNC_COPY),
            needs_on_sm_90=(WARP_GROUP_TENSOR_CORE,),
            core=(dim == 128 and group == 4 and cache != FP16) or (dim == 64 and group == 3 and cache == INT8),
        )


def prefill(dim: int, group: int, cache: torch.dtype) -> None:
    heads, dtype = KV_HEADS * group, activations(cache)
    prefill_attention(
        empty(512, heads, dim, dtype=dtype),
        *pages(dim, cache),
        empty(4, 128, dtype=torch.int32),
        empty(4, dtype=torch.int32),
        empty(5, dtype=torch.int32),
        empty(32, 2, dtype=torch.int32),
        dim**-0.5,
        empty(512, heads, dim, dtype=dtype),
        tile_for("prefill_attention", "default", dim=dim, cache_bits=8 * cache.itemsize),
        k_scales=scales(cache),
        v_scales=scales(cache),
    )


FORMATS = {
    "w16a16 bf16": (BF16, BF16),
    "w16a16 fp16": (FP16, FP16),
    "w8a16 int8": (BF16, INT8),
    "w8a16 fp8": (BF16, FP8),
    "w8a8 int8": (INT8, INT8),
    "w8a8 fp8": (FP8, FP8),
    "w4a16 bf16": (BF16, torch.uint8),
}
LAYERS = {
    "4096 to 4096": (4096, 4096, False),
    "4096 to gated 14336": (4096, 28672, True),
    "576 to gated 1536": (576, 3072, True),
}


def linears() -> Iterator[Variant]:
    for name, (x, w) in FORMATS.items():
        for shape, (k, n, gated) in LAYERS.items():
            if w == torch.uint8 and k % INT4_GROUP:
                continue
            for rows in (16, 64, 512):
                yield Variant(
                    f"{name}, {shape}, {rows} rows",
                    "_linear_w4_kernel" if w == torch.uint8 else "_linear_kernel",
                    partial(linear_layer, name.split()[0], x, w, rows, k, n, gated),
                    registers={16: 144, 64: 176, 512: 255}[rows],
                    needs=(TENSOR_CORE, WIDE_ASYNC_COPY),
                    needs_on_sm_90=(WARP_GROUP_TENSOR_CORE,),
                    core=k == n and rows != 64 and x != FP16,
                )
    for gated in (False, True):
        yield Variant(
            f"4096, {'gated' if gated else 'plain'}",
            "_join_kernel",
            partial(linear_layer, "w8a8", INT8, INT8, 16, 4096, 4096, gated),
            registers=64,
            needs=(WIDE_LOAD,),
            core=gated,
        )


def linear_layer(form: str, x: torch.dtype, w: torch.dtype, rows: int, k: int, n: int, gated: bool) -> None:
    tile = tile_for("linear", "default", rows=rows, format=form)
    four_bits, eight_bits = w == torch.uint8, w in (INT8, FP8)
    linear(
        empty(rows, k, dtype=x),
        empty(n, k // 2 if four_bits else k, dtype=w),
        empty(rows, n // 2 if gated else n, dtype=BF16 if x in (INT8, FP8) else x),
        tile,
        x_scales=empty(rows, dtype=FP32) if x in (INT8, FP8) else None,
        w_scales=empty(n, k // INT4_GROUP, dtype=x) if four_bits else empty(n, dtype=FP32) if eight_bits else None,
        gated=gated,
        partial=empty(tile.sizes["SPLIT_K"] * rows * n, dtype=FP32),
    )


def samplings() -> Iterator[Variant]:
    for vocab in (49152, 128256, 151936):
        for kernel, budget in (("_threshold_kernel", 128), ("_candidate_kernel", 128), ("_winner_kernel", 64)):
            for dtype in (FP32, BF16):
                yield Variant(
                    f"vocabulary {vocab}, {SHORT[dtype]}",
                    kernel,
                    partial(sampling, vocab, dtype),
                    registers=budget,
                    needs=(WIDE_LOAD,) if kernel == "_candidate_kernel" else (),
                    core=vocab == 128256 and dtype == FP32,
                )


def sampling(vocab: int, dtype: torch.dtype) -> None:
    sample(empty(32, vocab, dtype=dtype), SamplingBuffers.allocate(32, vocab, "meta"), empty(32, dtype=torch.int32))


def activations(cache: torch.dtype) -> torch.dtype:
    """What activations are beside a cache of this type."""
    return FP16 if cache == FP16 else BF16


def attention_shapes(head_norms: bool = False) -> Iterator[tuple[int, int, torch.dtype, bool]]:
    """Head dimension, group, cache type, norms of heads: SmolLM2 is 64 and 3, Llama 3 and Mistral 128 and 4, Qwen 3 128
    and 2 to 8 with norms."""
    for dim in (64, 128):
        for group in (1, 3, 4, 8):
            for cache in (BF16, FP16, INT8, FP8):
                yield dim, group, cache, False
                if head_norms and dim == 128 and group != 3:
                    yield dim, group, cache, True


def pages(dim: int, cache: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    return empty(1024, KV_HEADS, PAGE, dim, dtype=cache), empty(1024, KV_HEADS, PAGE, dim, dtype=cache)


def scales(cache: torch.dtype) -> torch.Tensor | None:
    return empty(1024, KV_HEADS, PAGE, dtype=FP32) if cache in (INT8, FP8) else None


def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor without data."""
    return torch.empty(shape, dtype=dtype, device="meta")
