"""One pod's counters, taken from its parsed `/metrics`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from busload_runtime.contract import SEQUENCE_LENGTHS


class CountersError(ValueError):
    """A scrape that cannot be used; the message names the metric."""


@dataclass(frozen=True, slots=True)
class Counters:
    """One snapshot of one engine. Values are as scraped: they may be NaN or lie, `window` judges them.

    All but the levels (`LEVELS`) only grow while the engine process lives. Those at the end are None where a pod, being
    of an earlier version, does not export them: unknown, which is not zero.
    """

    clock: float
    """Engine clock, seconds."""
    steps: float
    busy_seconds: float
    step_batch: float
    """Sum over steps of decoding requests."""
    step_kv_tokens: float
    """Sum over steps of KV tokens read."""
    prefill_tokens: float
    generated_tokens: float
    arrived: float
    preemptions: float
    batch_seconds: float
    """Time integral of running requests."""
    queue_seconds: float
    kv_token_seconds: float
    ttft_sum: float
    ttft_count: float
    itl_sum: float
    itl_count: float
    output_tokens_sum: float
    """Output tokens of finished requests."""
    finished: float
    running: float
    waiting: float
    kv_blocks: float
    kv_blocks_free: float
    kv_block_size: float
    generation: float
    max_sequence_length: float
    batch_size: float
    kv_cache_percent: float
    token_budget: float
    prompt_tokens_arrived: float | None = None
    finished_prompt_tokens: float | None = None
    """Prompt tokens P of the requests that `finished` counts."""
    finished_kv_token_steps: float | None = None
    """Sum of D*(P+D/2) over them, D their output tokens: divided by the sum of D, the KV tokens that a mean decode
    reads."""
    ttft_judged: float | None = None
    """Requests whose time to first token was compared with the objective the pod was told; `ttft_missed` were over."""
    ttft_missed: float | None = None
    itl_judged: float | None = None
    """The same for the mean time between a request's tokens."""
    itl_missed: float | None = None
    too_long: float | None = None
    """Requests refused because their prompt alone is as long as `maxSequenceLength`."""
    answers_cut: float | None = None
    """Answers that ended at `maxSequenceLength` although their client allowed more."""
    sequence_lengths: tuple[float, ...] | None = None
    """Finished requests whose prompt and output together are at most as long as each of `SEQUENCE_LENGTHS`."""


@dataclass(frozen=True, slots=True)
class Probed:
    """The step law `t = a + b*batch + c*kv + d*prefill` as steps took that a pod tried before it was ready, in
    batches up to `batch`."""

    a: float
    b: float
    c: float
    d: float
    batch: int


# Field of Counters -> sample name in the exposition format.
SAMPLES: dict[str, str] = {
    "clock": "busload_engine_clock_seconds",
    "steps": "busload_engine_steps_total",
    "busy_seconds": "busload_engine_busy_seconds_total",
    "step_batch": "busload_step_batch_total",
    "step_kv_tokens": "busload_step_kv_tokens_total",
    "prefill_tokens": "busload_step_prefill_tokens_total",
    "generated_tokens": "busload_generated_tokens_total",
    "arrived": "busload_requests_arrived_total",
    "preemptions": "busload_preemptions_total",
    "batch_seconds": "busload_batch_seconds_total",
    "queue_seconds": "busload_queue_seconds_total",
    "kv_token_seconds": "busload_kv_token_seconds_total",
    "ttft_sum": "busload_time_to_first_token_seconds_sum",
    "ttft_count": "busload_time_to_first_token_seconds_count",
    "itl_sum": "busload_inter_token_latency_seconds_sum",
    "itl_count": "busload_inter_token_latency_seconds_count",
    "output_tokens_sum": "busload_output_length_tokens_sum",
    "finished": "busload_output_length_tokens_count",
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "kv_blocks": "busload_kv_blocks",
    "kv_blocks_free": "busload_kv_blocks_free",
    "kv_block_size": "busload_kv_block_size_tokens",
    "generation": "busload_limits_generation",
    "max_sequence_length": "busload_limit_max_sequence_length",
    "batch_size": "busload_limit_batch_size",
    "kv_cache_percent": "busload_limit_kv_cache_percent",
    "token_budget": "busload_limit_token_budget",
}

# What a pod may lack.
OPTIONAL_SAMPLES: dict[str, str] = {
    "prompt_tokens_arrived": "busload_prompt_tokens_arrived_total",
    "finished_prompt_tokens": "busload_finished_prompt_tokens_total",
    "finished_kv_token_steps": "busload_finished_kv_token_steps_total",
    "ttft_judged": 'busload_objective_requests_total{objective="time_to_first_token"}',
    "ttft_missed": 'busload_objective_misses_total{objective="time_to_first_token"}',
    "itl_judged": 'busload_objective_requests_total{objective="inter_token_latency"}',
    "itl_missed": 'busload_objective_misses_total{objective="inter_token_latency"}',
    "too_long": 'busload_requests_refused_total{reason="too_long"}',
    "answers_cut": "busload_answers_cut_total",
}
LENGTH_SAMPLES = tuple(f'busload_sequence_length_tokens_bucket{{le="{bound:.1f}"}}' for bound in SEQUENCE_LENGTHS)
"""The series behind `Counters.sequence_lengths`; a pod may lack them, too."""

# The law of the steps that a pod tried before it was ready.
PROBED_LAW = tuple(f'busload_probed_step_law_seconds{{coefficient="{name}"}}' for name in "abcd")
PROBED_BATCH = "busload_probed_batch"

# The levels: everything else is cumulative and must not fall.
LEVELS = frozenset(
    {
        "running",
        "waiting",
        "kv_blocks",
        "kv_blocks_free",
        "kv_block_size",
        "generation",
        "max_sequence_length",
        "batch_size",
        "kv_cache_percent",
        "token_budget",
    }
)
CUMULATIVE = tuple(name for name in SAMPLES if name not in LEVELS)


def counters_from_samples(samples: Mapping[str, float]) -> Counters:
    """Counters from sample name -> value, as in the Prometheus text (label sets of one name already summed, beside the
    single series whose names carry labels).

    Samples that are not needed are ignored. Raises `CountersError` naming every needed sample that is missing.
    """
    if missing := sorted(name for name in SAMPLES.values() if name not in samples):
        raise CountersError(
            f"/metrics lacks {', '.join(missing)}: is the pod a busload runtime of the operator's version?"
        )
    found = SAMPLES | {field: name for field, name in OPTIONAL_SAMPLES.items() if name in samples}
    lengths = tuple(float(samples[name]) for name in LENGTH_SAMPLES if name in samples)
    return Counters(
        **{field: float(samples[name]) for field, name in found.items()},
        sequence_lengths=lengths if len(lengths) == len(LENGTH_SAMPLES) else None,
    )


def probed_from_samples(samples: Mapping[str, float]) -> Probed | None:
    """What a pod says of the steps it tried; None when it tried none or says what cannot be."""
    a, b, c, d = law = [samples.get(name, 0.0) for name in PROBED_LAW]
    batch = samples.get(PROBED_BATCH, 0.0)
    usable = all(math.isfinite(value) and value >= 0 for value in law) and sum(law) > 0 and 1 <= batch <= 1e6
    return Probed(a, b, c, d, int(batch)) if usable else None
