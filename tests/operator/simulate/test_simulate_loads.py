"""Loads: synthetic ones have the rate and the scatter asked for, files are read, bad input is told by name."""

import statistics
from itertools import pairwise
from pathlib import Path

import pytest
from simulate_helpers import setup

from busload_operator.simulate.hardware import SetupError, parse_law
from busload_operator.simulate.replica import Job, Replica
from busload_operator.simulate.traces import RateDay, is_rates, read_arrivals, read_lengths, read_rates
from busload_operator.simulate.workload import Arrival, Lengths, by_rate, cut, diurnal, flat, prompt_tokens, repeat
from busload_runtime.contract import StepLaw

ONE = Lengths(((100, 10),))


@pytest.mark.parametrize("cv", [0.5, 1.0, 2.0])
def test_flat_has_its_rate_and_scatter(cv: float) -> None:
    load = flat(10.0, 2000, ONE, seed=1, cv=cv)
    assert len(load) == pytest.approx(20_000, rel=0.04)
    gaps = [after.at - before.at for before, after in pairwise(load)]
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(cv, rel=0.05)
    assert load[0].at >= 0
    assert load[-1].at <= 2000


def test_by_rate_follows_the_pieces() -> None:
    load = by_rate([0, 100, 200, 300], [10, 0, 30], ONE, seed=1)
    counts = [sum(low <= a.at < low + 100 for a in load) for low in (0, 100, 200)]
    assert counts[1] == 0
    assert counts[0] == pytest.approx(1000, rel=0.1)
    assert counts[2] == pytest.approx(3000, rel=0.06)


def test_diurnal_swings_between_its_rates() -> None:
    load = diurnal(2.0, 20.0, 3600, ONE, seed=1, bursts=0)
    night = sum(a.at < 200 or a.at > 3400 for a in load) / 400
    noon = sum(1700 < a.at < 1900 for a in load) / 200
    assert night == pytest.approx(2.0, rel=0.2)
    assert noon == pytest.approx(20.0, rel=0.1)
    assert len(diurnal(2.0, 20.0, 3600, ONE, seed=1, bursts=4)) > len(load)


def test_equal_seeds_give_equal_loads() -> None:
    assert flat(5, 100, Lengths.lognormal(600, 150), 3) == flat(5, 100, Lengths.lognormal(600, 150), 3)
    assert flat(5, 100, ONE, 3) != flat(5, 100, ONE, 4)


def test_copies_spread_and_cut() -> None:
    load = [Arrival(10.0, 5, 6, (1, 2)), Arrival(12.0, 7, 8)]
    copies = repeat(load, 3, 1.5, seed=1)
    assert len(copies) == 6
    assert [a.at for a in copies] == sorted(a.at for a in copies)
    assert all(10.0 <= a.at <= 11.5 for a in copies if a.prompt == 5)
    assert [a.prefix for a in copies if a.prompt == 5] == [(1, 2)] * 3
    assert [a.at for a in cut(load, 2.0, None)] == [0.0, 1.0]
    assert [a.at for a in cut(load, 1.0, 1.0)] == [0.0]


def test_equal_prefix_ids_are_equal_leading_tokens_and_nothing_else_is() -> None:
    first = prompt_tokens(Arrival(0, 1200, 1, (7, 8, 9)), 0)
    second = prompt_tokens(Arrival(0, 1100, 1, (7, 8, 10)), 1)
    plain = prompt_tokens(Arrival(0, 50, 1), 2)
    assert (len(first), len(second), len(plain)) == (1200, 1100, 50)
    assert first[:1024] == second[:1024]
    assert not set(first[1024:]) & set(second[1024:])
    assert not set(plain) & (set(first) | set(second))


def test_a_shared_prefix_is_not_computed_twice(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 0, "input_length": 1200, "output_length": 2, "hash_ids": [0, 1, 2]}\n'
        '{"timestamp": 9000, "input_length": 1300, "output_length": 2, "hash_ids": [0, 1, 3]}\n'
        '{"timestamp": 18000, "input_length": 1300, "output_length": 2, "hash_ids": [5, 1, 3]}\n'
    )
    made = setup()
    replica = Replica("pod-1", made.hardware, made.limits, 1, 0.0, 0.0, 1)
    computed = []
    for index, arrival in enumerate(read_arrivals(path, seed=1)):
        replica.submit(Job(index, arrival), arrival.at)
        computed.append(replica.counters(arrival.at + 8.0).prefill_tokens)
    assert [computed[0], computed[1] - computed[0], computed[2] - computed[1]] == [1200, 1300 - 1024, 1300]


def test_azure_times_are_seconds_from_the_first_request(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,109\n"
    )
    load = read_arrivals(path, seed=1)
    assert [(a.prompt, a.output) for a in load] == [(374, 44), (396, 109)]
    assert load[0].at == 0
    assert load[1].at == pytest.approx(4.314579, abs=1e-5)


def test_lengths_come_from_a_file_without_times(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("num_prefill_tokens,num_decode_tokens\n3772,54\n2015,156\n")
    assert read_lengths(path).pairs == ((3772, 54), (2015, 156))
    with pytest.raises(SetupError, match=r"lengths\.csv has lengths but no times"):
        read_arrivals(path, seed=1)


RATES = "model,window_start_s,requests_per_s\n" + "".join(
    f"m,{day * 86400 + hour * 3600},{rate}\n"
    for day in (0, 1)
    for hour, rate in enumerate([10 * (1 + day)] * 12 + [40 * (1 + day)] * 12)
)


def test_a_day_of_rates_keeps_its_shape(tmp_path: Path) -> None:
    path = tmp_path / "rates.csv"
    path.write_text(RATES)
    assert is_rates(path)
    load = read_rates(path, RateDay("m", 2, seconds=1200, peak=20), ONE, seed=1, cv=1.0)
    morning = sum(a.at < 550 for a in load) / 550
    evening = sum(a.at > 650 for a in load) / 550
    assert morning == pytest.approx(5.0, rel=0.06)
    assert evening == pytest.approx(20.0, rel=0.04)


@pytest.mark.parametrize(
    ("text", "day", "expected"),
    [
        ("model,window_start_s\nm,0\n", RateDay("m", 1, 60, 1), "lacks the column 'requests_per_s'"),
        (RATES, RateDay("x", 1, 60, 1), "no model 'x'; it has m"),
        (RATES, RateDay("m", 3, 60, 1), r"no requests on day 3; it has days \[1, 2\]"),
        (RATES + "m,zero,1\n", RateDay("m", 1, 60, 1), "line 50: window_start_s is 'zero'"),
        (RATES + "m,0,-1\n", RateDay("m", 1, 60, 1), "line 50: requests_per_s is '-1'"),
        (RATES, RateDay("m", 1, 0, 1), "must both be above 0"),
    ],
)
def test_bad_rates_are_told(tmp_path: Path, text: str, day: RateDay, expected: str) -> None:
    path = tmp_path / "rates.csv"
    path.write_text(text)
    with pytest.raises(SetupError, match=expected):
        read_rates(path, day, ONE, seed=1)


def test_bad_traces_are_told(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 5, "output_length": 5}\nnot json\n')
    with pytest.raises(SetupError, match=r"trace\.jsonl, line 2: not JSON"):
        read_arrivals(path, seed=1)
    with pytest.raises(SetupError, match=r"missing\.csv: No such file"):
        read_arrivals(tmp_path / "missing.csv", seed=1)
    with pytest.raises(SetupError, match=r"missing\.csv: No such file"):
        is_rates(tmp_path / "missing.csv")


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_rates_are_told(rate: float) -> None:
    with pytest.raises(SetupError, match="rate"):
        flat(rate, 100, ONE, seed=1)


def test_laws_are_read_and_checked() -> None:
    assert parse_law("a=0.01, d=0.0001") == StepLaw(0.01, 0.0, 0.0, 0.0001)
    for text in ("", "a=x", "e=1", "a", "a=-1", "a=nan", "c=1"):
        with pytest.raises(SetupError, match="step law"):
            parse_law(text)
