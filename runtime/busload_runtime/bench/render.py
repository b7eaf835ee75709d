"""Figures for people (a table) and for programs (a JSON document)."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from busload_runtime.bench.outcome import Level
from busload_runtime.bench.summary import Goals, Spread, Summary, summary_to_json

_HEAD = ("", "requests", "failed", "out tok/s", "total tok/s", "TTFT p50", "p90", "p99", "max")
_LATENCIES = ("", "gap p50", "p90", "p99", "max", "TPOT p50", "p99", "worst gap p50", "p99", "end to end p50", "p99")


def table(pairs: Sequence[tuple[Level, Summary]], goals: Goals) -> str:
    """Two tables: throughput with time to first token, then the latencies of decoding; and what is to be said."""
    first: list[Sequence[str]] = [_HEAD]
    second: list[Sequence[str]] = [_LATENCIES]
    for level, s in pairs:
        failed = sum(s.failures.values())
        rates = f"{s.output_rate:.1f}", f"{s.total_rate:.1f}"
        ttft = s.time_to_first_token
        first.append((level.name, str(s.requests), str(failed), *rates, *_seconds(ttft, 50, 90, 99, 100)))
        second.append(
            (
                level.name,
                *_seconds(s.inter_token_latency, 50, 90, 99, 100),
                *_seconds(s.time_per_output_token, 50, 99),
                *_seconds(s.worst_gap, 50, 99),
                *_seconds(s.end_to_end, 50, 99),
            )
        )
    notes = [f"  {note}" for level, summary in pairs for note in _notes(level, summary, goals)]
    return "\n".join([*_aligned(first), "", *_aligned(second), "", *_definitions(pairs), *notes])


def _definitions(pairs: Sequence[tuple[Level, Summary]]) -> list[str]:
    lines = [
        "out tok/s: output tokens per second while the load was full (closed loop: until the first client found no",
        "request left to send; open loop: until the last arrival, or the last answer where arrivals lasted less than",
        "four requests do); total: prompt tokens too. Latencies count from the time a request should have been sent.",
        "gap: between two chunks. TPOT: a request's mean gap per token.",
    ]
    few = [s.ok for _, s in pairs if 0 < s.ok < 100]
    if few:
        lines.append(f"Percentiles are observed values (nearest rank): p99 of {min(few)} requests is their maximum.")
    return lines


def _notes(level: Level, s: Summary, goals: Goals) -> Iterable[str]:
    for kind, count in sorted(s.failures.items()):
        example = next(outcome.error for outcome in level.outcomes if outcome.kind == kind)
        yield f"{level.name}: {count} failed ({kind}), the first: {example}"
    if s.interrupted:
        yield f"{level.name}: {s.interrupted} requests still ran when the measurement was ended; not in the latencies"
    if goals.given:
        yield f"{level.name}: goodput {s.good_rate:.2f} requests/s, {s.good} of {s.requests} succeeded within the goals"
    retries = sum(outcome.retries for outcome in level.outcomes)
    if retries:
        yield f"{level.name}: {retries} retries after 429; their waits are in the latencies"
    if s.counted != "usage" and s.ok:
        yield f"{level.name}: tokens counted by {s.counted} (the server sent no usage): one token per chunk assumed"
    elif s.ok and s.tokens_per_chunk > 1.02:
        yield f"{level.name}: {s.tokens_per_chunk:.2f} tokens per chunk, so a gap is of more than one (TPOT is exact)"
    if level.concurrency is None and s.send_lag.at(99) > max(0.01, 0.05 * s.time_to_first_token.at(50)):
        yield (
            f"{level.name}: this client could not keep up: requests left up to {duration(s.send_lag.at(100))} late "
            f"(p99 {duration(s.send_lag.at(99))}), which is in the latencies; use a lower rate or a faster client"
        )
    if level.client_cpu > 0.8:
        yield f"{level.name}: this client used {level.client_cpu:.0%} of a core: it measured itself in part"


def _seconds(spread: Spread, *percents: float) -> list[str]:
    return [duration(spread.at(percent)) for percent in percents]


def duration(seconds: float) -> str:
    """Three digits, with the unit that suits: 4.21ms, 843ms, 12.3s; - for NaN."""
    if math.isnan(seconds):
        return "-"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g}ms"
    return f"{seconds:.3g}s" if seconds < 999.5 else f"{seconds:.0f}s"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if not i else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


def document(pairs: Sequence[tuple[Level, Summary]], about: dict[str, Any], records: bool) -> dict[str, Any]:
    """The JSON document: `about` the measurement, and per level its summary and, if asked for, each request."""
    return about | {"levels": [_level(level, summary, records) for level, summary in pairs]}


def _level(level: Level, summary: Summary, records: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": level.name,
        "concurrency": level.concurrency,
        "rate": level.rate,
        "began": level.began,
        "client_cpu": round(level.client_cpu, 4),
        "summary": summary_to_json(summary),
        "errors": level.errors[:20],
    }
    if records:
        found["requests"] = [outcome.to_json() for outcome in level.outcomes]
    return found
