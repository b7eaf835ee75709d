"""What goes into the tuning core and what comes out. Frozen; seconds are floats, percentages are 0 to 100."""

from dataclasses import dataclass
from enum import StrEnum

from busload_operator.tuning.counters import Counters, Probed
from busload_runtime.contract import Limits


class Mode(StrEnum):
    """`spec.tuning.mode`."""

    AUTO = "Auto"
    RECOMMEND = "Recommend"
    OFF = "Off"


class Scaling(StrEnum):
    """`spec.scaling.mode`."""

    OBSERVED = "Observed"
    EXTERNAL = "External"


class Bottleneck(StrEnum):
    """What limits the service now (`status.bottleneck`)."""

    IDLE = "Idle"
    UNDER_BATCHED = "UnderBatched"
    SLOT_BOUND = "SlotBound"
    KV_BOUND = "KVBound"
    PREFILL_BOUND = "PrefillBound"
    DECODE_BOUND = "DecodeBound"
    SATURATED = "Saturated"
    STARTING = "Starting"
    STALE = "Stale"


class Knob(StrEnum):
    BATCH_SIZE = "batchSize"
    KV_CACHE_PERCENT = "kvCachePercent"
    MAX_SEQUENCE_LENGTH = "maxSequenceLength"
    TOKEN_BUDGET = "tokenBudget"
    """Of a step. No bound in the spec: the inter-token objective bounds it."""
    REPLICAS = "replicas"


class Reason(StrEnum):
    """Why a decision was made, as one word for machines; `Decision.message` says it for people."""

    WAIT_FROM_BATCH_LIMIT = "WaitFromBatchLimit"
    WAIT_FROM_KV_CACHE = "WaitFromKVCache"
    WAIT_FROM_TOKEN_BUDGET = "WaitFromTokenBudget"
    SETTINGS_CANNOT_CLEAR_WAIT = "SettingsCannotClearWait"
    TIME_LIMIT_PASSED = "TimeLimitPassed"
    OFFERED_WORK = "OfferedWork"
    OUT_OF_MEMORY = "OutOfMemory"
    NEARLY_FULL = "NearlyFull"
    REQUESTS_TOO_LONG = "RequestsTooLong"
    INTER_TOKEN_OBJECTIVE_MISSED = "InterTokenObjectiveMissed"
    LOW_USE = "LowUse"


class Verdict(StrEnum):
    PENDING = "Pending"
    CONFIRMED = "Confirmed"
    WORSE = "Worse"
    """Worse than before, and left as it is (replicas: the next decision repairs it)."""
    ROLLED_BACK = "RolledBack"
    """Worse than before or never applied, and put back."""
    INCONCLUSIVE = "Inconclusive"


@dataclass(frozen=True, slots=True)
class Range:
    """Both ends belong to it. Raises `ValueError` when it is empty."""

    min: int
    max: int

    def __post_init__(self) -> None:
        if self.min > self.max:
            raise ValueError(f"range min {self.min} is above max {self.max}; min must not be larger than max")

    def clamp(self, value: int) -> int:
        return min(max(value, self.min), self.max)


@dataclass(frozen=True, slots=True)
class Bounds:
    """`spec.bounds`: nothing in a `Result` is ever outside (replicas: in `Scaling.OBSERVED`)."""

    max_sequence_length: Range
    kv_cache_percent: Range
    batch_size: Range
    batch_size_initial: int
    """What a new service starts with; an idle service is not lowered further than this."""
    replicas: Range


@dataclass(frozen=True, slots=True)
class Objectives:
    """`spec.objectives`, in seconds."""

    time_to_first_token: float
    inter_token_latency: float
    share: float = 0.99
    """Of the requests, that should be inside both; replicas are planned for it."""

    @property
    def allowed_misses(self) -> float:
        """Share of requests that may be outside."""
        return 1 - self.share


@dataclass(frozen=True, slots=True)
class PodSample:
    """One scrape of one pod. `at` is when it was taken, on the clock of `Inputs.now`."""

    pod: str
    at: float
    counters: Counters | None
    """None: the scrape failed or its text was unusable (missing metrics)."""
    ready: bool
    problem: str = "no usable answer to the scrape"
    """Why there are no counters."""
    memory_kills: int = 0
    """How often the pod had been restarted when its container was last killed for its memory; 0: it was not."""
    probed: Probed | None = None
    """None: the pod has not tried any steps."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Limits that one pod tries before the others get them (the limits document's `trial`)."""

    pod: str
    limits: Limits


@dataclass(frozen=True, slots=True)
class Inputs:
    """Everything `step` knows. `limits`, `generation` and `replicas` are what is in force (written) now."""

    now: float
    pods: tuple[PodSample, ...]
    limits: Limits
    generation: int
    replicas: int
    """Replicas the Deployment asks for; pods that are not ready yet count as present."""
    bounds: Bounds
    objectives: Objectives
    mode: Mode
    scaling: Scaling
    trial: Trial | None = None
    """Written now, too."""


@dataclass(frozen=True, slots=True)
class Observed:
    """Time-weighted means over the last 15 seconds on the engines' clocks, over the pods that answered."""

    batch: float
    """Running requests per pod."""
    batch_limit: int
    queue_depth: float
    """Waiting requests of all pods."""
    wait: float | None
    """Queue depth divided by the finish rate (tokens per busy second / mean output length), in seconds; 0 without a
    queue, None when it is not known yet."""
    wait_is_lower_bound: bool
    """No request has finished yet, so `wait` is only known to be at least this."""
    kv_cache_percent: float
    """Highest share of KV blocks in use that a scrape saw on any pod."""
    tokens_per_second: float
    """Sampled tokens per second of all pods."""
    time_to_first_token: float | None
    """Mean of first tokens in the window, seconds; None: there were none."""
    inter_token_latency: float | None
    """Mean, seconds; None: there were none."""
    preemptions: int
    pods: int
    """Pods these numbers come from."""
    silent: tuple[str, ...]
    """Ready pods that are set aside, each as `name: why`."""


@dataclass(frozen=True, slots=True)
class Law:
    """Step time `t = a + b*batch + c*kv + d*prefill`, seconds, fitted by non-negative least squares.

    `batch` is decoding requests, `kv` KV tokens read, `prefill` prompt tokens, each of one step.
    """

    a: float
    b: float
    c: float
    d: float
    error: float
    """Relative root mean square error over the (forgetting) windows, 0.06 is 6%."""
    samples: int
    """Pod windows seen."""
    batch_min: float
    batch_max: float
    """Mean batch per step of the windows seen: the law is known between these, and trusted 30% beyond."""
    usable: bool
    """Enough windows, a small enough error, and batches different enough to tell a from b."""
    covariance: tuple[tuple[float, ...], ...] = ((0.0,) * 4,) * 4
    """Of a, b, c, d: the squares of their standard errors are on its diagonal. From the scatter of the windows, which
    are taken to be independent."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a change is expected to bring; None where nothing is known."""

    tokens_per_second: float | None
    wait: float | None
    inter_token_latency: float | None
    basis: str
    """Where the numbers come from, for people: the law, the law extrapolated, or a bound."""


@dataclass(frozen=True, slots=True)
class Outcome:
    verdict: Verdict
    tokens_per_second_before: float | None = None
    tokens_per_second_after: float | None = None
    message: str = ""
    span_before: tuple[float, float] | None = None
    """Start and end of the windows behind `tokens_per_second_before`, on the clock of `Inputs.now`."""
    span_after: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """One change (in `Mode.RECOMMEND`: one recommendation)."""

    id: int
    at: float
    """Seconds on the clock of `Inputs.now`."""
    knob: Knob
    before: int
    after: int
    reason: Reason
    message: str
    inputs: tuple[tuple[str, str], ...]
    """The numbers that decided, as (name, value with unit)."""
    prediction: Prediction
    outcome: Outcome
    applied: bool
    """False: a recommendation; limits and replicas were not changed."""


@dataclass(frozen=True, slots=True)
class Result:
    """What `step` found and what should be in force now."""

    observed: Observed | None
    """None: no pod gave a usable window."""
    bottleneck: Bottleneck
    evidence: str
    """One sentence with the numbers behind `bottleneck`."""
    law: Law | None
    decision: Decision | None
    """The change made in this step, if any."""
    closed: tuple[Decision, ...]
    """Earlier decisions whose outcome became known in this step (same `id`, final outcome)."""
    limits: Limits
    replicas: int
    hold: str | None
    """Why nothing is changed although something would be, or why the data cannot be used; None: nothing to do."""
    trial: Trial | None = None
    """What one pod should try."""
    disarmed: str | None = None
    """By how much the step law misses step times, when that is more than it may, and when it is used again."""
