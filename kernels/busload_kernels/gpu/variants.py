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
from .norm import rms_norm
from .rope_write import rope_and_write
from .tiles import tile_for

TENSOR_CORE = r"(HMMA|IMMA|QMMA|HGMMA|IGMMA|QGMMA|UTC\w*MMA)\b"
WARP_GROUP_TENSOR_CORE = r"(HGMMA|IGMMA|QGMMA|UTC\w*MMA)\b"
WIDE_ASYNC_COPY = r"LDGSTS\.E(\.BYPASS)?(\.\w+)*\.(64|128)"
WIDE_LOAD = r"LDG\.E(\.\w+)*\.(64|128)"

BF16, FP16, INT8, FP8, FP32 = torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn, torch.float32
SHORT = {BF16: "bf16", FP16: "fp16", INT8: "int8", FP8: "fp8", FP32: "fp32"}
PAGE, SPLIT, KV_HEADS = 64, 512, 8


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
    core: bool = False
    """Compiled by default, and for every compute capability; the others on request."""

    def launch(self) -> Launch:
        with recording() as launches:
            self.call()
        (found,) = (launch for launch in launches if launch.kernel.__name__ == self.kernel)
        return found


def all_variants() -> list[Variant]:
    return [*norms(), *rope_writes(), *decodes()]


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
            registers=232 if cache in (INT8, FP8) else 176,
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
