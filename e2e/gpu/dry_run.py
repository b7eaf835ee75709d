"""Everything but launches: every unit's tensors without data, the launches they would make, a few compiled, a table
written and read back, and a tiny model served by plain torch."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path

from busload_kernels.gpu import tiles
from busload_kernels.gpu.aot import compile_launch
from busload_kernels.gpu.launch import Launch, recording

from . import cases, measure, report, serve, tune
from . import sections as parts
from .place import Place
from .sections import sections
from .shapes import TINY

CAPABILITY = 90


def dry_run(compiles: int) -> int:
    began = time.monotonic()
    place = Place("meta")
    launches: list[Launch] = []
    for case in cases.cases():
        launches += _recorded(case.make(place).call)
    print(f"correctness: {len(cases.cases())} cases, {len(launches)} launches")
    every = tune.tasks()
    for task in every:
        call, _ = task.prepare(place, 2)
        for tile in task.tiles:
            launches += _recorded(lambda call=call, tile=tile: call(tile, 1))
    print(f"sweep: {len(every)} entries, {sum(len(task.tiles) for task in every)} candidates")
    made = _floors(place, launches)
    print(f"floors: {made} rows, and the report of them")
    for section in sections(16):
        print(
            f"  {section.name:<12} {len(section.units()):>4} units, {section.processes} processes, {section.seconds} s"
        )
    _compile(launches, compiles)
    _tables(every)
    _serve()
    print(f"dry run passed in {time.monotonic() - began:.0f} s: nothing was launched")
    return 0


def _floors(place: Place, launches: list[Launch]) -> int:
    """Every row, as if each launch took a microsecond; and what would be reported."""
    replayed = measure.replayed

    def pretended(calls, replays: int = 5) -> float:  # type: ignore[no-untyped-def]
        with recording() as made:
            for call in calls:
                call()
        launches.extend(made[:2])
        return 1e-6

    measure.replayed = pretended
    try:
        context = parts.Context(place, 1e12, Path())
        rows = [row for unit in parts.floor_units() for row in unit.run(context)]
    finally:
        measure.replayed = replayed
    found = {"floors": {"state": "done", "seconds": 1.0, "rows": rows, "failures": []}}
    with tempfile.TemporaryDirectory() as folder:
        report.write(Path(folder), found, {"floors": "Floors"})
        assert len(json.loads((Path(folder) / "results.json").read_text())["floors"]["rows"]) == len(rows)
        assert "not measured" in (Path(folder) / "results.txt").read_text()
    return len(rows)


def _recorded(call) -> list[Launch]:  # type: ignore[no-untyped-def]
    with recording() as made:
        call()
    if not made:
        raise AssertionError("a call that launches nothing")
    return made


def _compile(launches: list[Launch], count: int) -> None:
    """A few, spread over all, for compute capability 9.0."""
    for launch in launches[:: max(1, len(launches) // max(1, count))][:count]:
        code = compile_launch(launch, CAPABILITY)
        print(f"  compiled {launch.kernel.__name__:<24} {code.registers} registers, {code.shared_memory} bytes shared")


def _tables(every: list[tune.Task]) -> None:
    """Each entry is written as the sweep would write it, and found again by what serving asks."""
    with tempfile.TemporaryDirectory() as folder:
        device = "NVIDIA Test"
        for task in every:
            file = tune.keep(Path(folder), device, task.kernel, tune.entry(task, task.tiles[-1]))
        kept = json.loads(file.read_text())
        assert sum(map(len, kept.values())) == len(every)
        with _tables_in(Path(folder)):
            for task in every:
                asked = {"rows": 4096, **task.key} if task.kernel == "linear" else task.key
                found = tiles.tile_for(task.kernel, device, **asked)
                assert tune.shown(found) == tune.shown(task.tiles[-1]), task.name
    print(f"tables: {len(every)} entries written to {file.name} in a temporary folder, and found again")


@contextmanager
def _tables_in(folder: Path) -> Iterator[None]:
    read = tiles._table
    default = resources.files(tiles).joinpath("default.json")

    def table(name: str):  # type: ignore[no-untyped-def]
        file = folder / name
        return json.loads(file.read_text() if file.exists() else default.read_text() if "default" in name else "{}")

    tiles._table = table  # type: ignore[assignment]
    try:
        yield
    finally:
        tiles._table = read


def _serve() -> None:
    server = serve.Server(TINY, "fp32", batch=2, steps=12, device="cpu")
    row = server.measure(2, 3, server.executor.copy_bandwidth)
    print(
        f"serve: a tiny model on plain torch, {row['tokens_per_second']:.0f} tokens/s at batch 2, a step in "
        f"{row['step_ms']:.1f} ms overlapped and {row['one_by_one_ms']:.1f} ms one by one"
    )
