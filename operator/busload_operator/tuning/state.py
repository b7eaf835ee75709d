"""What the core remembers from step to step. Immutable: `step` returns a new one."""

import math
from dataclasses import dataclass, field
from enum import StrEnum

from busload_operator.tuning.demand import Arrivals, Lengths
from busload_operator.tuning.diagnose import Diagnosis
from busload_operator.tuning.fit import Fit
from busload_operator.tuning.sizing import Sizing
from busload_operator.tuning.tail import Tail
from busload_operator.tuning.types import Decision, Knob
from busload_operator.tuning.window import Base, PodWindow
from busload_runtime.contract import Limits


@dataclass(frozen=True, slots=True)
class Usage:
    """How busy the service was in one step; kept for the slow decisions."""

    at: float
    running_per_pod: float
    """Highest number of running requests of any pod."""
    running: float
    """Running requests of all pods."""
    queue: float
    tokens_per_second: float


class Phase(StrEnum):
    CALM = "calm"
    QUEUE = "queue"
    """Requests wait."""
    SLOW = "slow"
    """Nothing waits, but tokens take longer than the objective."""


@dataclass(frozen=True, slots=True)
class Streak:
    """Steps in a row whose windows show the same phase."""

    phase: Phase = Phase.CALM
    count: int = 0
    since: float = 0.0
    """Start of the first window."""
    first_end: float = 0.0
    """End of the first windows."""


@dataclass(frozen=True, slots=True)
class TrialPod:
    """A change that one pod tries first."""

    pod: str
    before: tuple[PodWindow, ...]
    """Of all pods under load before it; empty: there was no load to compare with."""
    applied_at: float | None = None
    """When the pod was first seen with the new values."""
    after: tuple[PodWindow, ...] = ()
    """Of all pods since then."""


@dataclass(frozen=True, slots=True)
class Pending:
    """A change whose outcome is not known yet."""

    decision: Decision
    limits_before: Limits
    limits_after: Limits
    replicas_before: int
    replicas_after: int
    pods: tuple[str, ...]
    """Ready pods when it was made."""
    tokens_per_second_before: float | None
    """Of all ready pods while there was load; None: there was none."""
    inter_token_before: float | None
    prefill_before: float
    """Prompt tokens per busy second in the same windows."""
    span_before: tuple[float, float] | None
    """Start and end of those windows."""
    before: tuple[PodWindow, ...] = ()
    """Those windows: how much they scatter says what a difference is worth."""
    applied_at: float | None = None
    """When the pods were first seen with the new values."""
    quiet: int = 0
    """Steps in a row without load since then."""
    loaded: tuple[PodWindow, ...] = ()
    """Windows of the steps under load since then."""
    trial: TrialPod | None = None
    """None: all pods have it."""
    passed_at: float | None = None
    """When it had passed its trial and went to all pods."""
    settle: float = 10.0
    """Seconds after which it can be judged at the earliest."""

    @property
    def written_at(self) -> float:
        """When all pods were to get it."""
        return self.decision.at if self.passed_at is None else self.passed_at

    def is_overruled(self, limits: Limits, replicas: int) -> bool:
        """Whether what is in force is neither the value before nor the one after: somebody else decides, too."""
        values = {
            Knob.BATCH_SIZE: limits.batch_size,
            Knob.KV_CACHE_PERCENT: limits.kv_cache_percent,
            Knob.MAX_SEQUENCE_LENGTH: limits.max_sequence_length,
            Knob.TOKEN_BUDGET: limits.token_budget,
            Knob.REPLICAS: replicas,
        }
        return values[self.decision.knob] not in (self.decision.before, self.decision.after)


@dataclass(frozen=True, slots=True)
class Refused:
    """A value that did not help: not tried again at once."""

    knob: Knob
    value: int
    """Values from here on: upwards, or with `down` downwards (maxSequenceLength)."""
    until: float
    down: bool = False
    law_from: float = math.inf
    """From then on it is tried again if a usable law says that it is worth it."""

    def holds(self, now: float, law: bool) -> bool:
        """`law`: there is a usable one."""
        return now < self.until and not (law and now >= self.law_from)


@dataclass(frozen=True, slots=True)
class Recommended:
    """A recommendation that was made: none for this knob at this value is made again until then."""

    knob: Knob
    before: int
    until: float


@dataclass(frozen=True, slots=True)
class State:
    next_id: int = 1
    bases: tuple[tuple[str, Base], ...] = ()
    windows: tuple[PodWindow, ...] = ()
    """Of the last minute."""
    fit: Fit = field(default_factory=Fit)
    model_error: float = 0.0
    """By what share the law has missed the step times of the last ten or so pod windows."""
    disarmed_at: float | None = None
    """Since when that is over the bar."""
    output_length: float | None = None
    """Mean output tokens of finished requests, slowly forgetting."""
    arrivals: tuple[Arrivals, ...] = ()
    """Of the last half hour."""
    lengths: Lengths = field(default_factory=Lengths)
    tail: Tail = field(default_factory=Tail)
    sizing: Sizing = field(default_factory=Sizing)
    found: Limits | None = None
    """In force in the last step."""
    asked: Limits | None = None
    """What it asked for."""
    usage: tuple[Usage, ...] = ()
    """Of the last five minutes, without a hole: cleared when a step knew too little or the settings changed."""
    seen_at: float | None = None
    """Last step in which enough pods spoke."""
    streak: Streak = field(default_factory=Streak)
    missed_since: float | None = None
    """Start of the present run of windows whose wait is over the objective."""
    diagnosis: Diagnosis | None = None
    """Of the last step that saw the service."""
    pending: Pending | None = None
    restored: Limits | None = None
    """Limits that a rollback asked for, until they are in force."""
    changed_at: float | None = None
    """Last change of any knob."""
    refused: tuple[Refused, ...] = ()
    recommended: tuple[Recommended, ...] = ()
    starting: tuple[tuple[str, float | None], ...] = ()
    """Pods that are not ready, and since when they are there; None: not known, or they were ready before."""
    stepped_at: float | None = None
    """`Inputs.now` of the last step."""
    kills: tuple[tuple[str, int], ...] = ()
    """`PodSample.memory_kills` of the last step."""
    startup_seconds: float | None = None
    """Measured: from a replica's being there to its being ready."""

    @classmethod
    def initial(cls, next_id: int = 1) -> "State":
        """Nothing known. `next_id` continues the numbering of decisions after a restart of the operator."""
        return cls(next_id=next_id)
