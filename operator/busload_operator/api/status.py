"""The status of an `InferenceService`: what the operator saw, chose and why.

Everything is optional, bounded and free of floats: decimal numbers are strings. Words like bottlenecks, knobs and
verdicts are plain CamelCase strings, not enums: a new word must not make an older CRD refuse the whole status.
"""

from typing import Annotated, Literal

from pydantic import Field

from busload_operator.api.schema import Integer, Model

Word = Annotated[str, Field(max_length=64, pattern=r"^([A-Za-z][A-Za-z0-9]*)?$")]
Number = Annotated[str, Field(max_length=32)]
Message = Annotated[str, Field(max_length=1024)]
Time = Annotated[str, Field(max_length=40, json_schema_extra={"format": "date-time"})]
Count = Annotated[Integer, Field(ge=0, json_schema_extra={"format": "int64"})]


class Condition(Model):
    """One condition, in the form of metav1.Condition."""

    type: Annotated[str, Field(max_length=64, pattern=r"^[A-Za-z][A-Za-z0-9]*$")]
    """Ready (always there), Reconciling and Stalled (only while true), Feasible (whether model and memory can meet
    bounds and objectives at all), Tuning (its reason says why it holds)."""
    status: Literal["True", "False", "Unknown"]
    observed_generation: Count | None = None
    """The generation of the spec that this condition is about."""
    last_transition_time: Time
    """When `status` last changed."""
    reason: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z][A-Za-z0-9]*$")]
    """Why, as one CamelCase word."""
    message: Annotated[str, Field(max_length=4096)]
    """Why, in words."""


class Summary(Model):
    """Observations as the printed columns show them."""

    batch: Number | None = None
    """Mean batch of the batch limit, like 3.9/4."""
    kv: Number | None = None
    """KV cache in use, like 6%."""
    wait: Number | None = None
    """Wait of a new request, like 8.2s."""


class Observed(Model):
    """Observations over the last window. Rounded, so that an idle service writes nothing."""

    batch: Number | None = None
    """Mean number of requests that ran in one step."""
    batch_limit: Count | None = None
    """The batch limit that was in force."""
    queue_depth: Number | None = None
    """Mean number of requests that waited for a place in the batch."""
    wait: Number | None = None
    """Queue depth divided by the finish rate: what a request that arrives now will wait."""
    kv_cache_percent: Count | None = None
    """KV blocks in use by requests, in percent of the pool."""
    tokens_per_second: Number | None = None
    """Tokens generated per second, all replicas together."""
    time_to_first_token: Number | None = None
    """Mean time from arrival to first token, of the first tokens in the window; absent when there were none."""
    inter_token_latency: Number | None = None
    """Mean time between two tokens of a request; absent when there were none in the window."""
    summary: Summary | None = None


class Tuned(Model):
    """The limits and replicas that the operator has put in force."""

    generation: Count | None = None
    """Generation of the limits document; pods report the one they run."""
    max_sequence_length: Count | None = None
    """Longest request, prompt and output together, in tokens."""
    batch_size: Count | None = None
    """Requests that run in one step."""
    kv_cache_percent: Count | None = None
    """KV cache, in percent of the memory left after weights and activations."""
    token_budget: Count | None = None
    """Tokens computed in one step."""
    max_queued_requests: Count | None = None
    """Requests that may wait; more are refused with 429."""
    max_queued_tokens: Count | None = None
    """Prompt tokens that may wait; more are refused with 429."""
    replicas: Count | None = None
    """Replicas that should run."""


class Trial(Model):
    """A change that one pod tries alone; the others get it when it is no worse there."""

    pod: Annotated[str, Field(max_length=253)]
    decision: Count | None = None
    """The id of the decision."""


class Diagnosis(Model):
    """What limits the service, once it has lasted, with the numbers that said so then."""

    bottleneck: Word
    since: Time
    evidence: Message


class Law(Model):
    """The fitted law of one step's time, in seconds."""

    formula: Annotated[str, Field(max_length=128)] | None = None
    a: Number | None = None
    """Fixed time of a step: reading the weights once."""
    b: Number | None = None
    """Time per decoding request."""
    c: Number | None = None
    """Time per KV token read."""
    d: Number | None = None
    """Time per prefill token."""
    error: Number | None = None
    """Relative error of the fit."""
    samples: Count | None = None
    """Windows the fit rests on."""
    batch_min: Number | None = None
    """Smallest mean batch among the samples."""
    batch_max: Number | None = None
    """Largest mean batch among the samples."""


class Evidence(Model):
    """One observation that a decision rests on."""

    name: Annotated[str, Field(min_length=1, max_length=64)]
    value: Number


class Prediction(Model):
    """What a decision should bring."""

    tokens_per_second: Number | None = None
    wait: Number | None = None
    inter_token_latency: Number | None = None


class Window(Model):
    """From when to when something was measured."""

    from_: Annotated[Time, Field(alias="from")]
    to: Time


class Outcome(Model):
    """What a decision brought."""

    verdict: Word | None = None
    """Pending, Confirmed, Worse, RolledBack or Inconclusive."""
    tokens_per_second_before: Number | None = None
    tokens_per_second_after: Number | None = None
    before_window: Window | None = None
    """When tokensPerSecondBefore was measured."""
    after_window: Window | None = None
    """When tokensPerSecondAfter was measured."""
    message: Message | None = None


class Decision(Model):
    """One change of one setting, with its reasons and its result."""

    id: Count
    time: Time
    knob: Word
    """batchSize, kvCachePercent, maxSequenceLength, tokenBudget or replicas."""
    from_: Annotated[str, Field(alias="from", max_length=32)]
    """The value before."""
    to: Number
    """The value after."""
    reason: Word
    """Why, as one CamelCase word."""
    message: Message
    """Why, in one sentence."""
    inputs: Annotated[tuple[Evidence, ...], Field(max_length=16)] = ()
    """The observations that decided."""
    prediction: Prediction | None = None
    outcome: Outcome | None = None


class Status(Model):
    """What the operator saw, chose and why."""

    observed_generation: Count | None = None
    """The generation of the spec that this status is about."""
    replicas: Count | None = None
    """Pods that exist."""
    ready_replicas: Count | None = None
    """Pods that are ready to serve."""
    selector: Annotated[str, Field(max_length=512)] | None = None
    """Label selector of the pods, for autoscalers."""
    endpoint: Annotated[str, Field(max_length=512)] | None = None
    """Base URL of the OpenAI API inside the cluster."""
    conditions: Annotated[
        tuple[Condition, ...],
        Field(
            max_length=16,
            json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
        ),
    ] = ()
    bottleneck: Word | None = None
    """What limits the service: Idle, UnderBatched, SlotBound, KVBound, PrefillBound, DecodeBound, Saturated, Starting
    or Stale (no fresh observations)."""
    diagnosis: Diagnosis | None = None
    """The newest bottleneck that lasted for ten seconds."""
    observed: Observed | None = None
    tuned: Tuned | None = None
    trial: Trial | None = None
    """Only while a change is on trial in one pod alone."""
    law: Law | None = None
    decisions: Annotated[tuple[Decision, ...], Field(max_length=10)] = ()
    """The last decisions, newest first."""
