"""From outcomes to figures. Every definition that a reader may argue about is in a docstring here."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from busload_runtime.bench.outcome import Level, Outcome

_PERCENTS = (1.0, 5.0, 10.0, 25.0, 50.0, 75.0, 90.0, 95.0, 99.0, 99.9)


@dataclass(frozen=True)
class Spread:
    """Percentiles of observed values, by nearest rank: the smallest value that so many percent do not exceed.

    Always a value that was seen: with few samples the high percentiles are the maximum (p99 of fewer than 100).
    """

    values: tuple[float, ...]

    @staticmethod
    def of(values: Iterable[float | None]) -> "Spread":
        return Spread(tuple(sorted(value for value in values if value is not None)))

    def at(self, percent: float) -> float:
        """The percentile; NaN without samples."""
        if not self.values:
            return math.nan
        # Rounded first: 99.9 / 100 * 1000 is 999.0000000000001.
        rank = math.ceil(round(percent / 100 * len(self.values), 9))
        return self.values[max(rank, 1) - 1]

    def to_json(self) -> dict[str, float | int | None]:
        """Seconds; null without samples."""
        if not self.values:
            return {"n": 0}
        percentiles = {f"p{percent:g}": round(self.at(percent), 6) for percent in _PERCENTS}
        mean = sum(self.values) / len(self.values)
        return {"n": len(self.values), "mean": round(mean, 6), **percentiles, "max": round(self.values[-1], 6)}


@dataclass(frozen=True)
class Goals:
    """Latencies in seconds that a request must keep to count as good; None: any."""

    time_to_first_token: float | None = None
    inter_token_latency: float | None = None
    """Of the request's mean, not of each gap."""

    @property
    def given(self) -> bool:
        return self.time_to_first_token is not None or self.inter_token_latency is not None

    def met_by(self, outcome: Outcome) -> bool:
        pairs = (
            (outcome.time_to_first_token, self.time_to_first_token),
            (outcome.time_per_output_token, self.inter_token_latency),
        )
        return outcome.ok and all(goal is None or value is None or value <= goal for value, goal in pairs)


@dataclass(frozen=True)
class Summary:
    """The figures of one level. Latencies are of successful requests, from the time a request should have been sent."""

    requests: int
    ok: int
    interrupted: int
    failures: dict[str, int]
    """Count by kind."""
    time_to_first_token: Spread
    inter_token_latency: Spread
    """Each gap between two chunks of one request."""
    time_per_output_token: Spread
    """Per request, the mean gap: (last - first) / (output tokens - 1)."""
    worst_gap: Spread
    """Per request, its longest gap."""
    end_to_end: Spread
    send_lag: Spread
    """How late requests were sent: of an open loop, what the client could not keep up with."""
    steady_seconds: float
    output_rate: float
    """Output tokens per second in the steady window."""
    total_rate: float
    """The same with the prompt tokens of requests whose first token arrived in it."""
    whole_output_rate: float
    """Output tokens of successful requests, over the time from the first request sent to the end of the last."""
    good: int
    good_rate: float
    """Requests per second, over that whole time, that succeeded within the goals."""
    tokens_per_chunk: float
    counted: str
    """Where token counts come from: usage, chunks, or both."""


def summarise(level: Level, goals: Goals = Goals()) -> Summary:
    outcomes = level.outcomes
    done = [outcome for outcome in outcomes if outcome.ok]
    begin, end = steady_window(level)
    steady = max(end - begin, 1e-9)
    output = level.tokens_between(begin, end)
    prompts = sum(o.input_tokens for o in outcomes if o.chunks and begin <= o.chunks[0] < end)
    good = sum(goals.met_by(outcome) for outcome in done)
    whole = max(level.seconds, 1e-9)
    chunks = sum(len(outcome.chunks) for outcome in done)
    sources = {"usage" if outcome.from_usage else "chunks" for outcome in done}
    return Summary(
        requests=len(outcomes),
        ok=len(done),
        interrupted=sum(outcome.interrupted for outcome in outcomes),
        failures=dict(Counter(outcome.kind for outcome in outcomes if outcome.kind is not None)),
        time_to_first_token=Spread.of(outcome.time_to_first_token for outcome in done),
        inter_token_latency=Spread.of(gap for outcome in done for gap in outcome.gaps),
        time_per_output_token=Spread.of(outcome.time_per_output_token for outcome in done),
        worst_gap=Spread.of(max(outcome.gaps) for outcome in done if len(outcome.chunks) > 1),
        end_to_end=Spread.of(outcome.end - outcome.intended for outcome in done),
        send_lag=Spread.of(outcome.sent - outcome.intended for outcome in outcomes),
        steady_seconds=end - begin,
        output_rate=output / steady,
        total_rate=(output + prompts) / steady,
        whole_output_rate=sum(outcome.output_tokens for outcome in done) / whole,
        good=good,
        good_rate=good / whole,
        tokens_per_chunk=sum(outcome.output_tokens for outcome in done) / chunks if chunks else 0.0,
        counted=" and ".join(sorted(sources, reverse=True)) or "nothing",
    )


def steady_window(level: Level) -> tuple[float, float]:
    """The time in which the load was what the level says, seconds since it began.

    It begins with the first request. Closed loop: it ends when the first client finds no request left to send, so that
    the tail, in which fewer clients are busy, does not count. Open loop: it ends with the last arrival or, where
    arrivals lasted less than four median requests, with the last answer, since there was no steady state.
    """
    outcomes: Sequence[Outcome] = level.outcomes
    if not outcomes:
        return 0.0, 0.0
    begin = min(outcome.intended for outcome in outcomes)
    last_end = max(outcome.end for outcome in outcomes)
    last_start = max(outcome.intended for outcome in outcomes)
    if level.concurrency is None:
        median = Spread.of(outcome.end - outcome.intended for outcome in outcomes).at(50)
        return begin, last_start if last_start - begin >= 4 * median else last_end
    return begin, min((outcome.end for outcome in outcomes if outcome.end > last_start), default=last_end)


def summary_to_json(summary: Summary) -> dict[str, Any]:
    """All figures, times in seconds."""
    return {
        name: value.to_json() if isinstance(value, Spread) else round(value, 6) if isinstance(value, float) else value
        for name, value in vars(summary).items()
    }
