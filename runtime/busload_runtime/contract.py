"""What a runtime pod and the operator agree on: the limits document and the metric names.

Standard library only: the operator imports this module without the runtime's dependencies, and the simulator without
either. Everything else of the runtime is private to it.
"""

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

# The limits document is one JSON file (key of a mounted ConfigMap):
#   {"generation": 3,
#    "default": {"maxSequenceLength": 2048, "batchSize": 8, "kvCachePercent": 90, "tokenBudget": 264,
#                "maxQueuedRequests": 256, "maxQueuedTokens": 262144},
#    "trial": {"pod": "chat-7c9f-abcde", "limits": {...the same six...}},          # only while a change is on trial
#    "objectives": {"timeToFirstTokenMs": 2000, "interTokenLatencyMs": 100},       # both optional, as is the whole
#    "stepLaw": {"a": 0.0076, "b": 0.00017, "c": 0, "d": 0.000048}}                # seconds; absent: nothing is known
# The generation counts changes of limits. Objectives and step law may change under one generation.
# `version` is left out while it is 1. A later version may add fields, and must not change or need them: an operator is
# upgraded before its pods, so a pod ignores what it does not know in a document of a version later than its own. In one
# of its own version an unknown field is a mistake, and refused. The same holds for metrics: the operator does without
# those that the pods of version 1 lack.
VERSION = 1
LIMITS_KEY = "limits.json"
LIMITS_GENERATION_ANNOTATION = "busload.dev/limits-generation"


class LimitsError(ValueError):
    """A limits document that cannot be used; the message names the field, its value and what is allowed."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The hot limits of one runtime pod. All of them change between two engine steps, without losing a request."""

    max_sequence_length: int
    """Prompt plus output tokens of one request."""
    batch_size: int
    """Requests that run in one step (the batch limit)."""
    kv_cache_percent: int
    """Share of the memory left after weights and activations that the KV cache may use, 1-100."""
    token_budget: int
    """Tokens computed in one step, decodes and prefill chunks together. At least `batch_size`."""
    max_queued_requests: int
    """Requests that may wait; one more is refused with 429."""
    max_queued_tokens: int
    """Prompt tokens that may wait; more are refused with 429."""

    def to_json(self) -> dict[str, int]:
        return {_camel(f.name): getattr(self, f.name) for f in fields(self)}


PROMPT_TOKENS = 256
"""Prompt tokens that a step computes beside a full batch. On CPUs more rows per step are hardly cheaper by the row, and
requests that start together would stay together: their prompts then wait for each other at every turn."""


def default_token_budget(batch_size: int) -> int:
    """The token budget that leaves `PROMPT_TOKENS` to prompts when every place of the batch decodes."""
    return batch_size + PROMPT_TOKENS


_RANGES: dict[str, tuple[int, int]] = {
    "max_sequence_length": (16, 16_777_216),
    "batch_size": (1, 4096),
    "kv_cache_percent": (1, 100),
    "token_budget": (16, 1_048_576),
    "max_queued_requests": (0, 1_000_000),
    "max_queued_tokens": (0, 2_000_000_000),
}


@dataclass(frozen=True, slots=True)
class StepLaw:
    """Time of a step in seconds: `a + b*decoding requests + c*KV tokens read + d*prompt tokens computed`.

    The three are the engine's own sums of one step; a chunk of a prompt reads its sequence up to its own end.
    """

    a: float
    b: float
    c: float
    d: float

    def seconds(self, batch: int, kv_tokens: int, prefill_tokens: int) -> float:
        return self.a + self.b * batch + self.c * kv_tokens + self.d * prefill_tokens


@dataclass(frozen=True, slots=True)
class Pace:
    """What the scheduler aims at, and what it predicts steps by. None: unknown, and nothing depends on it."""

    time_to_first_token: float | None = None
    """Objective, in seconds."""
    inter_token_latency: float | None = None
    """Objective for the mean gap between the tokens of a request, in seconds."""
    law: StepLaw | None = None

    def to_json(self) -> dict[str, Any]:
        """The fields `objectives` and `stepLaw` of a limits document, as far as they are known."""
        objectives = {
            name: _milliseconds(value)
            for name, value in zip(_OBJECTIVES, (self.time_to_first_token, self.inter_token_latency), strict=True)
            if value is not None
        }
        body: dict[str, Any] = {"objectives": objectives} if objectives else {}
        return body if self.law is None else {**body, "stepLaw": asdict(self.law)}


_OBJECTIVES = ("timeToFirstTokenMs", "interTokenLatencyMs")
_OBJECTIVE_RANGE = (0.001, 3_600_000.0)  # milliseconds
_LAW_RANGE = (0.0, 3600.0)  # seconds


@dataclass(frozen=True, slots=True)
class LimitsDocument:
    """A parsed limits document."""

    generation: int
    default: Limits
    trial_pod: str | None = None
    trial: Limits | None = None
    pace: Pace = Pace()

    def for_pod(self, pod: str) -> Limits:
        """The limits that apply to the pod of this name."""
        return self.trial if self.trial is not None and pod == self.trial_pod else self.default

    def to_json(self) -> str:
        """The document as text, stable for equal content."""
        body: dict[str, Any] = {"generation": self.generation, "default": self.default.to_json()}
        if self.trial is not None:
            body["trial"] = {"pod": self.trial_pod, "limits": self.trial.to_json()}
        body |= self.pace.to_json()
        return json.dumps(body, sort_keys=True)


def parse_limits(text: str) -> LimitsDocument:
    """Parses a limits document. Raises `LimitsError` naming the field, the value and what is allowed."""
    try:
        body = json.loads(text)
    except ValueError as error:
        raise LimitsError(f"limits document is not JSON: {error}") from None
    except RecursionError:
        raise LimitsError("limits document is nested too deeply") from None
    if not isinstance(body, dict):
        raise LimitsError(f"limits document must be an object, got {type(body).__name__}")
    version = _integer(body.get("version", VERSION), "version", 1, 2**31)
    if version > VERSION:
        body = _without_unknown(body, _FIELDS)
    _known(body, set(_FIELDS), "limits document")
    generation = _integer(body.get("generation"), "generation", 0, 2**53)
    default = _limits(body.get("default"), "default")
    pace = parse_pace({name: body[name] for name in ("objectives", "stepLaw") if name in body})
    trial = body.get("trial")
    if trial is None:
        return LimitsDocument(generation, default, pace=pace)
    if not isinstance(trial, dict):
        raise LimitsError(f"trial must be an object with pod and limits, got {trial!r:.80}")
    _known(trial, {"pod", "limits"}, "trial")
    pod = trial.get("pod")
    if not isinstance(pod, str) or not pod:
        raise LimitsError(f"trial.pod must be the name of a pod, got {pod!r:.80}")
    return LimitsDocument(generation, default, pod, _limits(trial.get("limits"), "trial.limits"), pace)


def _without_unknown(body: dict[str, Any], fields_of: dict[str, Any]) -> dict[str, Any]:
    """The part of a document that this version knows."""
    return {
        name: _without_unknown(value, inner) if isinstance(value, dict) and (inner := fields_of[name]) else value
        for name, value in body.items()
        if name in fields_of
    }


def parse_pace(body: Any) -> Pace:
    """The inverse of `Pace.to_json`. Raises `LimitsError`."""
    if not isinstance(body, dict):
        raise LimitsError(f"objectives and stepLaw must come in an object, got {body!r:.80}")
    _known(body, {"objectives", "stepLaw"}, "objectives and stepLaw")
    first, between = _objectives(body["objectives"]) if "objectives" in body else (None, None)
    return Pace(first, between, _step_law(body["stepLaw"]) if "stepLaw" in body else None)


def _objectives(body: Any) -> tuple[float | None, ...]:
    """In seconds, in the order of `_OBJECTIVES`."""
    if not isinstance(body, dict):
        raise LimitsError(f"objectives must be an object with {' and '.join(_OBJECTIVES)}, got {body!r:.80}")
    _known(body, set(_OBJECTIVES), "objectives")
    return tuple(
        _number(body[name], f"objectives.{name}", *_OBJECTIVE_RANGE) / 1000 if name in body else None
        for name in _OBJECTIVES
    )


def _step_law(body: Any) -> StepLaw:
    names = [field.name for field in fields(StepLaw)]
    if not isinstance(body, dict):
        raise LimitsError(f"stepLaw must be an object with {', '.join(names)}, got {body!r:.80}")
    _known(body, set(names), "stepLaw")
    return StepLaw(**{name: _number(body.get(name), f"stepLaw.{name}", *_LAW_RANGE) for name in names})


def _limits(body: Any, where: str) -> Limits:
    if not isinstance(body, dict):
        raise LimitsError(f"{where} must be an object with {', '.join(map(_camel, _RANGES))}, got {body!r:.80}")
    _known(body, set(map(_camel, _RANGES)), where)
    values = {n: _integer(body.get(_camel(n)), f"{where}.{_camel(n)}", *r) for n, r in _RANGES.items()}
    limits = Limits(**values)
    if limits.token_budget < limits.batch_size:
        raise LimitsError(
            f"{where}.tokenBudget {limits.token_budget} is below {where}.batchSize {limits.batch_size}: "
            "each running request needs one token per step; raise tokenBudget or lower batchSize"
        )
    return limits


def _integer(value: Any, where: str, low: int, high: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise LimitsError(f"{where} must be an integer from {low} to {high}, got {value!r:.80}")
    return value


def _number(value: Any, where: str, low: float, high: float) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:  # NaN neither
        raise LimitsError(f"{where} must be a number from {low:g} to {high:g}, got {value!r:.80}")
    return float(value)


def _milliseconds(seconds: float) -> float | int:
    value = round(1000 * seconds, 3)
    return int(value) if value.is_integer() else value


def _known(body: dict[str, Any], allowed: set[str], where: str) -> None:
    if unknown := sorted(set(body) - allowed):
        raise LimitsError(f"unknown field {unknown[0]!r:.80} in {where}; allowed: {', '.join(sorted(allowed))}")


def _camel(name: str) -> str:
    head, *tail = name.split("_")
    return head + "".join(word.capitalize() for word in tail)


_LIMITS_FIELDS: dict[str, Any] = {_camel(name): {} for name in _RANGES}
_FIELDS: dict[str, Any] = {
    "version": {},
    "generation": {},
    "default": _LIMITS_FIELDS,
    "trial": {"pod": {}, "limits": _LIMITS_FIELDS},
    "objectives": {name: {} for name in _OBJECTIVES},
    "stepLaw": {field.name: {} for field in fields(StepLaw)},
}
"""Of a limits document of this version, each with the fields inside it."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One exported metric family. `kind` is counter, gauge or histogram; counters are named with `_total`."""

    name: str
    kind: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


_SECONDS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
SEQUENCE_LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
"""Bounds of the histogram of whole lengths: what the operator can count requests above, and so move
`maxSequenceLength` to."""
REFUSAL_REASONS = ("invalid", "too_long", "queue_full", "tenant_limit", "unauthorized", "draining")
FINISH_REASONS = ("stop", "length", "abort", "timeout", "error")
OBJECTIVES = ("time_to_first_token", "inter_token_latency")
COEFFICIENTS = tuple(field.name for field in fields(StepLaw))

# The first five are what gateways read, in vLLM's spelling. All are present, as 0, from the first scrape.
METRICS: tuple[Metric, ...] = (
    Metric("vllm:num_requests_waiting", "gauge", "Requests that wait for a place in the batch.", ("model_name",)),
    Metric("vllm:num_requests_running", "gauge", "Requests in the running batch.", ("model_name",)),
    Metric("vllm:kv_cache_usage_perc", "gauge", "KV blocks in use by requests, 0 to 1.", ("model_name",)),
    Metric(
        "vllm:cache_config_info",
        "gauge",
        "KV cache geometry; always 1.",
        ("model_name", "block_size", "num_gpu_blocks"),
    ),
    Metric(
        "vllm:lora_requests_info",
        "gauge",
        "Adapters in use (none are supported); the value is the time of the snapshot.",
        ("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
    ),
    # Work, as counters a fit can use. Step sums and the busy time belong to the same finished steps.
    Metric("busload_engine_steps_total", "counter", "Finished engine steps."),
    Metric("busload_engine_busy_seconds_total", "counter", "Seconds spent inside engine steps."),
    Metric("busload_step_batch_total", "counter", "Sum over steps of decoding requests in the step."),
    Metric("busload_step_kv_tokens_total", "counter", "Sum over steps of KV tokens read by attention in the step."),
    Metric("busload_step_prefill_tokens_total", "counter", "Prompt tokens computed (recomputation included)."),
    Metric("busload_generated_tokens_total", "counter", "Tokens sampled."),
    Metric("busload_requests_arrived_total", "counter", "Requests admitted to the queue."),
    Metric("busload_prompt_tokens_arrived_total", "counter", "Prompt tokens of admitted requests."),
    Metric("busload_requests_refused_total", "counter", "Requests refused before the queue.", ("reason",)),
    Metric("busload_requests_finished_total", "counter", "Requests ended, by finish reason.", ("reason",)),
    Metric("busload_preemptions_total", "counter", "Requests preempted (recomputed later)."),
    Metric("busload_prefix_cache_queried_tokens_total", "counter", "Prompt tokens looked up in the prefix cache."),
    Metric("busload_prefix_cache_hit_tokens_total", "counter", "Prompt tokens found in the prefix cache."),
    Metric("busload_bytes_moved_total", "counter", "Weight and KV bytes read and written by engine steps."),
    # Time integrals on the engine's own clock: a difference over a difference of the clock is a true mean.
    Metric("busload_engine_clock_seconds", "gauge", "Engine clock (monotonic) at which this snapshot was taken."),
    Metric("busload_batch_seconds_total", "counter", "Time integral of running requests, in request seconds."),
    Metric("busload_queue_seconds_total", "counter", "Time integral of waiting requests, in request seconds."),
    Metric("busload_kv_token_seconds_total", "counter", "Time integral of KV tokens held by requests."),
    # Levels.
    Metric("busload_queued_prompt_tokens", "gauge", "Prompt tokens of waiting requests that are not computed yet."),
    Metric("busload_kv_blocks", "gauge", "KV blocks in the pool."),
    Metric("busload_kv_blocks_free", "gauge", "KV blocks that no request uses (cached blocks count as free)."),
    Metric("busload_kv_block_size_tokens", "gauge", "Tokens per KV block."),
    Metric("busload_kv_bytes_per_token", "gauge", "Bytes of KV cache per token."),
    Metric("busload_memory_budget_bytes", "gauge", "Memory the runtime may use in all."),
    Metric("busload_weight_bytes", "gauge", "Bytes of weights read by one step."),
    Metric("busload_copy_bandwidth_bytes_per_second", "gauge", "Copy bandwidth measured at start."),
    Metric(
        "busload_model_bandwidth_utilization",
        "gauge",
        "Weight and KV bytes moved per second of step time in the last 10 s, as a share of the copy bandwidth.",
    ),
    # Limits.
    Metric("busload_limits_generation", "gauge", "Generation of the limits document that is applied."),
    Metric("busload_limits_errors_total", "counter", "Limits documents refused (malformed or impossible)."),
    Metric(
        "busload_tenant_tokens_total",
        "counter",
        "Prompt and output tokens of ended requests, by the name of their API key; other: without one, or past the "
        "first hundred names.",
        ("tenant",),
    ),
    Metric("busload_api_keys", "gauge", "API keys in force; 0: none is asked for."),
    Metric("busload_api_keys_errors_total", "counter", "Contents of the API keys file that were refused."),
    Metric("busload_limit_max_sequence_length", "gauge", "Applied maxSequenceLength."),
    Metric("busload_limit_batch_size", "gauge", "Applied batchSize."),
    Metric("busload_limit_kv_cache_percent", "gauge", "Applied kvCachePercent."),
    Metric("busload_limit_token_budget", "gauge", "Applied tokenBudget."),
    Metric("busload_limit_queued_requests", "gauge", "Applied maxQueuedRequests."),
    Metric("busload_limit_queued_tokens", "gauge", "Applied maxQueuedTokens."),
    Metric("busload_objective_seconds", "gauge", "Applied objective; 0: none is known.", ("objective",)),
    Metric(
        "busload_step_law_seconds",
        "gauge",
        "Applied step law: seconds per step (a), decoding request (b), KV token (c), prompt token (d); "
        "all 0: none is known.",
        ("coefficient",),
    ),
    Metric(
        "busload_probed_step_law_seconds",
        "gauge",
        "Step law fitted to steps tried at start: seconds per step (a), decoding request (b), KV token (c), prompt "
        "token (d); all 0: none could be.",
        ("coefficient",),
    ),
    Metric("busload_probed_batch", "gauge", "Largest batch that was tried at start."),
    # What clients feel. TTFT starts at arrival, before tokenising.
    Metric("busload_time_to_first_token_seconds", "histogram", "Arrival to first token.", (), _SECONDS),
    Metric("busload_inter_token_latency_seconds", "histogram", "Time between two tokens of a request.", (), _SECONDS),
    Metric("busload_queue_wait_seconds", "histogram", "Arrival to first time in the batch.", (), _SECONDS),
    Metric("busload_prompt_length_tokens", "histogram", "Prompt lengths of admitted requests.", (), _TOKENS),
    Metric("busload_output_length_tokens", "histogram", "Output lengths of finished requests.", (), _TOKENS),
    Metric(
        "busload_sequence_length_tokens",
        "histogram",
        "Prompt and output tokens together of finished requests.",
        (),
        SEQUENCE_LENGTHS,
    ),
    Metric(
        "busload_answers_cut_total",
        "counter",
        "Answers that ended at maxSequenceLength although the client allowed more tokens.",
    ),
    # Of the requests of both histograms: D is their output tokens, P their prompt tokens.
    Metric("busload_finished_prompt_tokens_total", "counter", "Prompt tokens of finished requests."),
    Metric(
        "busload_finished_kv_token_steps_total",
        "counter",
        "Sum of D*(P+D/2) over finished requests of P prompt and D output tokens: KV tokens that their decodes read.",
    ),
    # Each request counts once for each objective that it could be judged by, and only while one is known.
    Metric("busload_objective_requests_total", "counter", "Requests judged by an objective.", ("objective",)),
    Metric(
        "busload_objective_misses_total",
        "counter",
        "Requests that missed an objective: first token too late, or mean time between tokens too long.",
        ("objective",),
    ),
)
