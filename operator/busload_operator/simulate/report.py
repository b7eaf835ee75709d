"""Numbers of an outcome: share inside the objectives, cost, changes, percentiles; as a table and as JSON."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from busload_operator.simulate.replica import Job
from busload_operator.simulate.run import Outcome
from busload_operator.tuning import Decision, Objectives


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of the requests that have the figure, by nearest rank. Seconds; 0 when there is none."""

    p50: float
    p95: float
    p99: float


@dataclass(frozen=True, slots=True)
class Summary:
    """One policy on one load."""

    policy: str
    requests: int
    inside: float
    """Share of all requests that got a whole answer within both objectives, 0 to 1."""
    inside_ttft: float
    inside_tpot: float
    replica_minutes: float
    replica_changes_per_hour: float
    settings_changes_per_hour: float
    time_to_first_token: Percentiles
    time_per_output_token: Percentiles
    tokens_per_second: float
    """Output tokens over the time to the last one."""
    failed: dict[str, int]
    """Requests without a whole answer, by reason."""
    replicas_at_the_end: int
    limits_at_the_end: dict[str, int] | None
    """None: unchanged."""


def summarise(policy: str, outcome: Outcome) -> Summary:
    jobs, hours = outcome.jobs, max(outcome.seconds, 1.0) / 3600
    within = [_within(job, outcome.objectives) for job in jobs]
    first = [t for job in jobs if (t := job.time_to_first_token) is not None]
    gaps = [job.time_per_output_token for job in jobs if job.output > 1]
    end = max((job.last for job in jobs if job.last is not None), default=0.0)
    tokens = sum(job.output for job in jobs)
    changes = outcome.replica_changes
    return Summary(
        policy=policy,
        requests=len(jobs),
        inside=sum(ttft and tpot for ttft, tpot in within) / len(jobs),
        inside_ttft=sum(ttft for ttft, _ in within) / len(jobs),
        inside_tpot=sum(tpot for _, tpot in within) / len(jobs),
        replica_minutes=outcome.replica_seconds / 60,
        replica_changes_per_hour=len(changes) / hours,
        settings_changes_per_hour=len(outcome.limits_changes) / hours,
        time_to_first_token=percentiles(first),
        time_per_output_token=percentiles(gaps),
        tokens_per_second=tokens / end if end > 0 else 0.0,
        failed=dict(sorted(Counter(job.failed for job in jobs if job.failed).items())),
        replicas_at_the_end=outcome.timeline[-1].replicas if outcome.timeline else 0,
        limits_at_the_end=outcome.limits_changes[-1][2].to_json() if outcome.limits_changes else None,
    )


def _within(job: Job, objectives: Objectives) -> tuple[bool, bool]:
    ttft = job.time_to_first_token
    if job.failed or ttft is None:
        return False, False
    return ttft <= objectives.time_to_first_token, job.time_per_output_token <= objectives.inter_token_latency


def percentiles(values: Sequence[float]) -> Percentiles:
    ordered = sorted(values)
    if not ordered:
        return Percentiles(0.0, 0.0, 0.0)
    # Nearest rank: the smallest value that at least this share does not exceed.
    return Percentiles(*(ordered[max(0, -(-len(ordered) * percent // 100) - 1)] for percent in (50, 95, 99)))


_HEADER = (
    "policy",
    "inside %",
    "TTFT %",
    "TPOT %",
    "replica-min",
    "scalings/h",
    "settings/h",
    "TTFT p50/p95/p99 s",
    "TPOT p50/p95/p99 ms",
    "tokens/s",
    "failed",
)


def table(summaries: Sequence[Summary]) -> str:
    """One line per policy, columns aligned."""
    rows = [_HEADER, *map(_row, summaries)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADER))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _row(s: Summary) -> tuple[str, ...]:
    ttft, tpot = s.time_to_first_token, s.time_per_output_token
    return (
        s.policy,
        f"{100 * s.inside:.2f}",
        f"{100 * s.inside_ttft:.2f}",
        f"{100 * s.inside_tpot:.2f}",
        f"{s.replica_minutes:.1f}",
        f"{s.replica_changes_per_hour:.1f}",
        f"{s.settings_changes_per_hour:.1f}",
        f"{ttft.p50:.2f} / {ttft.p95:.2f} / {ttft.p99:.2f}",
        f"{1e3 * tpot.p50:.1f} / {1e3 * tpot.p95:.1f} / {1e3 * tpot.p99:.1f}",
        f"{s.tokens_per_second:.0f}",
        ", ".join(f"{count} {reason}" for reason, count in s.failed.items()) or "0",
    )


def as_json(summary: Summary, outcome: Outcome) -> dict[str, Any]:
    """Everything but the single requests."""
    return {
        **asdict(summary),
        "timeline": [asdict(moment) for moment in outcome.timeline],
        "replica_changes": [{"at": at, "from": old, "to": new} for at, old, new in outcome.replica_changes],
        "limits_changes": [
            {"at": at, "from": old.to_json(), "to": new.to_json()} for at, old, new in outcome.limits_changes
        ],
        "decisions": [_decision(decision) for decision in outcome.decisions],
    }


def _decision(decision: Decision) -> dict[str, Any]:
    return {
        "id": decision.id,
        "at": decision.at,
        "knob": decision.knob.value,
        "from": decision.before,
        "to": decision.after,
        "reason": decision.reason.value,
        "message": decision.message,
        "prediction": asdict(decision.prediction),
        "verdict": decision.outcome.verdict.value,
        "outcome": decision.outcome.message,
    }
