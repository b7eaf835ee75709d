"""What a run has shown, and whether that is good."""

import statistics
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from e2e.soak.acts import Outcome
from e2e.soak.watch import Watch

_GROWTH_BYTES, _GROWTH_SHARE = 8 << 20, 0.02
"""By which the largest memory of the second half of the run may exceed that of the first, warm-up left out: what
allocators keep varies by as much."""
_LEVELS = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
_PROBLEMS_SHOWN = 20


@dataclass(slots=True)
class Run:
    """All that happened."""

    minutes: float
    seed: int
    outcomes: list[Outcome] = field(default_factory=list)
    calm_gaps: list[float] = field(default_factory=list)
    """Between tokens of streams that nothing else disturbed."""
    own_lateness: list[float] = field(default_factory=list)
    """By which this process woke up too late meanwhile."""
    idle: dict[str, float] = field(default_factory=dict)
    """Metrics once all clients were gone."""
    refused_documents: int = 0
    """Limits documents that had to be refused."""
    exit_code: int | None = None
    problems: list[str] = field(default_factory=list)


def summarise(run: Run, watch: Watch) -> dict[str, Any]:
    """The report. `problems` is empty when the run is good."""
    return {
        "minutes": run.minutes,
        "seed": run.seed,
        "acts": _by_act(run.outcomes),
        "engine": _engine(run.idle),
        "gaps_seconds": {
            "under_load": _gaps([gap for outcome in run.outcomes for gap in outcome.gaps]),
            "undisturbed": _gaps(run.calm_gaps),
        },
        "own_lateness_seconds": spread(run.own_lateness),
        "health_seconds": spread(watch.health_seconds),
        "scrape_seconds": spread(watch.scrape_seconds) | {"bytes": watch.scrape_bytes},
        "memory_mib": _memory(watch),
        "open_files": {name: (watch.samples[0].files[name], watch.samples[-1].files[name]) for name in watch.processes},
        "exit_code": run.exit_code,
        "problems": _problems(run, watch),
    }


def render(report: dict[str, Any]) -> str:
    """The report for a person."""
    lines = [f"soak of {report['minutes']:g} minutes, seed {report['seed']}", "", "acts: status (how often)"]
    lines += [
        f"  {name:<10} {', '.join(f'{s} ({n})' for s, n in statuses.items())}"
        for name, statuses in report["acts"].items()
    ]
    engine = report["engine"]
    lines += ["", "engine: " + ", ".join(f"{value:,} {name.replace('_', ' ')}" for name, value in engine.items())]
    for name, gaps in report["gaps_seconds"].items():
        if gaps:
            lines.append(
                f"gap between tokens, {name.replace('_', ' ')}: "
                f"median {gaps['median']:.4f} s, p99 {gaps['p99']:.4f} s, max {gaps['max']:.4f} s "
                f"({gaps['max_over_median']:.1f} times the median)"
            )
    lateness = report["own_lateness_seconds"]
    lines.append(
        "  meanwhile the clients' process was late by up to "
        f"{lateness['max']:.4f} s (p99 {lateness['p99']:.4f} s): so much of it is the machine"
    )
    for name in ("health", "scrape"):
        times = report[f"{name}_seconds"]
        lines.append(f"{name}: median {times['median']:.4f} s, p99 {times['p99']:.4f} s, max {times['max']:.4f} s")
    for name, memory in report["memory_mib"].items():
        lines.append(
            f"memory of {name}: {memory['first']:.0f} MiB at first; behind the warm-up at most "
            f"{memory['first_half']:.0f} MiB in the first half, {memory['second_half']:.0f} MiB in the second; "
            f"{memory['last']:.0f} MiB at last"
        )
    lines.append(
        "open files: " + ", ".join(f"{n} {a} at first, {b} at last" for n, (a, b) in report["open_files"].items())
    )
    problems = report["problems"]
    lines += ["", f"{len(problems)} problems" if problems else "no problem"]
    lines += [f"  {problem}" for problem in problems[:_PROBLEMS_SHOWN]]
    return "\n".join(lines)


def _by_act(outcomes: list[Outcome]) -> dict[str, dict[str, int]]:
    table: dict[str, Counter[str]] = defaultdict(Counter)
    for outcome in outcomes:
        table[outcome.act][str(outcome.status) if outcome.status else "left"] += 1
    return {name: dict(sorted(table[name].items())) for name in sorted(table)}


def _engine(idle: dict[str, float]) -> dict[str, int]:
    counters = {
        "steps": "busload_engine_steps_total",
        "tokens": "busload_generated_tokens_total",
        "preemptions": "busload_preemptions_total",
        "aborts": 'busload_requests_finished_total{reason="abort"}',
        "limits_applied": "busload_limits_generation",
    }
    return {name: int(idle.get(series, 0)) for name, series in counters.items()}


def spread(values: list[float]) -> dict[str, float]:
    """Median, 99th percentile and maximum; 0 for no values."""
    ordered = sorted(values) or [0.0]
    return {
        "median": statistics.median(ordered),
        "p99": ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)],
        "max": ordered[-1],
    }


def _gaps(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    gaps = spread(values)
    return gaps | {"max_over_median": gaps["max"] / gaps["median"] if gaps["median"] else 0.0}


def _memory(watch: Watch) -> dict[str, dict[str, float]]:
    """Of each process, the first fifth of the run counting as its warm-up."""
    end = watch.samples[-1].at
    table = {}
    for name in watch.processes:
        halves: tuple[list[int], list[int]] = ([], [])
        for sample in watch.samples:
            if sample.at >= 0.2 * end:
                halves[sample.at >= 0.6 * end].append(sample.rss[name])
        first, last = watch.samples[0].rss[name], watch.samples[-1].rss[name]
        values = {"first": first, "first_half": max(halves[0]), "second_half": max(halves[1]), "last": last}
        table[name] = {key: value / (1 << 20) for key, value in values.items()}
    return table


def _problems(run: Run, watch: Watch) -> list[str]:
    problems = [f"{outcome.act}: {outcome.problem}" for outcome in run.outcomes if outcome.problem]
    problems += run.problems + watch.problems
    canaries = Counter(outcome.text for outcome in run.outcomes if outcome.act == "canary" and outcome.status == 200)
    if len(canaries) > 1:
        problems.append(f"one greedy request had {len(canaries)} answers: {dict(canaries)}")
    idle = run.idle
    for name, value in idle.items():
        if name.partition("{")[0] in (*_LEVELS, "busload_queued_prompt_tokens") and value != 0:
            problems.append(f"{name} is {value:g} though nobody is there")
    if idle["busload_kv_blocks_free"] != idle["busload_kv_blocks"]:
        problems.append(f"{idle['busload_kv_blocks_free']:g} of {idle['busload_kv_blocks']:g} KV blocks are free")
    ended = sum(value for name, value in idle.items() if name.startswith("busload_requests_finished_total"))
    if ended != idle["busload_requests_arrived_total"]:
        problems.append(f"{idle['busload_requests_arrived_total']:g} requests arrived and {ended:g} ended")
    refused, bad = idle["busload_limits_errors_total"], run.refused_documents
    if refused > bad or (bad and not refused):  # of two that follow each other quickly only one may be seen
        problems.append(f"{bad} limits documents were bad and {refused:g} were refused")
    for name, memory in _memory(watch).items():
        allowed = memory["first_half"] * (1 + _GROWTH_SHARE) + _GROWTH_BYTES / (1 << 20)
        if memory["second_half"] > allowed:
            problems.append(f"memory of {name} grew from {memory['first_half']:.0f} to {memory['second_half']:.0f} MiB")
    for name in watch.processes:
        before, after = watch.samples[0].files[name], watch.samples[-1].files[name]
        if after > before + 2:
            problems.append(f"{name} had {before} open files at first and {after} at last")
    if run.exit_code != 0:
        problems.append(f"SIGTERM ended the server with exit code {run.exit_code}")
    return problems
