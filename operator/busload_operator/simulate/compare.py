"""Policies by name, and several of them on one load."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from busload_operator.simulate import baselines
from busload_operator.simulate.clairvoyant import Clairvoyant, capacity
from busload_operator.simulate.hardware import SetupError
from busload_operator.simulate.policy import Policy, Static, Tuner
from busload_operator.simulate.report import Summary, summarise
from busload_operator.simulate.run import Outcome, Setup, simulate
from busload_operator.simulate.workload import Arrival
from busload_operator.tuning import Scaling

POLICIES = {
    "tuner": "the operator's tuner: settings and replicas",
    "settings": "the operator's tuner, replicas fixed at --replicas",
    "static:N": "N replicas; N = best searches the fewest that reach --target (known only in hindsight)",
    "waiting[:N]": "KEDA on N waiting requests per replica (5)",
    "busy[:PERCENT]": "HPA on the busy share of time, as GPU utilisation shows it (80)",
    "concurrency[:PERCENT]": "Knative on requests in flight: PERCENT (70) of the largest batch within the objective",
    "wva": "llm-d Workload Variant Autoscaler, saturation rule (KV 80%, queue 5, one replica at a time)",
    "wva-tokens": "llm-d Workload Variant Autoscaler, token rule",
    "clairvoyant": "knows the law and the arrivals of the lead time ahead: the limit",
}
COMPARED = ("static:best", "tuner", "waiting", "busy", "concurrency", "wva", "wva-tokens", "clairvoyant")
Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class Entry:
    """One policy's run."""

    summary: Summary
    outcome: Outcome


def run(name: str, load: Sequence[Arrival], setup: Setup, target: float, progress: Progress) -> Entry:
    """One policy by its name in `POLICIES`. Raises `SetupError` for an unknown name or argument."""
    if name == "static:best":
        return _best_static(load, setup, target, progress)
    setup, policy = _policy(name, load, _paced(name, setup))
    outcome = simulate(load, setup, policy, lambda share: progress(name, share))
    return Entry(summarise(name, outcome), outcome)


def check(name: str, load: Sequence[Arrival], setup: Setup) -> None:
    """Raises the `SetupError` that `run` would, without running."""
    if name != "static:best":
        _policy(name, load, setup)


def _paced(name: str, setup: Setup) -> Setup:
    """Pods aim at the objectives where nothing else is asked for and the policy is one that tells them: the tuner, and
    the limit that it is compared with. A rule that only counts replicas tells them nothing."""
    tells = name in ("tuner", "settings", "clairvoyant")
    late_last = tells if setup.late_last is None else setup.late_last
    time_budget = tells if setup.time_budget is None else setup.time_budget
    return replace(setup, late_last=late_last, time_budget=time_budget)


def _policy(name: str, load: Sequence[Arrival], setup: Setup) -> tuple[Setup, Policy]:
    kind, _, argument = name.partition(":")
    if kind == "static":
        replicas = round(_number(name, argument, 0, whole=True))
        return replace(setup, replicas=replicas), Static(replicas)
    if kind == "waiting":
        return setup, baselines.Waiting(_number(name, argument, 5))
    if kind == "busy":
        return setup, baselines.Busy(_number(name, argument, 80) / 100)
    if kind == "concurrency":
        batch = capacity(load, setup.hardware, setup.limits, setup.objectives).batch
        return setup, baselines.Concurrency(batch, _number(name, argument, 70) / 100)
    plain: dict[str, Callable[[], Policy]] = {
        "tuner": Tuner,
        "settings": lambda: Tuner(scaling=Scaling.EXTERNAL),
        "wva": baselines.Saturation,
        "wva-tokens": baselines.TokenCapacity,
        "clairvoyant": lambda: Clairvoyant(load, setup.hardware, setup.startup, setup.scrape + setup.scrape_delay),
    }
    if name not in plain:
        raise SetupError(f"policy {name!r} is unknown; known are {', '.join(POLICIES)}")
    return setup, plain[name]()


def _number(name: str, argument: str, default: float, whole: bool = False) -> float:
    try:
        value = float(argument) if argument else default
        if not (math.isfinite(value) and value > 0) or (whole and value != int(value)):
            raise ValueError
    except ValueError:
        kind = "a whole number of at least 1, or best" if whole else "a number above 0"
        raise SetupError(f"policy {name!r}: {argument!r} must be {kind}") from None
    return value


def _best_static(load: Sequence[Arrival], setup: Setup, target: float, progress: Progress) -> Entry:
    """The fewest replicas that reach the target share, or what the most replicas of the bounds reach, less half a
    point. Found by halving: more replicas are taken to be no worse."""
    entries: dict[int, Entry] = {}

    def reached(replicas: int) -> float:
        name = f"static:{replicas}"
        entries[replicas] = run(name, load, setup, target, lambda _, share: progress(f"static:best ({name})", share))
        return entries[replicas].summary.inside

    low, high = setup.bounds.replicas.min, setup.bounds.replicas.max
    most = reached(high)
    goal = target if most >= target else most - 0.005
    while low < high:
        middle = (low + high) // 2
        if reached(middle) >= goal:
            high = middle
        else:
            low = middle + 1
    found = entries[high]
    return Entry(replace(found.summary, policy=f"static:{high} (best)"), found.outcome)
