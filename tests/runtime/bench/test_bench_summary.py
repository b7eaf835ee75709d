"""Figures from outcomes made by hand, so that each has one right value."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from busload_runtime.bench.outcome import Level, Outcome, levels_from_json
from busload_runtime.bench.render import document, duration, table
from busload_runtime.bench.summary import Goals, Spread, steady_window, summarise


def outcome(start: float, first: float, gap: float, tokens: int, **other: object) -> Outcome:
    """A request sent at `start` whose first token comes at `first`, the others every `gap` seconds."""
    chunks = [first + gap * i for i in range(tokens)]
    fields: dict[str, object] = {"output_tokens": tokens, "input_tokens": 10, "from_usage": True, "status": 200}
    fields |= {"intended": start, "sent": start, "end": chunks[-1] + 0.5, "chunks": chunks}
    return Outcome(**(fields | other))  # type: ignore[arg-type]


def test_percentiles_are_values_that_were_seen() -> None:
    spread = Spread.of([0.4, 0.1, 0.3, 0.2, None])
    assert [spread.at(p) for p in (1, 25, 50, 75, 76, 90, 99, 100)] == [0.1, 0.1, 0.2, 0.3, 0.4, 0.4, 0.4, 0.4]
    hundred = Spread.of(range(1, 101))
    assert [hundred.at(p) for p in (50, 90, 99, 99.9)] == [50, 90, 99, 100]
    assert Spread.of(range(1, 1001)).at(99.9) == 999
    assert math.isnan(Spread.of([]).at(50))
    assert Spread.of([]).to_json() == {"n": 0}
    assert Spread.of([2.0]).to_json()["p99"] == 2.0


@given(st.lists(st.floats(0, 1e3), min_size=1), st.sampled_from([1.0, 50.0, 90.0, 99.0, 99.9]))
def test_a_percentile_is_the_smallest_value_that_covers_its_share(values: list[float], percent: float) -> None:
    at = Spread.of(values).at(percent)
    covered = sum(value <= at for value in values) / len(values)
    below = sum(value < at for value in values) / len(values)
    assert at in values
    assert covered >= percent / 100 - 1e-9
    assert below < percent / 100 + 1e-9


def test_latencies_of_a_closed_loop() -> None:
    level = Level("concurrency 2", 1000.0, [outcome(0, 1, 0.1, 11), outcome(0, 2, 0.2, 6), outcome(2.5, 4, 0.5, 3)], 2)
    s = summarise(level)
    assert (s.requests, s.ok, s.failures, s.counted) == (3, 3, {}, "usage")
    assert s.time_to_first_token.values == pytest.approx((1, 1.5, 2))
    assert s.time_per_output_token.values == pytest.approx((0.1, 0.2, 0.5))
    assert len(s.inter_token_latency.values) == 10 + 5 + 2
    assert s.inter_token_latency.at(50) == pytest.approx(0.1)
    assert s.worst_gap.values == pytest.approx((0.1, 0.2, 0.5))
    assert s.end_to_end.values == pytest.approx((2.5, 3.0, 3.5))
    # The load was full until 3.5: then the second client found no request left. By then 11 and 6 tokens had come.
    assert steady_window(level) == pytest.approx((0, 3.5))
    assert s.output_rate == pytest.approx(17 / 3.5)
    assert s.total_rate == pytest.approx((17 + 20) / 3.5)
    assert s.whole_output_rate == pytest.approx(20 / 5.5)


def test_an_open_loop_is_steady_until_its_last_arrival() -> None:
    level = Level("rate 1/s", 0.0, [outcome(float(i), i + 0.25, 0.25, 2) for i in range(11)], rate=1.0)
    assert steady_window(level) == (0.0, 10.0)
    assert summarise(level).output_rate == pytest.approx(2.0)
    short = Level("rate 1/s", 0.0, [outcome(float(i), i + 5.0, 0.25, 2) for i in range(3)], rate=1.0)
    assert steady_window(short) == pytest.approx((0.0, 7.75))


def test_failed_and_interrupted_requests_have_no_latency_but_are_counted() -> None:
    failed = outcome(0, 0.1, 0.1, 4, kind="cut", error="stream cut")
    refused = Outcome(0, 0, 0.1, kind="refused", error="HTTP 429", status=429)
    cut_short = outcome(0, 0.3, 0.1, 4, interrupted=True)
    level = Level("concurrency 4", 0.0, [failed, refused, cut_short, outcome(0, 1, 0.1, 4)], 4)
    s = summarise(level)
    assert (s.ok, s.interrupted, s.failures) == (1, 1, {"cut": 1, "refused": 1})
    assert s.time_to_first_token.values == (1,)
    assert level.errors == ["stream cut", "HTTP 429"]
    text = table([(level, s)], Goals())
    assert "1 failed (refused), the first: HTTP 429" in text
    assert "1 requests still ran when the measurement was ended" in text


def test_goodput_counts_requests_within_both_goals() -> None:
    level = Level("concurrency 3", 0.0, [outcome(0, 1, 0.1, 11), outcome(0, 2, 0.1, 11), outcome(0, 1, 0.2, 11)], 3)
    assert summarise(level).good == 3
    assert summarise(level, Goals(time_to_first_token=1.0)).good == 2
    s = summarise(level, Goals(1.0, 0.15))
    assert s.good == 1
    assert s.good_rate == pytest.approx(1 / level.seconds)
    assert "1 of 3 succeeded within the goals" in table([(level, s)], Goals(1.0, 0.15))


def test_tokens_in_a_window_of_the_wall_clock() -> None:
    two_per_chunk = outcome(0, 1, 1, 3, output_tokens=6)
    level = Level("concurrency 1", 1000.0, [two_per_chunk], 1)
    assert level.tokens_between(1.0, 3.0) == 4
    assert level.rate_between(1001.0, 1003.0) == pytest.approx(2.0)
    assert level.rate_between(1003.5, 1009.0) == 0


def test_what_the_reader_must_know_is_said() -> None:
    late = [outcome(i / 10, i / 10 + 0.1, 0.01, 3, sent=i / 10 + 0.05, from_usage=False) for i in range(10)]
    level = Level("rate 10/s", 0.0, late, rate=10.0, client_cpu=0.95)
    text = table([(level, summarise(level))], Goals())
    assert "could not keep up: requests left up to 50ms late" in text
    assert "used 95% of a core" in text
    assert "counted by chunks" in text
    assert "p99 of 10 requests is their maximum" in text


def test_the_document_can_be_read_back() -> None:
    level = Level("concurrency 2", 5.0, [outcome(0, 1, 0.1, 3), outcome(0, 1, 0.1, 2, kind="cut", error="x")], 2)
    pairs = [(level, summarise(level))]
    text = json.dumps(document(pairs, {"model": "m"}, records=True))
    assert levels_from_json(json.loads(text)) == [level]
    with pytest.raises(ValueError, match="--records"):
        levels_from_json(document(pairs, {}, records=False))
    assert "NaN" not in json.dumps(document([(Level("x", 0.0, [], 1), summarise(Level("x", 0.0, [], 1)))], {}, False))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.00421, "4.21ms"), (0.843, "843ms"), (0.99951, "1s"), (12.345, "12.3s"), (1234.0, "1234s"), (math.nan, "-")],
)
def test_durations_have_three_digits(seconds: float, text: str) -> None:
    assert duration(seconds) == text
