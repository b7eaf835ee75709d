import pytest

from busload_operator.tuning import SAMPLES, CountersError, counters_from_samples
from busload_operator.tuning.counters import CUMULATIVE, LEVELS
from busload_runtime.contract import METRICS

EVERY = {name: float(i) for i, name in enumerate(SAMPLES.values())}


def test_every_sample_lands_in_its_field() -> None:
    counters = counters_from_samples(EVERY | {"some_other_metric": 1.0})
    for field, name in SAMPLES.items():
        assert getattr(counters, field) == EVERY[name]


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
