"""Loads from files: request traces (Azure, Mooncake, AIBrix, BurstGPT, plain JSONL or CSV), ServeGen's rates over days.

Request traces are read by the load generator's reader, so that `busload bench` and `busload simulate` mean the same by
one file.
"""

import csv
import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from busload_operator.simulate.hardware import SetupError
from busload_operator.simulate.workload import Arrival, Lengths, by_rate
from busload_runtime.bench.trace import Trace, read_trace

_DAY = 86_400.0
_RATE_COLUMNS = ("model", "window_start_s", "requests_per_s")
_EDGE_SECONDS = 5.0
"""Rates are interpolated to pieces of this length, so that a window's edge is no jump."""


def read_arrivals(path: Path, seed: int, longest: int | None = None) -> list[Arrival]:
    """The requests of a trace in order of time; those of more than `longest` tokens are left out.

    Raises `SetupError` naming the file, and the line where there is one.
    """
    trace = _read(path, seed, longest)
    if not trace.timed:
        raise SetupError(f"{path} has lengths but no times: use it for the lengths of a synthetic load (--lengths)")
    return [Arrival(row.at, row.input_tokens, row.output_tokens, row.hash_ids) for row in trace.rows]


def read_lengths(path: Path, longest: int | None = None) -> Lengths:
    """The lengths of a trace, with or without times. Raises `SetupError`."""
    return Lengths(tuple((row.input_tokens, row.output_tokens) for row in _read(path, 0, longest).rows))


def _read(path: Path, seed: int, longest: int | None) -> Trace:
    try:
        return read_trace(path, None, longest, seed)
    except ValueError as error:
        raise SetupError(str(error).removeprefix("--trace ")) from None


@dataclass(frozen=True, slots=True)
class RateDay:
    """One day of ServeGen's rates, to be run in `seconds` with its busiest window at `peak` requests per second."""

    model: str
    day: int
    """From 1: days are counted in 24 hours from the beginning of the file."""
    seconds: float
    peak: float


def read_rates(path: Path, day: RateDay, lengths: Lengths, seed: int, cv: float = 1.5) -> list[Arrival]:
    """Arrivals by the rates of one day of a ServeGen file (`model,window_start_s,requests_per_s`).

    The shape of the day is kept, time is compressed to `day.seconds`, and the rate is scaled to `day.peak`. Between the
    middles of windows the rate is interpolated. Raises `SetupError` naming the file and what it has.
    """
    if not (day.seconds > 0 and day.peak > 0 and math.isfinite(day.seconds + day.peak)):
        raise SetupError(f"rates: {day.seconds} seconds and a peak of {day.peak} must both be above 0")
    windows = _windows(path, day)
    middle = 0.5 * min((after[0] - before[0] for before, after in pairwise(windows)), default=_DAY)
    scale = day.peak / max(rate for _, rate in windows)
    pieces = max(1, round(day.seconds / _EDGE_SECONDS))
    edges = [day.seconds * i / pieces for i in range(pieces + 1)]
    rates = [scale * _at(windows, (i + 0.5) / pieces * _DAY - middle) for i in range(pieces)]
    return by_rate(edges, rates, lengths, seed, cv)


def _windows(path: Path, day: RateDay) -> list[tuple[float, float]]:
    """(start in seconds of the day, requests per second), in order."""
    windows, models, days = [], set(), set()
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            if missing := [name for name in _RATE_COLUMNS if name not in (reader.fieldnames or [])]:
                raise SetupError(
                    f"{path} lacks the column {missing[0]!r}: a file of rates has {', '.join(_RATE_COLUMNS)}"
                )
            for row in reader:
                start = _number(row, "window_start_s", path, reader.line_num)
                rate = _number(row, "requests_per_s", path, reader.line_num)
                models.add(row["model"])
                if row["model"] == day.model:
                    days.add(int(start // _DAY) + 1)
                    if start // _DAY == day.day - 1:
                        windows.append((start % _DAY, rate))
    except OSError as error:
        raise SetupError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SetupError(f"{path} is not text; give a CSV file") from None
    if day.model not in models:
        raise SetupError(f"{path} has no model {day.model!r}; it has {', '.join(sorted(models)) or 'no rows'}")
    if not windows or max(rate for _, rate in windows) <= 0:
        raise SetupError(f"{path}: model {day.model} has no requests on day {day.day}; it has days {sorted(days)}")
    return sorted(windows)


def _number(row: dict[str, str], name: str, path: Path, line: int) -> float:
    try:
        value = float(row[name])
        if not (math.isfinite(value) and value >= 0):
            raise ValueError
    except (TypeError, ValueError):
        raise SetupError(f"{path}, line {line}: {name} is {row[name]!r}; a number of 0 or more is needed") from None
    return value


def _at(windows: list[tuple[float, float]], time: float) -> float:
    """Linear between the starts of windows (the caller has moved time to their middles), level beyond the ends."""
    for (start, rate), (end, after) in pairwise(windows):
        if start <= time < end:
            return rate + (after - rate) * (time - start) / (end - start)
    return windows[0][1] if time < windows[0][0] else windows[-1][1]


def is_rates(path: Path) -> bool:
    """Whether this is a file of rates, not of requests. Raises `SetupError` when it cannot be read."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            header = file.readline()
    except OSError as error:
        raise SetupError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SetupError(f"{path} is not text; give a CSV or JSON-lines file") from None
    return set(_RATE_COLUMNS[1:]) <= {name.strip() for name in header.split(",")}
