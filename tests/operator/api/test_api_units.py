import pytest
from hypothesis import given
from hypothesis import strategies as st

from busload_operator.api.units import parse_bytes, parse_cpu, parse_duration


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("128", 128),
        ("1k", 1000),
        ("1Ki", 1024),
        ("512Mi", 512 * 1024**2),
        ("2Gi", 2 * 1024**3),
        ("1.5Gi", 1536 * 1024**2),
        ("2000M", 2_000_000_000),
        ("1T", 10**12),
        ("1Ti", 1024**4),
        ("0.0011k", None),
        ("1.001", 2),  # rounded up, as Kubernetes does
    ],
)
def test_bytes(text: str, expected: int | None):
    if expected is None:
        with pytest.raises(ValueError, match="not a memory quantity"):
            parse_bytes(text)
    else:
        assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "2GB", "-1Gi", "1e3", "2 Gi", "Gi", "1K", "100m", "2Gi\n", "٢Gi"])
def test_no_bytes(text: str):
    with pytest.raises(ValueError, match='is not a memory quantity like "2Gi"'):
        parse_bytes(text)


@pytest.mark.parametrize(("text", "expected"), [("2", 2000), ("1.5", 1500), ("500m", 500), ("0.001", 1), ("0", 0)])
def test_cpu(text: str, expected: int):
    assert parse_cpu(text) == expected


@pytest.mark.parametrize("text", ["", "1.5m", "2 ", "-1", "1k", "1e3", "2\n"])
def test_no_cpu(text: str):
    with pytest.raises(ValueError, match="is not a CPU quantity"):
        parse_cpu(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("2s", 2.0), ("100ms", 0.1), ("1m30s", 90.0), ("0.5s", 0.5), ("1h1m1s1ms", 3661.001), ("0s", 0.0), ("90m", 5400)],
)
def test_duration(text: str, expected: float):
    assert parse_duration(text) == expected


@pytest.mark.parametrize("text", ["", "2", "1d", "-5ms", "s", "1 s", "1us", "100000s", "1s1s1s1s1s", "2s\n"])
def test_no_duration(text: str):
    with pytest.raises(ValueError, match="is not a duration"):
        parse_duration(text)


@given(st.integers(0, 99_999), st.integers(0, 99_999))
def test_durations_add_up(minutes: int, milliseconds: int):
    assert parse_duration(f"{minutes}m{milliseconds}ms") == pytest.approx(minutes * 60 + milliseconds / 1000)


@given(st.integers(0, 10**6), st.sampled_from(["", "k", "M", "G", "Ki", "Mi", "Gi"]))
def test_a_thousand_of_a_unit_is_a_thousand_times_as_much(number: int, unit: str):
    assert parse_bytes(f"{number * 1000}{unit}") == 1000 * parse_bytes(f"{number}{unit}")
