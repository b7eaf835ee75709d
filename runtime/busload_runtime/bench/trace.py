"""Recorded traffic: when requests came and how long they were. Formats of the public traces, known by their columns."""

import csv
import json
import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

_MOST_TOKENS = 2**24


@dataclass(frozen=True)
class Row:
    """One recorded request: arrival in seconds since the first one, lengths in tokens."""

    at: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Format:
    """Column names, and what one unit of the time column is in seconds (None: a date)."""

    source: str
    time: str | None
    unit: float | None
    input: str
    output: str


_FORMATS = (
    _Format("this command's own", "seconds", 1, "input_tokens", "output_tokens"),
    _Format("Azure LLM inference", "TIMESTAMP", None, "ContextTokens", "GeneratedTokens"),
    _Format("Mooncake", "timestamp", 1e-3, "input_length", "output_length"),
    _Format("AIBrix", "timestamp_ms", 1e-3, "prompt_tokens", "output_tokens"),
    _Format("BurstGPT", "Timestamp", 1, "Request tokens", "Response tokens"),
    _Format("LLMServingSim", "arrival_time", 1, "input_toks", "output_toks"),
    _Format("lengths alone (Vidur)", None, None, "num_prefill_tokens", "num_decode_tokens"),
)


@dataclass(frozen=True)
class Trace:
    rows: list[Row]
    timed: bool
    """False: the file has lengths only."""
    left_out: int
    """Rows longer than asked for, or without output."""
    spread: bool
    """Times were coarse; arrivals were spread inside them."""


def read_trace(path: Path, limit: int | None, longest: int | None, seed: int) -> Trace:
    """The first `limit` usable rows of a CSV or JSON-lines file, in order of arrival.

    Rows of more than `longest` tokens, input plus output, and rows without input or output are left out and counted.
    Times so coarse that most rows share theirs (Mooncake's are rounded to 3 s) are spread until the next one.
    Raises ValueError that names the file, and the line where there is one.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows, timed, left_out = _read(file, path, limit, longest)
    except OSError as error:
        raise ValueError(f"--trace {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ValueError(f"--trace {path} is not text; give a CSV or JSON-lines file") from None
    except csv.Error as error:
        raise ValueError(
            f"--trace {path} is not a CSV file ({error}); JSON lines need a name that ends in .jsonl"
        ) from None
    if not rows:
        raise ValueError(f"--trace {path} has no request to replay ({left_out} were left out, see --longest)")
    rows.sort(key=lambda row: row.at)
    shared = sum(count for count in Counter(row.at for row in rows).values() if count > 1)
    spread = timed and shared > len(rows) / 2
    if spread:
        rows = _spread(rows, random.Random(seed))
    return Trace([replace(row, at=row.at - rows[0].at) for row in rows], timed, left_out, spread)


def _read(file: Iterable[str], path: Path, limit: int | None, longest: int | None) -> tuple[list[Row], bool, int]:
    lines = _json_lines(file, path) if path.suffix in (".jsonl", ".ndjson", ".json") else _csv_lines(file)
    rows: list[Row] = []
    left_out = 0
    found: _Format | None = None
    for number, line in lines:
        found = found or _format_of(line, path)
        try:
            row = _row(line, found)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(
                f"--trace {path}, line {number}: not a request of the {found.source} format ({error!r})"
            ) from None
        if (
            row.input_tokens < 1
            or row.output_tokens < 1
            or (longest and row.input_tokens + row.output_tokens > longest)
        ):
            left_out += 1
            continue
        rows.append(row)
        if limit is not None and len(rows) == limit:
            break
    return rows, found is not None and found.time is not None, left_out


def _csv_lines(file: Iterable[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    reader = csv.DictReader(file)
    return ((reader.line_num, line) for line in reader)


def _json_lines(file: Iterable[str], path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"--trace {path}, line {number}: not JSON ({error})") from None
        if not isinstance(value, dict):
            raise ValueError(
                f"--trace {path}, line {number}: a {type(value).__name__}; one JSON object per line is needed"
            )
        yield number, value


def _format_of(line: dict[str, Any], path: Path) -> _Format:
    for known in _FORMATS:
        if {known.input, known.output, known.time or known.input} <= line.keys():
            return known
    columns = "; ".join(f"{f.source}: {', '.join(filter(None, (f.time, f.input, f.output)))}" for f in _FORMATS)
    raise ValueError(f"--trace {path} has columns {', '.join(islice(map(str, line), 12))}; known are {columns}")


def _row(line: dict[str, Any], known: _Format) -> Row:
    at = 0.0
    if known.time is not None:
        text = line[known.time]
        at = float(text) * known.unit if known.unit is not None else datetime.fromisoformat(text).timestamp()
    if not math.isfinite(at):
        raise ValueError(f"{known.time} is {line[known.time or '']!r:.40}")
    ids = line.get("hash_ids") or ()
    lengths = int(line[known.input]), int(line[known.output])
    if max(lengths) > _MOST_TOKENS:
        raise ValueError(f"{max(lengths)} tokens; at most {_MOST_TOKENS} are a request")
    return Row(at, *lengths, tuple(ids) if isinstance(ids, list) else ())


def _spread(rows: list[Row], rng: random.Random) -> list[Row]:
    times = sorted({row.at for row in rows})
    gaps = {a: b - a for a, b in pairwise(times)}
    last = min(gaps.values(), default=0.0)
    spread = [replace(row, at=row.at + rng.random() * gaps.get(row.at, last)) for row in rows]
    return sorted(spread, key=lambda row: row.at)
