"""Which tile is fast on this device: candidates, each timed as serving meets it, the best kept as data."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from busload_kernels.gpu.decode_attention import decode_attention
from busload_kernels.gpu.launch import Tile
from busload_kernels.gpu.linear import linear
from busload_kernels.gpu.prefill_attention import prefill_attention, prefill_work
from busload_kernels.gpu.tiles import table_names

from . import cases
from .cases import FORMATS, SPLIT
from .measure import copies_for
from .place import BF16, FP32, INT8, TOLERANCE, Matrix, Place, matrix, paged, relative_error
from .shapes import LARGE, SMALL

TUNED = ("w8a16 int8", "w8a16 fp8", "w16a16 bf16", "w4a16 int4")
"""Formats of weights that are served, most used first: a sweep that is cut off has done those."""
ROWS = (16, 64, 256, 0)
"""Upper ends of the table's ranges of rows; 0: all above."""
_MANY_ROWS = 1024
_MULTIPROCESSORS = 132
KV_HEADS, GROUP = 8, 4


@dataclass(frozen=True)
class Task:
    """One line of a table: what is asked for, and the tiles that may answer."""

    kernel: str
    key: dict[str, Any]
    """What an entry of the table matches by."""
    tiles: tuple[Tile, ...]
    prepare: Callable[[Place, int], tuple[Callable[[Tile, int], torch.Tensor], Callable[[torch.Tensor], float]]]
    """(place, copies) -> a call with a tile and the number of an operand, and how wrong its result is."""
    num_bytes: int
    """Of an operand that a step reads once."""
    tolerance: float

    @property
    def name(self) -> str:
        return f"{self.kernel} " + ", ".join(f"{name} {value}" for name, value in self.key.items())

    @property
    def copies(self) -> int:
        return copies_for(self.num_bytes)


def tasks() -> list[Task]:
    linears = {task.name: task for task in _linears()}
    return [*_decodes(), *_prefills(), *linears.values()]


def _linears() -> Iterator[Task]:
    for form, rows, shape in itertools.product(TUNED, ROWS, (LARGE, SMALL)):
        for _, n, k, gated in shape.linears():
            if n == shape.vocab and rows not in (16, 64):
                continue  # logits are for rows that draw, not for prompts
            yield _linear(form, rows, n, k, gated)


def _linear(form: str, rows: int, n: int, k: int, gated: bool) -> Task:
    kind, name = form.split()
    x_type, w_type = FORMATS[form]
    asked = rows or _MANY_ROWS

    def prepare(
        place: Place, copies: int
    ) -> tuple[Callable[[Tile, int], torch.Tensor], Callable[[torch.Tensor], float]]:
        x = matrix(place, asked, k, x_type)
        weights = [matrix(place, n, k, w_type) for _ in range(1 if copies == 1 else 2)]
        # More copies need no more randomness: only their addresses count.
        weights += [twin(weights[0]) for _ in range(copies - len(weights))]
        out = torch.empty((asked, n // 2 if gated else n), dtype=BF16, device=place.device)
        sums = torch.empty(8 * asked * n if asked <= 64 else 2 * asked * n, dtype=FP32, device=place.device)

        def call(tile: Tile, number: int) -> torch.Tensor:
            w = weights[number % len(weights)]
            return linear(x.codes, w.codes, out, tile, x_scales=x.scales, w_scales=w.scales, gated=gated, partial=sums)

        def error(found: torch.Tensor) -> float:
            expected = x.value() @ weights[0].value().T
            if gated:
                expected = torch.nn.functional.silu(expected[:, ::2]) * expected[:, 1::2]
            return relative_error(found, expected)

        return call, error

    key: dict[str, Any] = {"format": kind, "dtype": name, "n": n, "k": k}
    if rows:
        key["rows"] = rows
    size = {"int4": 0.5, "bf16": 2.0}.get(name, 1.0)
    return Task("linear", key, tuple(_linear_tiles(form, asked, n, k)), prepare, int(n * k * size), TOLERANCE[BF16])


def twin(source: Matrix) -> Matrix:
    """The same at another address."""
    return Matrix(source.codes.clone(), None if source.scales is None else source.scales.clone())


def _linear_tiles(form: str, rows: int, n: int, k: int) -> Iterator[Tile]:
    """Tiles that give every multiprocessor work, fit its memory and leave the pipeline something to load ahead."""
    x_type, w_type = FORMATS[form]
    four_bits = form.startswith("w4")
    if rows <= 16:
        inner = (64, 128) if w_type == BF16 else (128, 256)
        shapes = itertools.product((16,), (32, 64, 128), inner, (1, 2, 4, 8), (4,), (4,))
    elif rows <= 64:
        shapes = itertools.product((64,), (64, 128), (64, 128), (1, 2, 4), (4,), (3, 4))
    elif rows <= 256:
        shapes = itertools.product((64, 128), (64, 128), (64, 128), (1, 2), (4, 8), (3,))
    else:
        shapes = itertools.product((64, 128), (128, 256), (64,), (1,), (4, 8), (3, 4))
    seen = set()
    for bm, bn, bk, split, warps, stages in shapes:
        programs = math.ceil(rows / bm) * math.ceil(n / bn) * split
        weights = bn * bk * (0.5 if four_bits else w_type.itemsize)
        too_few = programs < 0.75 * _MULTIPROCESSORS and split < 4
        if too_few or (split > 1 and programs > 16 * _MULTIPROCESSORS) or k // split < 2 * bk:
            continue
        results = bm * bn // (32 * warps)  # that each thread holds
        if (bm * bk * x_type.itemsize + weights) * stages > 200 * 1024 or not 4 <= results <= 128:
            continue
        if rows > 64 and results < 32:
            continue
        sizes = {"BM": bm, "BN": bn, "SPLIT_K": split} | ({} if four_bits else {"BK": bk})
        tile = Tile(sizes, warps, stages)
        if repr(tile) not in seen:
            seen.add(repr(tile))
            yield tile


Prepared = tuple[Callable[[Tile, int], torch.Tensor], Callable[[torch.Tensor], float]]


def _attention_tasks(
    kernel: str, tiles: list[Tile], prepare: Callable[[int, torch.dtype, Place, int], Prepared], tokens: int
) -> Iterator[Task]:
    """By head dimension and size of the cache's numbers; `tokens` are cached and read."""
    for dim, cache in itertools.product((128, 64), (INT8, BF16)):
        key = {"dim": dim, "cache_bits": 8 * cache.itemsize}
        read = 2 * tokens * KV_HEADS * (dim * cache.itemsize + 4)
        yield Task(kernel, key, tuple(tiles), partial(prepare, dim, cache), read, TOLERANCE[BF16])


def _decodes() -> Iterator[Task]:
    tiles = [
        Tile({"TILE": tile}, warps, stages)
        for tile, warps, stages in itertools.product((16, 32, 64), (4, 8), (2, 4, 5))
    ]
    return _attention_tasks("decode_attention", tiles, _decode, 32 * 2048)


def _decode(dim: int, cache: torch.dtype, place: Place, copies: int) -> Prepared:
    """32 requests of 2048 tokens; one copy is enough to be out of the second-level cache."""
    lengths, heads = (2048,) * 32, KV_HEADS * GROUP
    caches = paged(place, lengths, KV_HEADS, dim, cache)
    q, out = place.normal(32, heads, dim, dtype=BF16), place.poisoned(32, heads, dim, dtype=BF16)
    buffers = cases.decode_buffers(lengths, heads, dim, place)

    def call(tile: Tile, _: int) -> torch.Tensor:
        return decode_attention(
            q,
            caches.k_pages,
            caches.v_pages,
            caches.tables,
            caches.lengths,
            dim**-0.5,
            out,
            buffers,
            SPLIT,
            tile,
            min(256, len(buffers.work)),
            **caches.scales,
        )

    def error(found: torch.Tensor) -> float:
        return relative_error(found[:1], cases.attend(q[:1], *caches.read(0, lengths[0]), dim**-0.5))

    return call, error


PREFILL_ROWS = (64, 128)


def _prefills() -> Iterator[Task]:
    tiles = [
        Tile({"ROWS": rows, "TILE": tile}, warps, stages)
        for rows, tile, warps, stages in itertools.product(PREFILL_ROWS, (32, 64), (4, 8), (2, 4, 5))
    ]
    return _attention_tasks("prefill_attention", tiles, _prefill, 4 * 1024)


def _prefill(dim: int, cache: torch.dtype, place: Place, copies: int) -> Prepared:
    """4 pieces of 512 tokens behind 512 cached ones."""
    queries, lengths, heads = (512,) * 4, (1024,) * 4, KV_HEADS * GROUP
    caches = paged(place, lengths, KV_HEADS, dim, cache)
    tokens = sum(queries)
    q, out = place.normal(tokens, heads, dim, dtype=BF16), place.poisoned(tokens, heads, dim, dtype=BF16)
    starts = place.put([512 * piece for piece in range(5)])
    # Lists of work by the rows of a tile: made before anything is captured.
    work = {rows: place.put(prefill_work(queries, GROUP, Tile({"ROWS": rows}))) for rows in PREFILL_ROWS}

    def call(tile: Tile, _: int) -> torch.Tensor:
        return prefill_attention(
            q,
            caches.k_pages,
            caches.v_pages,
            caches.tables,
            caches.lengths,
            starts,
            work[tile.sizes["ROWS"]],
            dim**-0.5,
            out,
            tile,
            **caches.scales,
        )

    def error(found: torch.Tensor) -> float:
        return relative_error(found[:512], cases.attend(q[:512], *caches.read(0, 1024), dim**-0.5))

    return call, error


def entry(task: Task, tile: Tile) -> dict[str, Any]:
    """A line of a table."""
    return {**task.key, "sizes": dict(tile.sizes), "num_warps": tile.num_warps, "num_stages": tile.num_stages}


def keep(folder: Path, device: str, kernel: str, new: dict[str, Any]) -> Path:
    """Puts an entry into the table of this device and version of Triton, in place of one with the same key."""
    file = folder / table_names(device)[0]
    table: dict[str, list[dict[str, Any]]] = json.loads(file.read_text()) if file.exists() else {}
    rest = [old for old in table.get(kernel, []) if _key(old) != _key(new)]
    table[kernel] = [*rest, new]
    lines = ",\n".join(
        f'  "{name}": [\n' + ",\n".join(f"    {json.dumps(one)}" for one in entries) + "\n  ]"
        for name, entries in sorted(table.items())
    )
    part = file.with_suffix(".part")
    part.write_text("{\n" + lines + "\n}\n")
    part.replace(file)
    return file


def _key(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name not in ("sizes", "num_warps", "num_stages")}


def shown(tile: Tile) -> str:
    sizes = " ".join(f"{name} {size}" for name, size in tile.sizes.items())
    return f"{sizes} warps {tile.num_warps} stages {tile.num_stages}"
