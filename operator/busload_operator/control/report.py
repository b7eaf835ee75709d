"""What the tuning core found, in the words and coarse numbers of `status`. Pure.

Two significant digits: a person acts on nothing finer, and each digit more is a write to the API server per tick.
"""

import math
from collections.abc import Callable, Sequence
from datetime import datetime

from busload_operator.control.kinds import Object
from busload_operator.tuning.types import Bottleneck, Decision, Law, Observed, Prediction

MAX_DECISIONS = 10
MAX_MESSAGE = 1024

Wall = Callable[[float], datetime]
"""Wall clock time of a moment of the tuning core's clock."""


def number(value: float, digits: int = 2) -> str:
    """A decimal string with so many significant digits, never in exponent form: 0.0042, 3.9, 61, 620."""
    if not _sensible(value):
        return "unknown"
    if abs(value) < 1e-12:
        return "0"
    rounded = round(value, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{rounded:.{max(0, digits - 1 - math.floor(math.log10(abs(rounded))))}f}"


def _sensible(value: float) -> bool:
    return abs(value) < 1e15  # false for NaN as well


def level(value: float) -> str:
    """A mean of a count (requests): one decimal below 10, none above."""
    if not _sensible(value):
        return "unknown"
    return f"{value:.1f}" if value < 9.95 else f"{value:.0f}"


def duration(seconds: float) -> str:
    """Seconds as a Kubernetes duration string: 64ms, 8.2s, 95s."""
    if not _sensible(seconds):
        return "unknown"
    if seconds <= 0:
        return "0s"
    if seconds < 0.9995:
        return f"{max(1, round(float(number(seconds)) * 1000))}ms"
    return f"{number(seconds)}s"


def observed(found: Observed) -> Object:
    """`status.observed`. What is not known is left out."""
    wait = None if found.wait is None else duration(found.wait)
    shown_wait = "" if wait is None else (f">{wait}" if found.wait_is_lower_bound else wait)
    batch = level(found.batch)
    kv = round(found.kv_cache_percent) if _sensible(found.kv_cache_percent) else None
    body: Object = {
        "batch": batch,
        "batchLimit": found.batch_limit,
        "queueDepth": level(found.queue_depth),
        "wait": wait,
        "kvCachePercent": kv,
        "tokensPerSecond": number(found.tokens_per_second),
        "timeToFirstToken": _optional_duration(found.time_to_first_token),
        "interTokenLatency": _optional_duration(found.inter_token_latency),
        "summary": {"batch": f"{batch}/{found.batch_limit}", "kv": "" if kv is None else f"{kv}%", "wait": shown_wait},
    }
    return {name: value for name, value in body.items() if value is not None}


def law(fitted: Law) -> Object:
    """`status.law`."""
    return {
        "formula": "t = a + b*batch + c*kv + d*prefill",
        "a": number(fitted.a),
        "b": number(fitted.b),
        "c": number(fitted.c),
        "d": number(fitted.d),
        "error": f"{round(fitted.error * 100)}%" if _sensible(fitted.error) else "unknown",
        "samples": round(float(number(fitted.samples))),
        "batchMin": level(fitted.batch_min),
        "batchMax": level(fitted.batch_max),
    }


def decision(made: Decision, wall: Wall) -> Object:
    """One entry of `status.decisions`."""
    return {
        "id": made.id,
        "time": wall(made.at).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "knob": made.knob.value,
        "from": str(made.before),
        "to": str(made.after),
        "reason": made.reason.value,
        "message": made.message[:MAX_MESSAGE],
        "inputs": [{"name": name[:64], "value": value[:32]} for name, value in made.inputs[:16]],
        "prediction": _prediction(made.prediction),
        "outcome": outcome(made, wall),
    }


def outcome(made: Decision, wall: Wall) -> Object:
    """The `outcome` of a decision. The windows let anybody compare the rates with a measurement of their own."""
    found = made.outcome
    windows = {"beforeWindow": found.span_before, "afterWindow": found.span_after}
    return {
        "verdict": found.verdict.value,
        "tokensPerSecondBefore": _optional_number(found.tokens_per_second_before),
        "tokensPerSecondAfter": _optional_number(found.tokens_per_second_after),
        "message": found.message[:MAX_MESSAGE],
        **{name: _window(span, wall) for name, span in windows.items() if span is not None},
    }


def _window(span: tuple[float, float], wall: Wall) -> Object:
    start, end = (wall(at).isoformat(timespec="milliseconds").replace("+00:00", "Z") for at in span)
    return {"from": start, "to": end}


def diagnosis(bottleneck: Bottleneck, evidence: str, since: float, wall: Wall) -> Object:
    """`status.diagnosis`."""
    at = wall(since).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"bottleneck": bottleneck.value, "since": at, "evidence": evidence[:MAX_MESSAGE]}


def newest(decisions: Sequence[Object]) -> list[Object]:
    """At most ten, newest first."""
    return sorted(decisions, key=lambda entry: -int(entry["id"]))[:MAX_DECISIONS]


def _prediction(expected: Prediction) -> Object:
    body = {
        "tokensPerSecond": _optional_number(expected.tokens_per_second),
        "wait": _optional_duration(expected.wait),
        "interTokenLatency": _optional_duration(expected.inter_token_latency),
    }
    return {name: value for name, value in body.items() if value}


def _optional_number(value: float | None) -> str:
    # Written once a decision, not each tick, and compared with other measurements: a digit more.
    return "" if value is None else number(value, 3)


def _optional_duration(value: float | None) -> str | None:
    return None if value is None else duration(value)
