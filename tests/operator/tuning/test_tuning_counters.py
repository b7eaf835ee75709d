from dataclasses import fields

import pytest

from busload_operator.tuning import SAMPLES, Counters, CountersError, counters_from_samples
from busload_operator.tuning.counters import (
    CUMULATIVE,
    LENGTH_SAMPLES,
    LEVELS,
    OPTIONAL_SAMPLES,
    Probed,
    probed_from_samples,
)
from busload_runtime.contract import METRICS, OBJECTIVES, REFUSAL_REASONS, SEQUENCE_LENGTHS
from busload_runtime.server.metrics import Metrics

EVERY = {name: float(i) for i, name in enumerate(SAMPLES.values())}


def test_every_sample_lands_in_its_field() -> None:
    counters = counters_from_samples(EVERY | {"some_other_metric": 1.0})
    for field, name in SAMPLES.items():
        assert getattr(counters, field) == EVERY[name]


def test_what_older_pods_lack_is_unknown_and_not_zero() -> None:
    every = {name: 100.0 + i for i, name in enumerate(OPTIONAL_SAMPLES.values())}
    counters = counters_from_samples(EVERY | every)
    assert {field: getattr(counters, field) for field in OPTIONAL_SAMPLES} == dict(
        zip(OPTIONAL_SAMPLES, every.values(), strict=True)
    )
    older = counters_from_samples(EVERY)
    assert all(getattr(older, field) is None for field in OPTIONAL_SAMPLES)
    assert older.sequence_lengths is None
    assert {f.name for f in fields(Counters)} == {*SAMPLES, *OPTIONAL_SAMPLES, "sequence_lengths"}
    labels = {"objective": OBJECTIVES, "reason": REFUSAL_REASONS}
    series = {
        f'{m.name}{{{label}="{value}"}}'
        for m in METRICS
        for label, values in labels.items()
        if m.labels == (label,)
        for value in values
    }
    assert {name for name in every if "{" in name} <= series
    assert {name for name in every if "{" not in name} <= {m.name for m in METRICS}


def test_pods_of_the_first_version_have_all_that_is_needed() -> None:
    """An operator is upgraded before its pods: what they do not export must be optional."""
    first = set(FIRST_VERSION.split())
    assert {name.removeprefix("busload_") for name in SAMPLES.values()} <= first


FIRST_VERSION = """
engine_clock_seconds engine_steps_total engine_busy_seconds_total step_batch_total step_kv_tokens_total
step_prefill_tokens_total generated_tokens_total requests_arrived_total preemptions_total batch_seconds_total
queue_seconds_total kv_token_seconds_total time_to_first_token_seconds_sum time_to_first_token_seconds_count
inter_token_latency_seconds_sum inter_token_latency_seconds_count output_length_tokens_sum output_length_tokens_count
vllm:num_requests_running vllm:num_requests_waiting kv_blocks kv_blocks_free kv_block_size_tokens limits_generation
limit_max_sequence_length limit_batch_size limit_kv_cache_percent limit_token_budget
"""


def test_lengths_come_whole_or_not_at_all() -> None:
    lengths = {name: float(i) for i, name in enumerate(LENGTH_SAMPLES)}
    assert counters_from_samples(EVERY | lengths).sequence_lengths == tuple(map(float, range(len(SEQUENCE_LENGTHS))))
    assert counters_from_samples(EVERY | dict(list(lengths.items())[1:])).sequence_lengths is None
    text = Metrics("m").render().decode()
    assert all(f"\n{name} 0" in text for name in LENGTH_SAMPLES), "as the runtime writes them"


def test_missing_samples_are_named() -> None:
    samples = {k: v for k, v in EVERY.items() if k not in ("busload_engine_steps_total", "vllm:num_requests_waiting")}
    with pytest.raises(CountersError, match=r"lacks busload_engine_steps_total, vllm:num_requests_waiting"):
        counters_from_samples(samples)


def test_the_runtime_exports_what_is_needed() -> None:
    kinds = {m.name: m.kind for m in METRICS}
    for field, name in SAMPLES.items():
        family = name.removesuffix("_sum").removesuffix("_count")
        assert family in kinds, name
        if field in LEVELS:
            assert kinds[family] == "gauge"
        elif field != "clock":
            assert kinds[family] in ("counter", "histogram"), name
    assert set(CUMULATIVE) | LEVELS == set(SAMPLES)


def test_the_law_that_a_pod_tried_is_read_and_what_cannot_be_is_none():
    law = {f'busload_probed_step_law_seconds{{coefficient="{name}"}}': 0.001 for name in "abcd"}
    said = {**law, "busload_probed_batch": 32.0}
    assert probed_from_samples(said) == Probed(0.001, 0.001, 0.001, 0.001, 32)
    assert probed_from_samples({}) is None  # an older pod
    assert probed_from_samples({**said, "busload_probed_batch": 0.0}) is None  # it tried nothing
    for wrong in (-1.0, float("nan"), float("inf")):
        assert probed_from_samples({**said, 'busload_probed_step_law_seconds{coefficient="b"}': wrong}) is None
    assert probed_from_samples(dict.fromkeys(law, 0.0) | {"busload_probed_batch": 32.0}) is None
