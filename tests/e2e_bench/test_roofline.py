"""The arithmetic of the roofline, on a model whose numbers can be added up by hand."""

from e2e.bench.roofline import Model, peak_operations

MODEL = Model(weight_bytes=1000, kv_bytes_per_token=10, body=100, head=20, attention=2)


def test_bytes_and_operations_of_a_step() -> None:
    assert MODEL.step_bytes(batch=4, context=5) == 1000 + 4 * 5 * 10
    assert MODEL.step_operations(batch=4, context=5) == 4 * (100 + 20 + 5 * 2)
    assert MODEL.prefill_operations(8) == 8 * (100 + 4 * 2) + 20


def test_the_peak_is_measured_with_this_machines_instructions() -> None:
    name, one = peak_operations(1)
    assert name
    assert one > 1e8
