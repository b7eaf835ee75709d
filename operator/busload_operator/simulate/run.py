"""One simulation: a load, a service, a policy; and what came of it."""

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from busload_operator.simulate.fleet import Fault, Fleet, Router
from busload_operator.simulate.hardware import Hardware, SetupError
from busload_operator.simulate.policy import Action, Policy, Tuner
from busload_operator.simulate.replica import Job
from busload_operator.simulate.workload import Arrival
from busload_operator.tuning import Bounds, Decision, Inputs, Mode, Objectives, PodSample, Scaling, Trial
from busload_runtime.contract import Limits, Pace

_FINISH_SECONDS = 60.0
"""Over which the finish rate of the timeline is taken."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The service and its surroundings. Times in seconds."""

    hardware: Hardware
    limits: Limits
    bounds: Bounds
    objectives: Objectives
    replicas: int
    """At the start, all ready."""
    router: Router = Router.LEAST_REQUESTS
    startup: float = 60.0
    """From asking for a pod to its being ready."""
    scrape: float = 5.0
    """Between two rounds of scrapes."""
    scrape_delay: float = 0.0
    """From a scrape to the decision made from it."""
    apply_delay: float = 1.0
    """From a decision to the pods running the new limits."""
    tail: float = 900.0
    """After the last arrival, for what is still under way."""
    faults: tuple[Fault, ...] = ()
    late_last: bool | None = None
    """Whether pods put requests whose first token is late anyway behind the others, instead of first come, first
    served. None: as the policy has it (`compare.run`), else not."""
    time_budget: bool | None = None
    """Whether pods bound a step's prompt tokens by the inter-token objective, beside the token budget. None: the same.
    """
    seed: int = 1

    def __post_init__(self) -> None:
        for name, low in {"startup": 0, "scrape": 0.1, "scrape_delay": 0, "apply_delay": 0, "tail": 0}.items():
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= low):
                raise SetupError(f"{name}: {value} must be a number of seconds of at least {low}")
        allowed = self.bounds.replicas
        if not allowed.min <= self.replicas <= allowed.max:
            raise SetupError(f"replicas: {self.replicas} is outside the bounds {allowed.min} to {allowed.max}")
        self.hardware.num_blocks(self.limits)

    @property
    def pace(self) -> Pace:
        """What pods are told: the true law, as an operator knows it that has observed for a while."""
        objectives = self.objectives
        return Pace(
            objectives.time_to_first_token if self.late_last else None,
            objectives.inter_token_latency if self.time_budget else None,
            self.hardware.law,
        )


@dataclass(frozen=True, slots=True)
class Moment:
    """The service at one scrape."""

    at: float
    replicas: int
    """Asked for."""
    ready: int
    batch: float
    """Running requests per pod that answered."""
    batch_limit: int
    waiting: float
    kv_percent: float
    """Highest of the pods that answered."""
    queue_seconds: float | None
    """Waiting requests over the finish rate of the last minute; None before the first finish."""


@dataclass(slots=True)
class Outcome:
    """What came of one run; `report.py` makes numbers of it."""

    jobs: list[Job]
    objectives: Objectives
    seconds: float
    """Length of the load: to its last arrival."""
    replica_seconds: float
    timeline: list[Moment] = field(default_factory=list)
    replica_changes: list[tuple[float, int, int]] = field(default_factory=list)
    """(when, from, to)."""
    limits_changes: list[tuple[float, Limits, Limits]] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    """Of the tuner."""


def simulate(
    load: Sequence[Arrival], setup: Setup, policy: Policy, progress: Callable[[float], None] = lambda share: None
) -> Outcome:
    """Runs a load, sorted by time, to its end. Equal arguments (a fresh policy) give equal outcomes.

    `progress` hears the share that is done, at every scrape. Raises `SetupError` for an empty or unsorted load.
    """
    if not load:
        raise SetupError("the load has no requests: nothing to simulate")
    if any(after.at < before.at for before, after in pairwise(load)) or load[0].at < 0:
        raise SetupError("the load must be sorted by time and start at 0 or later")
    return _Run(load, setup, policy, progress).outcome()


class _Run:
    def __init__(
        self, load: Sequence[Arrival], setup: Setup, policy: Policy, progress: Callable[[float], None]
    ) -> None:
        self._load, self._setup, self._policy, self._progress = load, setup, policy, progress
        self._fleet = Fleet(
            setup.hardware, setup.limits, setup.replicas, setup.router, setup.startup, setup.seed, setup.pace
        )
        self._limits, self._generation, self._replicas = setup.limits, 1, setup.replicas
        self._trial: Trial | None = None
        self._events: list[tuple[float, int, Callable[[float, Any], None], Any]] = []
        self._scheduled = 0
        self._ends: deque[float] = deque()
        self._end = load[-1].at
        self._outcome = Outcome([], setup.objectives, self._end, 0.0)

    def outcome(self) -> Outcome:
        self._at(self._setup.scrape, self._scrape)
        for fault in self._setup.faults:
            self._at(fault.at, self._disturb, fault)
        fleet = self._fleet
        for request_id, arrival in enumerate(self._load):
            while self._events[0][0] <= arrival.at:
                self._next_event()
            job = Job(request_id, arrival)
            self._outcome.jobs.append(job)
            fleet.submit(job, arrival.at)
        self._outcome.replica_seconds = fleet.replica_seconds(self._end)
        self._finish()
        if isinstance(self._policy, Tuner):
            self._outcome.decisions = self._policy.decisions
        return self._outcome

    def _at(self, at: float, what: Callable[[float, Any], None], argument: Any = None) -> None:
        self._scheduled += 1
        heapq.heappush(self._events, (at, self._scheduled, what, argument))

    def _next_event(self) -> None:
        at, _, what, argument = heapq.heappop(self._events)
        what(at, argument)

    def _finish(self) -> None:
        """Serves what is under way, with what is in force."""
        fleet, limit = self._fleet, self._end + self._setup.tail
        while (at := fleet.next_event) <= limit:
            fleet.advance(at)
        self._progress(1.0)
        for job in self._outcome.jobs:
            if not job.failed and job.output == 0:
                job.failed = "unfinished"

    # Events.

    def _scrape(self, now: float, _: Any) -> None:
        self._fleet.advance(now)
        pods = self._fleet.scrape(now)
        self._remember(now, pods)
        self._at(now + self._setup.scrape_delay, self._decide, pods)
        self._at(now + self._setup.scrape, self._scrape)
        self._progress(min(1.0, now / self._end))

    def _decide(self, now: float, pods: tuple[PodSample, ...]) -> None:
        setup = self._setup
        look = Inputs(
            now=now,
            pods=pods,
            limits=self._limits,
            generation=self._generation,
            replicas=self._replicas,
            bounds=setup.bounds,
            objectives=setup.objectives,
            mode=Mode.AUTO,
            scaling=Scaling.OBSERVED,
            trial=self._trial,
        )
        action = self._policy(look)
        self._scale(action, now)
        if action.limits != self._limits:
            self._outcome.limits_changes.append((now, self._limits, action.limits))
        if (action.limits, action.trial) != (self._limits, self._trial):
            self._limits, self._trial, self._generation = action.limits, action.trial, self._generation + 1
            self._at(now + setup.apply_delay, self._apply, (action.limits, self._generation, action.trial))

    def _scale(self, action: Action, now: float) -> None:
        replicas = self._setup.bounds.replicas.clamp(action.replicas)
        if replicas != self._replicas:
            self._outcome.replica_changes.append((now, self._replicas, replicas))
            self._replicas = replicas
            self._fleet.advance(now)
            self._fleet.scale(replicas, now)

    def _apply(self, now: float, written: tuple[Limits, int, Trial | None]) -> None:
        limits, generation, trial = written
        self._fleet.apply(limits, generation, now, trial)

    def _disturb(self, now: float, fault: Fault) -> None:
        self._fleet.advance(now)
        self._fleet.disturb(fault, now)

    def _remember(self, now: float, pods: tuple[PodSample, ...]) -> None:
        self._ends.extend(job.last for job in self._fleet.take_finished() if job.last is not None)
        while self._ends and self._ends[0] <= now - _FINISH_SECONDS:
            self._ends.popleft()
        seen = [pod.counters for pod in pods if pod.counters is not None]
        waiting = sum(counters.waiting for counters in seen)
        rate = len(self._ends) / min(_FINISH_SECONDS, now)
        self._outcome.timeline.append(
            Moment(
                at=now,
                replicas=self._replicas,
                ready=sum(pod.ready for pod in pods),
                batch=sum(counters.running for counters in seen) / max(1, len(seen)),
                batch_limit=self._limits.batch_size,
                waiting=waiting,
                kv_percent=max((100 * (1 - c.kv_blocks_free / c.kv_blocks) for c in seen), default=0.0),
                queue_seconds=waiting / rate if rate > 0 else None,
            )
        )
