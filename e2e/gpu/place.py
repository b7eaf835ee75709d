"""Tensors of the check: where they are, what they hold, and how far apart two of them are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from busload_kernels.gpu.linear import pack_int4
from busload_runtime.executors.torch_model.quantise import quantise_rows, unpack_int4

BF16, FP16, FP32, INT8, FP8, INT4 = (
    torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.float8_e4m3fn, torch.uint8,
)  # fmt: skip
SHORT = {BF16: "bf16", FP16: "fp16", FP32: "fp32", INT8: "int8", FP8: "fp8", INT4: "int4"}
TOLERANCE = {FP32: 1e-5, FP16: 2e-3, BF16: 1e-2}
"""Relative error of a result of this type against a reference in fp32 on the same (dequantised) inputs."""
PAGE, INT4_GROUP = 64, 128


class Place:
    """Makes tensors on a device: `cuda`; `cpu` for the interpreter; `meta` for a dry run, where they hold nothing."""

    def __init__(self, device: str, name: str = "default", seed: int = 0) -> None:
        """`name` is what the tables of tiles know the device by."""
        self.device, self.name = torch.device(device), name
        self._generator = None if device == "meta" else torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = FP32) -> torch.Tensor:
        return torch.randn(shape, device=self.device, generator=self._generator).to(dtype)

    def whole(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """Whole numbers from low to high - 1."""
        return torch.randint(low, high, shape, device=self.device, generator=self._generator, dtype=dtype)

    def shuffled(self, count: int) -> torch.Tensor:
        if self.device.type == "meta":
            return torch.empty(count, dtype=torch.int64, device="meta")
        return torch.randperm(count, device=self.device, generator=self._generator)

    def put(self, values: object, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.as_tensor(values).to(self.device, dtype)

    def poisoned(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory that shows what was not written: NaN, or the code -128, which no kernel writes."""
        if dtype in (INT8, FP8):
            code = -128 if dtype == INT8 else 0x7F
            return torch.full(shape, code, dtype=INT8, device=self.device).view(dtype)
        return torch.full(shape, torch.nan, dtype=dtype, device=self.device)


@dataclass(frozen=True)
class Matrix:
    """A matrix as a kernel takes it."""

    codes: torch.Tensor
    scales: torch.Tensor | None

    def value(self) -> torch.Tensor:
        """[rows, columns] fp32."""
        if self.scales is None:
            return self.codes.float()
        if self.codes.dtype == INT4:
            codes = unpack_int4(self.codes, self.scales.shape[1]).float()
            return (codes * self.scales.float()[..., None]).flatten(1)
        return self.codes.float() * self.scales[:, None]

    @property
    def num_bytes(self) -> int:
        return int(self.codes.nbytes) + (0 if self.scales is None else int(self.scales.nbytes))


def matrix(place: Place, rows: int, columns: int, dtype: torch.dtype, scale_type: torch.dtype = BF16) -> Matrix:
    """Random numbers of `dtype`, with the scales that belong to it; for 4 bits of `scale_type`."""
    if dtype == INT4:
        if place.device.type == "meta":
            codes = torch.empty((rows, columns // 2), dtype=INT4, device="meta")
        else:
            codes = pack_int4(place.whole(-8, 8, rows, columns), INT4_GROUP)
        return Matrix(codes, (place.normal(rows, columns // INT4_GROUP).abs() + 0.1).to(scale_type))
    if dtype in (INT8, FP8):
        return Matrix(*quantise_rows(place.normal(rows, columns), dtype))
    return Matrix(place.normal(rows, columns, dtype=dtype), None)


@dataclass(frozen=True)
class Paged:
    """Keys and values of some sequences in shuffled pages. What no sequence owns is poison."""

    k_pages: torch.Tensor
    v_pages: torch.Tensor
    k_scales: torch.Tensor | None
    v_scales: torch.Tensor | None
    tables: torch.Tensor
    lengths: torch.Tensor
    num_tokens: int

    @property
    def scales(self) -> dict[str, torch.Tensor | None]:
        return {"k_scales": self.k_scales, "v_scales": self.v_scales}

    @property
    def num_bytes(self) -> int:
        """Of the cached tokens alone."""
        _, heads, _, dim = self.k_pages.shape
        each = dim * self.k_pages.dtype.itemsize + (0 if self.k_scales is None else 4)
        return int(2 * self.num_tokens * heads * each)

    def read(self, sequence: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [length, kv_heads, dim] fp32 of a sequence."""
        used = self.tables[sequence, : -(-length // PAGE)].long()
        return (
            _read(self.k_pages, self.k_scales, used)[:length],
            _read(self.v_pages, self.v_scales, used)[:length],
        )


def _read(pages: torch.Tensor, scales: torch.Tensor | None, used: torch.Tensor) -> torch.Tensor:
    eight_bit = pages.dtype.itemsize == 1
    found = (pages.view(INT8)[used].view(pages.dtype) if eight_bit else pages[used]).float()
    if scales is not None:
        found = found * scales[used][..., None]
    return found.transpose(1, 2).flatten(0, 1)


def paged(place: Place, lengths: Sequence[int], kv_heads: int, dim: int, dtype: torch.dtype) -> Paged:
    """Random sequences of these lengths."""
    counts = [-(-length // PAGE) for length in lengths]
    total, width = sum(counts) + 2, max(1, *counts)
    order = place.shuffled(total).to(torch.int32)
    tables = torch.zeros((len(lengths), width), dtype=torch.int32, device=place.device)
    first = 0
    used = []
    for sequence, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        tables[sequence, :count] = order[first : first + count]
        used += [min(PAGE, length - PAGE * page) for page in range(count)]
        first += count
    # Filled slots of each page, in the order of `order`; the two spare pages have none.
    filled = torch.zeros(total, dtype=torch.int32, device=place.device)
    filled.index_copy_(0, order.long(), place.put([*used, 0, 0]))
    owned = torch.arange(PAGE, device=place.device)[None, :] < filled[:, None]
    sides = [_side(place, owned, total, kv_heads, dim, dtype) for _ in range(2)]
    return Paged(sides[0][0], sides[1][0], sides[0][1], sides[1][1], tables, place.put(lengths), sum(lengths))


def _side(
    place: Place, owned: torch.Tensor, total: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    x = place.normal(total, kv_heads, PAGE, dim)
    slots = owned[:, None, :, None].expand(total, kv_heads, PAGE, dim)
    poison = place.poisoned(1, dtype=dtype)
    if dtype not in (INT8, FP8):
        return torch.where(slots, x.to(dtype), poison), None
    codes, scales = quantise_rows(x, dtype)
    codes = torch.where(slots, codes.view(INT8), poison.view(INT8)).view(dtype)
    return codes, torch.where(slots[..., 0], scales, torch.nan)


def relative_error(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """||ours - reference|| / ||reference||; NaN if there is any."""
    wide = reference.double()
    return float((ours.double() - wide).norm() / wide.norm().clamp_min(1e-30))
