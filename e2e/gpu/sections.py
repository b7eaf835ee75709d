"""The sections of the check, each a list of units that run one after another and give rows of a table."""

from __future__ import annotations

import itertools
import platform
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from busload_kernels.gpu.launch import Tile
from busload_kernels.gpu.linear import linear
from busload_kernels.gpu.tiles import tile_for

from . import cases, measure, serve, tune
from .place import BF16, INT8, SHORT, Place, matrix, paged
from .shapes import LARGE, SMALL, Shape

Row = dict[str, Any]
BATCHES = (1, 8, 32, 128)


@dataclass
class Context:
    """What units need to know."""

    place: Place
    bandwidth: float
    """Of a copy on this device, bytes per second, read plus write; 0 until it is measured."""
    tables: Path
    """Folder of the tables of tiles that the sweep writes."""


@dataclass(frozen=True)
class Unit:
    name: str
    run: Callable[[Context], Iterable[Row]]


@dataclass(frozen=True)
class Section:
    name: str
    title: str
    seconds: int
    """It is ended after so many, with what it has, plus what earlier sections left."""
    units: Callable[[], list[Unit]]
    processes: int = 1
    """That share its units: more than one where nothing is timed."""


def sections(cpus: int) -> list[Section]:
    many = max(1, min(14, cpus - 2))
    return [
        Section("device", "Device and its copy bandwidth", 25, device_units),
        Section("correctness", "Every kernel against plain torch in fp32", 100, correctness_units, many),
        Section("compile", "Candidates of the sweep, compiled", 100, compile_units, many),
        Section("sweep", "Tiles: the fastest of the candidates", 120, sweep_units),
        Section("floors", "Graph replays against byte floors", 60, floor_units),
        Section("serve", "Tokens per second of random-weight models", 165, serve_units),
    ]


def _that_run(units: list[Unit]) -> list[Unit]:
    """Without those in fp8 on a GPU that has none (below compute capability 8.9)."""
    old = torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9)
    return [unit for unit in units if not (old and "fp8" in unit.name)]


def device_units() -> list[Unit]:
    return [Unit("device", _device)]


def _device(context: Context) -> list[Row]:
    device = context.place.device
    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    return [
        {
            "device": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_gib": total / 2**30,
            "free_gib": free / 2**30,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "triton": triton.__version__,
            "python": platform.python_version(),
            "copy_bandwidth": measure.copy_bandwidth(device),
        }
    ]


def correctness_units() -> list[Unit]:
    return _that_run([Unit(f"{case.kernel} {case.name}", partial(_check, case)) for case in cases.cases()])


def _check(case: cases.Case, context: Context) -> list[Row]:
    work = case.make(context.place)
    error = work.error(work.call())
    again = work.error(work.call())
    return [
        {
            "kernel": case.kernel,
            "case": case.name,
            "relative_error": error,
            "tolerance": case.tolerance,
            # Written so that NaN fails; a second run must give the same: nothing depends on what was there before.
            "passed": error <= case.tolerance and again <= case.tolerance,
        }
    ]


def compile_units() -> list[Unit]:
    return _that_run([Unit(task.name, partial(_compile, task)) for task in tune.tasks()])


def _compile(task: tune.Task, context: Context) -> list[Row]:
    """Into Triton's cache on disk, where the sweep finds it."""
    call, _ = task.prepare(context.place, 1)
    failed = [tune.shown(tile) for tile in task.tiles if _problem(call, tile) is not None]
    return [{"task": task.name, "tiles": len(task.tiles), "do_not_compile": failed}]


def _problem(call: Callable[[Tile, int], torch.Tensor], tile: Tile) -> str | None:
    try:
        call(tile, 0)
        torch.cuda.synchronize()
    except (triton.runtime.errors.OutOfResources, triton.compiler.errors.CompilationError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def sweep_units() -> list[Unit]:
    return _that_run([Unit(task.name, partial(_sweep, task)) for task in tune.tasks()])


def _sweep(task: tune.Task, context: Context) -> list[Row]:
    """The fastest tile whose result is right."""
    call, error = task.prepare(context.place, task.copies)
    timed = []
    for tile in task.tiles:
        if _problem(call, tile) is None:
            calls = [partial(call, tile, number) for number in range(task.copies)]
            timed.append((measure.replayed(calls, replays=3), tile))
    timed.sort(key=lambda pair: pair[0])
    for seconds, tile in timed:
        if error(call(tile, 0)) <= task.tolerance:
            tune.keep(context.tables, context.place.name, task.kernel, tune.entry(task, tile))
            shape = {name: value for name, value in task.key.items() if name != "rows"}
            before = _now_in_use(task, context.place.name, timed)
            return [
                {
                    "kernel": task.kernel,
                    "shape": " ".join(str(value) for value in shape.values()),
                    "rows": task.key.get("rows", "more"),
                    "microseconds": seconds * 1e6,
                    "gb_per_second": task.num_bytes / seconds / 1e9,
                    "tile": tune.shown(tile),
                    "candidates": len(timed),
                    "times_default": None if before is None else before / seconds,
                }
            ]
    raise RuntimeError(f"{task.name}: none of {len(task.tiles)} tiles is right")


def _now_in_use(task: tune.Task, device: str, timed: list[tuple[float, Tile]]) -> float | None:
    """Seconds of the tile that the tables gave before, if it was among the candidates."""
    key = dict(task.key)
    rows = key.pop("rows", 2**20 if task.kernel == "linear" else 0)
    default = tile_for(task.kernel, "default", rows=rows, **key)
    return next((seconds for seconds, tile in timed if tune.shown(tile) == tune.shown(default)), None)


def floor_units() -> list[Unit]:
    units = []
    for shape, form in itertools.product((LARGE, SMALL), ("w8a16 int8", "w8a16 fp8", "w16a16 bf16", "w4a16 int4")):
        for name, n, k, gated in shape.linears():
            for rows in (1, 16, 512):
                if not (name == "logits" and rows == 512):
                    units.append(
                        Unit(
                            f"{shape.name} {name} {form} {rows}", partial(_linear, shape, name, form, rows, n, k, gated)
                        )
                    )
    for batch, length in ((1, 8192), (8, 4096), (32, 4096), (128, 2048)):
        for cache in (INT8, BF16):
            units.append(Unit(f"decode {batch} x {length} {SHORT[cache]}", partial(_decode, batch, length, cache)))
    units.append(Unit("sampling", _sampling))
    # What decides at batch 1 first.
    return sorted(_that_run(units), key=lambda unit: unit.name.endswith(" 512"))


def _linear(shape: Shape, name: str, form: str, rows: int, n: int, k: int, gated: bool, context: Context) -> list[Row]:
    place = context.place
    x_type, w_type = cases.FORMATS[form]
    x = matrix(place, rows, k, x_type)
    weights = [matrix(place, n, k, w_type)]
    weights += [tune.twin(weights[0]) for _ in range(measure.copies_for(weights[0].num_bytes) - 1)]
    out = torch.empty((rows, n // 2 if gated else n), dtype=BF16, device=place.device)
    tile = cases.linear_tile(place, form, rows, n, k)
    sums = torch.empty(tile.sizes["SPLIT_K"] * rows * n, dtype=torch.float32, device=place.device)
    calls = [
        partial(linear, x.codes, w.codes, out, tile, x_scales=x.scales, w_scales=w.scales, gated=gated, partial=sums)
        for w in weights
    ]
    seconds = measure.replayed(calls)
    moved = weights[0].num_bytes + x.num_bytes + int(out.nbytes)
    row = {
        "what": f"{shape.name} {name}",
        "format": form,
        "rows": rows,
        "microseconds": seconds * 1e6,
        "gb_per_second": moved / seconds / 1e9,
        "share_of_copy": moved / seconds / context.bandwidth,
        "tflop_per_second": 2 * rows * n * k / seconds / 1e12,
    }
    if rows >= 512:
        dense = torch.empty((n, k), dtype=BF16, device=place.device).normal_()
        product = torch.empty((rows, n), dtype=BF16, device=place.device)
        half = x.codes.to(BF16)
        library = measure.replayed([lambda: torch.mm(half, dense.T, out=product)] * 4)
        row["share_of_cublas"] = library / seconds
    return [row]


def _decode(batch: int, length: int, cache: torch.dtype, context: Context) -> list[Row]:
    place, dim, kv_heads, heads = context.place, 128, 8, 32
    lengths = (length,) * batch
    one = 2 * batch * length * kv_heads * (dim * cache.itemsize + (4 if cache == INT8 else 0))
    caches = [paged(place, lengths, kv_heads, dim, cache) for _ in range(min(8, measure.copies_for(one)))]
    work = [cases.decode_over(each, lengths, kv_heads, dim, heads // kv_heads, BF16, place) for each in caches]
    seconds = measure.replayed([each.call for each in work])
    moved = caches[0].num_bytes
    return [
        {
            "what": f"KV read, {batch} x {length} tokens, {kv_heads} heads of {dim}",
            "format": SHORT[cache],
            "rows": batch,
            "microseconds": seconds * 1e6,
            "gb_per_second": moved / seconds / 1e9,
            "share_of_copy": moved / seconds / context.bandwidth,
        }
    ]


def _sampling(context: Context) -> list[Row]:
    work = cases.draw(SMALL.vocab, False, context.place)
    seconds = measure.replayed([work.call] * 4)
    return [{"what": f"sampling, {SMALL.vocab} tokens", "format": "mixed", "rows": 64, "microseconds": seconds * 1e6}]


def serve_units() -> list[Unit]:
    runs = [(LARGE, "int8"), (SMALL, "int8"), (LARGE, "bf16"), (SMALL, "bf16"), (LARGE, "fp8"), (SMALL, "fp8")]
    return _that_run(
        [Unit(f"{shape.name} {precision}", partial(_serve, shape, precision)) for shape, precision in runs]
    )


def _serve(shape: Shape, precision: str, context: Context) -> Iterator[Row]:
    """Each batch as soon as it is measured: what is cut off loses only the rest."""
    steps = 20
    server = serve.Server(shape, precision, max(BATCHES), steps + 8, context.place.device.type)
    for batch in BATCHES:
        yield server.measure(batch, steps, context.bandwidth)
    for batch in (BATCHES[0], BATCHES[-1]):
        yield {
            "model": shape.name,
            "weights": precision,
            "batch": batch,
            "device_busy": server.busy_share(batch, ahead=1),
            "device_busy_one_by_one": server.busy_share(batch, ahead=0),
        }
