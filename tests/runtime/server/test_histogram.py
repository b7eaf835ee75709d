import prometheus_client
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.exposition import generate_latest

from busload_runtime.contract import Metric
from busload_runtime.server.histogram import Histogram

BOUNDS = (0.005, 0.25, 1, 64, 131072)


@given(st.lists(st.sampled_from(BOUNDS) | st.floats(0, 200_000), max_size=20))
def test_it_counts_as_the_client_library_does(values: list[float]) -> None:
    registry, oracle_registry = prometheus_client.CollectorRegistry(), prometheus_client.CollectorRegistry()
    prometheus_client.disable_created_metrics()
    subject = Histogram(Metric("x_seconds", "histogram", "Help.", (), BOUNDS))
    registry.register(subject)
    oracle = prometheus_client.Histogram("x_seconds", "Help.", buckets=BOUNDS, registry=oracle_registry)
    for value in values:
        subject.observe(value)
        oracle.observe(value)
    assert generate_latest(registry) == generate_latest(oracle_registry)
