"""The computed number of replicas: forecast, learned headroom, hold times."""

import math
import random
from dataclasses import replace
from statistics import fmean, stdev

import pytest
from fluid_service import Service
from hypothesis import given, settings
from hypothesis import strategies as st

from busload_operator.tuning.demand import Arrivals, Cost, Lengths, cost, count_arrivals, forecast
from busload_operator.tuning.headroom import (
    Errors,
    Jump,
    Jumps,
    Kappa,
)
from busload_operator.tuning.sizing import Plan, Seen, Sizing, changed, plan
from busload_operator.tuning.types import Law, Objectives
from busload_operator.tuning.window import PodWindow

LAW = Law(0.008, 0.0002, 0.0, 0.00005, 0.05, 100, 1.0, 60.0, True)
COST = Cost(work=0.1, slope=0.0005)
"""A batch of 60 does 60*0.0005/(0.008 + 0.03) = 0.79 replica-seconds a second."""


def poisson(rate: float, seconds: float, seed: int = 1, start: float = 0.0) -> tuple[Arrivals, ...]:
    rng = random.Random(seed)
    return tuple(
        Arrivals(start + t, start + t + 5, max(0.0, rng.gauss(5 * rate, math.sqrt(5 * rate))))
        for t in range(0, int(seconds), 5)
    )


def seen(arrivals: tuple[Arrivals, ...], replicas: int, **changes: object) -> Seen:
    usual = Seen(arrivals[-1].end, arrivals, COST, LAW, 60.0, 0.0, replicas, replicas, 65.0, 1.0, None)
    return replace(usual, **changes)  # type: ignore[arg-type]


def followed(arrivals: tuple[Arrivals, ...], replicas: int) -> tuple[list[tuple[float, int]], Plan]:
    """Steps through the arrivals; each purchase and sale is made at once."""
    sizing, made, last = Sizing(), [], None
    for end in range(5, len(arrivals) + 1):
        now = seen(arrivals[:end], replicas)
        sizing, found = plan(sizing, now)
        last = found or last
        if found is None or not (found.buy or found.sell_to < replicas):
            continue
        after = found.up if found.buy else found.sell_to
        sizing = changed(sizing, now.now, replicas, after, found, now.lead)
        replicas = after
        made.append((now.now, after))
    assert last is not None
    return made, last


def test_cost_of_a_request_and_of_a_place() -> None:
    lengths = Lengths(10, 2000, 10, 10_000, 5.0, 4000.0)
    law = replace(LAW, c=1e-7)
    found = cost(law, lengths)
    assert found.work == pytest.approx(0.00005 * 1000 + 200 * (0.0002 + 1e-7 * 800))
    assert found.slope == pytest.approx(found.work / 200)


def test_prompt_tokens_count_as_they_arrive() -> None:
    """Prompts ten times as long come in: the work is known before any of them has been computed or has finished."""
    lengths = Lengths(100, 20_000, 100, 80_000, 50.0, 40_000.0, asked=100, asked_tokens=100_000)
    found = cost(LAW, lengths)
    assert lengths.computed_share == pytest.approx(0.8), "a prefix cache saves a fifth"
    assert found.prompt_token == pytest.approx(0.8 * 0.00005)
    usual = Arrivals(0.0, 5.0, 10.0, 10_000.0)
    assert found.of([usual]) == pytest.approx(10 * found.work), "the mean prompt costs what it did"
    longer = Arrivals(5.0, 10.0, 10.0, 100_000.0)
    assert found.of([longer]) - found.of([usual]) == pytest.approx(90_000 * 0.8 * 0.00005)
    load = tuple(Arrivals(5.0 * t, 5.0 * t + 5, 100.0, 100_000.0 if t < 12 else 500_000.0) for t in range(15))
    ahead = forecast(load, found, 65.0)
    assert ahead is not None
    assert ahead.jump > 2, "a load of as many requests with longer prompts is a jump"


def test_pods_that_do_not_count_prompt_tokens_have_the_mean_prompt() -> None:
    lengths = Lengths(100, 20_000, 100, 80_000, 50.0, 40_000.0)
    assert lengths.computed_share is None
    found = cost(LAW, lengths)
    assert found.of([Arrivals(0.0, 5.0, 10.0, 1e6)]) == pytest.approx(10 * found.work)
    known = cost(LAW, replace(lengths, asked=100.0, asked_tokens=80_000.0))
    assert known.of([Arrivals(0.0, 5.0, 10.0)]) == pytest.approx(10 * found.work)


def window(pod: str, arrived: float, tokens: float | None) -> PodWindow:
    flags = {"pod": pod, "waiting_throughout": False, "sequence_lengths": None}
    base = dict.fromkeys(PodWindow.__dataclass_fields__, 0.0) | flags
    here = {"start": 0.0, "end": 5.0, "seconds": 5.0, "arrived": arrived, "prompt_tokens_arrived": tokens}
    return PodWindow(**base | here)  # type: ignore[arg-type]


def test_arrivals_of_pods() -> None:
    (found,) = count_arrivals((), [window("a", 10, 1000.0), window("b", 20, 5000.0)], ready=3)
    assert (found.requests, found.prompt_tokens) == (pytest.approx(45), pytest.approx(9000))
    (older,) = count_arrivals((), [window("a", 10, 1000.0), window("b", 20, None)], ready=2)
    assert older.prompt_tokens is None


def test_flat_load_is_sized_once() -> None:
    """20 requests/s of 0.1 s are 2 replicas of pure work; with 85% of 0.79 each and 1.12 for errors: 4."""
    for seed in range(5):
        made, last = followed(poisson(20, 3600, seed), 4)
        assert made == []
        assert last.up in (3, 4)
        assert last.expected == pytest.approx(2.0, rel=0.15)


STEADY = poisson(45, 600)
"""Keeps 5.7 of 7 replicas busy; 7.6 with the margins that are assumed at first."""


def first_purchase(
    sizing: Sizing, replicas: int, arrivals: tuple[Arrivals, ...] = STEADY, **changes: object
) -> float | None:
    for end in range(5, len(arrivals) + 1):
        sizing, found = plan(sizing, seen(arrivals[:end], replicas, **changes))
        if found is not None and found.buy:
            return arrivals[end - 1].end
    return None


def test_a_young_fleet_is_not_enlarged_for_all_of_the_margins_that_nobody_has_measured() -> None:
    bought = first_purchase(Sizing(), 7)
    assert bought is not None
    assert 300 <= bought <= 345, "what is known then says that seven are too few"


@pytest.mark.parametrize(
    ("sizing", "replicas", "changes"),
    [
        (Sizing(), 5, {}),
        (Sizing(), 7, {"waiting": 60.0}),
        (Sizing(errors=Errors(prior=(1.14,) * 14)), 7, {}),
        (Sizing(kappa=Kappa(0.80, 0.85)), 7, {}),
    ],
    ids=["plainly too few", "requests wait", "errors were learned before", "the share was learned before"],
)
def test_a_young_fleet_is_enlarged_for_what_is_known(sizing: Sizing, replicas: int, changes: dict[str, object]) -> None:
    bought = first_purchase(sizing, replicas, **changes)
    assert bought is not None
    assert bought <= 60


def test_too_many_are_sold_after_the_hold_and_too_few_bought_at_once() -> None:
    made, _ = followed(poisson(20, 1200), 8)
    assert made[0][1] == 4
    assert 300 <= made[0][0] <= 420
    made, _ = followed(poisson(20, 1200), 2)
    assert made[0][0] <= 60
    assert made[0][1] == 3, "with half of the margins"
    assert 300 <= made[1][0] <= 420
    assert made[1][1] == 4, "with those that are known then"


def test_a_single_replica_less_needs_three_minutes() -> None:
    busy, less = poisson(27, 900), poisson(20, 900, start=900)
    made, _ = followed(busy + less, 5)
    assert [after for _, after in made] == [4]
    assert 900 + 180 <= made[0][0] <= 900 + 360


def test_learning_that_replicas_may_be_fuller_does_not_wait_as_a_load_that_fell() -> None:
    """What was needed in the last minutes is asked anew with what is known now."""
    arrivals, sizing = poisson(20, 600), Sizing()
    for end in range(5, len(arrivals)):
        sizing, found = plan(sizing, seen(arrivals[:end], 4))
    assert found is not None
    assert found.sell_to == 4
    sizing = replace(sizing, kappa=replace(sizing.kappa, value=1.0))
    _, found = plan(sizing, seen(arrivals, 4))
    assert found is not None
    assert found.sell_to == 3


def test_load_that_is_steady_is_the_mean_of_five_minutes() -> None:
    """A minute of flat load scatters; what lasts is known better."""
    found = [forecast(poisson(20, 600, seed), COST, 65.0) for seed in range(40)]
    levels = [f.level for f in found if f is not None]
    steady = [f.steady for f in found if f is not None]
    assert stdev(steady) < 0.8 * stdev(levels)
    assert fmean(steady) == pytest.approx(2.0, rel=0.02)


@pytest.mark.parametrize("rate", [10, 30])
def test_load_that_changed_is_the_mean_of_the_last_minute(rate: int) -> None:
    found = forecast(poisson(20, 600) + poisson(rate, 60, start=600), COST, 65.0)
    assert found is not None
    assert found.steady == found.level == pytest.approx(0.1 * rate, rel=0.1)


def test_a_step_is_bought_for_as_it_goes_on_and_not_in_flat_load() -> None:
    step = poisson(20, 600) + poisson(60, 300, start=600)
    made, last = followed(step, 4)
    assert 600 < made[0][0] <= 620
    assert made[0][1] >= 9
    assert last.expected == pytest.approx(6.0, rel=0.15)
    assert all(forecast(poisson(20, 600, s), COST, 65).jump == 1 for s in range(50))  # type: ignore[union-attr]


def ramp(seed: int = 1) -> tuple[Arrivals, ...]:
    """Ten minutes of 20 requests a second, then 0.15 a second more with each second."""
    rng = random.Random(seed)
    rising = [20 + 0.15 * (t + 2.5) for t in range(0, 90, 5)]
    return poisson(20, 600, seed) + tuple(
        Arrivals(600.0 + 5 * i, 605.0 + 5 * i, rng.gauss(5 * rate, math.sqrt(5 * rate)))
        for i, rate in enumerate(rising)
    )


def test_a_rise_is_seen_as_far_as_it_is_certain() -> None:
    """After 75 s of it load goes from 31 to 37 within 40 s; the last 15 s had 30.1 in the mean."""
    found = [forecast(ramp(seed)[:-3], COST, 40.0) for seed in range(40)]
    risen = [f.risen for f in found if f is not None and f.rise > 0]
    assert fmean(risen) == pytest.approx(3.50, rel=0.02), "3.01 and 6 * 0.1, less a standard error of 0.11"
    assert len(risen) >= 39
    steep = forecast(poisson(20, 600) + poisson(60, 40, start=600), COST, 65.0)
    assert steep is not None
    assert steep.rise == 0.25, "no further than that"


def test_flat_load_hardly_ever_rises_for_certain() -> None:
    found = [forecast(poisson(20, 600, seed), COST, 65.0) for seed in range(200)]
    assert sum(f.rise > 0 for f in found if f is not None) <= 3
    falling = tuple(reversed([replace(a, start=-a.end, end=-a.start) for a in ramp()]))
    ended = forecast(falling, COST, 65.0)
    assert ended is not None
    assert ended.risen == 0


def test_a_fleet_that_is_short_is_enlarged_for_what_a_rise_will_be() -> None:
    """What is bought now comes when load is higher by a third than in the last minute. What came of earlier rises, and
    of jumps, says how far this one is believed."""
    load = ramp()[:-3]
    ahead = forecast(load, COST, 65.0)
    assert ahead is not None

    def planned(sizing: Sizing) -> Plan:
        _, found = plan(sizing, seen(load, 4, waiting=60.0))
        assert found is not None
        return found

    over, beyond = Jumps(stayed=(0.0,)), ahead.risen - ahead.steady
    believed = planned(Sizing())
    assert believed.rises == pytest.approx(ahead.risen)
    assert ahead.risen > 1.3 * ahead.level
    assert believed.expected * believed.error == pytest.approx(ahead.risen), "no error of forecasts on top"
    assert believed.up == math.ceil(ahead.risen / believed.capacity)
    assert planned(Sizing(rises=over)).rises == pytest.approx(ahead.steady + beyond / 2)
    assert planned(Sizing(jumps=over)).rises == pytest.approx(ahead.steady + beyond / 2)
    neither = planned(Sizing(rises=over, jumps=over))
    assert neither.rises == 0
    assert neither.expected * neither.error > ahead.steady + beyond / 4, "the error of forecasts covers that"


@pytest.mark.parametrize(("replicas", "waiting"), [(5, 60.0), (4, 0.0)])
def test_a_fleet_that_is_not_short_is_not_enlarged_for_a_rise(replicas: int, waiting: float) -> None:
    """It has room, or nobody waits."""
    load = ramp()[:-3]
    _, found = plan(Sizing(), seen(load, replicas, waiting=waiting))
    ahead = forecast(load, COST, 65.0)
    assert found is not None
    assert ahead is not None
    assert found.rises == 0
    assert found.expected < ahead.risen


def test_what_came_of_rises_is_learned_also_where_none_was_bought_for() -> None:
    """One that ends after 90 s, in a fleet that has room."""
    sizing, load = Sizing(), ramp() + poisson(20, 300, 2, start=690)
    for end in range(5, len(load) + 1):
        sizing, _ = plan(sizing, seen(load[:end], 12))
    assert sizing.rises.trust < 0.6


def test_a_burst_that_is_over_is_not_bought_for() -> None:
    quiet = tuple(Arrivals(t, t + 5, 0.0) for t in range(305, 400, 5))
    burst = (*poisson(5, 300), Arrivals(300, 305, 300.0), *quiet)
    made, _ = followed(burst, 2)
    assert all(after <= 2 for at, after in made if at > 320)


def test_backlog_is_bought_for_only_where_a_new_replica_can_still_help() -> None:
    calm = poisson(5, 120)
    _, none = plan(Sizing(), seen(calm, 2))
    _, soon_gone = plan(Sizing(), seen(calm, 2, waiting=100.0))
    _, long = plan(Sizing(), seen(calm, 2, waiting=3000.0))
    assert none is not None
    assert soon_gone is not None
    assert long is not None
    assert none.backlog == soon_gone.backlog == 0
    assert soon_gone.wait > 1
    assert long.backlog > 1
    assert long.buy


def test_replicas_that_start_are_there_for_half_of_the_lead_time() -> None:
    """Two that start do 65 s of work of one replica until a further one could come, of a backlog for 120 s."""
    calm = poisson(5, 120)
    _, alone = plan(Sizing(), seen(calm, 2, waiting=3000.0))
    _, two_come = plan(Sizing(), seen(calm, 4, waiting=3000.0, ready=2))
    assert alone is not None
    assert two_come is not None
    assert alone.backlog - two_come.backlog == pytest.approx(65 / 120)


def test_a_wait_within_its_objective_does_not_hurry_a_purchase() -> None:
    """Three of four replicas are there; so many requests wait that it takes three quarters of the objective, or all."""
    load = poisson(20, 120)
    first, short = plan(Sizing(), seen(load, 3, waiting=18.0))
    assert short is not None
    assert (short.up, short.buy) == (4, False)
    assert 0.5 < short.wait < 1.0
    second, _ = plan(first, seen(load, 3, waiting=18.0))
    _, third = plan(second, seen(load, 3, waiting=18.0))
    assert third is not None
    assert third.buy
    _, missed = plan(Sizing(), seen(load, 3, waiting=40.0))
    assert missed is not None
    assert missed.buy


def test_bursts_shorter_than_the_lead_get_a_floor_instead_of_purchases() -> None:
    """Ten times the mean for ten seconds, in no order."""
    rng = random.Random(3)
    load: list[Arrivals] = []
    for t in range(0, 1800, 15):
        rate = 100.0 if rng.random() < 0.12 else 4.0
        load += [Arrivals(t + k, t + k + 5, 5 * rate) for k in (0, 5, 10)]
    found = forecast(tuple(load), COST, 65.0)
    assert found is not None
    assert found.floor == pytest.approx(10.0)
    made, _ = followed(tuple(load), 13)
    assert len([1 for at, _ in made if at > 900]) <= 1


def test_too_little_is_no_plan() -> None:
    assert forecast((), COST, 65.0) is None
    assert plan(Sizing(), seen((Arrivals(0.0, 5.0, 50.0),), 2))[1] is None


def planned(expected: float) -> Plan:
    _, found = plan(Sizing(), seen(poisson(20, 120), 4))
    assert found is not None
    return replace(found, expected=expected, capacity=0.7)


def test_a_purchase_soon_after_a_sale_doubles_the_hold() -> None:
    low, high = planned(1.0), planned(3.0)
    sizing = changed(Sizing(), 1000.0, 4, 3, low, 65.0)
    again = changed(sizing, 1100.0, 3, 4, high, 65.0)
    assert again.hold == 2 * sizing.hold
    assert again.hold_one == 4 * sizing.hold_one
    jumped = replace(sizing, jumps=Jumps(Jump(1350.0, 1.0, 2.0)))
    assert changed(jumped, 1100.0, 3, 4, high, 65.0).hold == again.hold
    assert changed(jumped, 1300.0, 3, 4, high, 65.0).hold == sizing.hold, "load jumped since: no mistake"
    assert changed(sizing, 1300.0, 3, 4, high, 65.0).hold == again.hold
    assert changed(sizing, 1430.0, 3, 4, high, 65.0).hold == sizing.hold
    assert changed(again, 2000.0, 4, 3, low, 65.0).hold == again.hold, "not sooner than it could be sold"
    assert changed(again, 2600.0, 4, 3, low, 65.0).hold == sizing.hold


def test_a_purchase_for_the_load_that_a_sale_was_made_for_doubles_the_hold_an_hour_later() -> None:
    sizing = changed(Sizing(), 1000.0, 4, 3, planned(1.5), 65.0)
    assert changed(sizing, 4000.0, 3, 4, planned(1.8), 65.0).hold == 2 * sizing.hold
    assert changed(sizing, 4000.0, 3, 4, planned(1.9), 65.0).hold == sizing.hold, "over half a replica more"
    assert changed(sizing, 4700.0, 3, 4, planned(1.8), 65.0).hold == sizing.hold


def test_a_young_fleet_follows_a_load_that_jumps() -> None:
    """To what needs 5.9 replicas with half of the margins, and 6.8 with all."""
    load = tuple(Arrivals(t, t + 5.0, 5.0 * (28 if t < 120 else 41)) for t in range(0, 600, 5))
    bought = first_purchase(Sizing(), 6, load)
    assert bought is not None
    assert 120 < bought <= 160


def test_what_is_planned_for_is_the_share_of_the_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Seen] = []

    def kept(old: Sizing, one: Seen) -> tuple[Sizing, Plan | None]:
        asked.append(one)
        return plan(old, one)

    monkeypatch.setattr("busload_operator.tuning.need.plan", kept)
    service = Service(probed=True, objectives=Objectives(2.0, 0.5, 0.95))
    service.rate = lambda now: 1.0
    service.run(60)
    assert asked
    assert [one.allowed_misses for one in asked] == pytest.approx([0.05] * len(asked))


@pytest.mark.parametrize(("allowed", "replicas"), [(0.01, 5), (0.05, 5), (0.10, 4), (0.30, 4)])
def test_a_fleet_may_be_short_by_a_part_of_what_may_miss(allowed: float, replicas: int) -> None:
    """Steady load for 4.1 replicas, all that is learned being that forecasts are right and replicas may be full: 2.5%
    too much for four of them."""
    full = 60 * COST.slope / (LAW.a + 60 * COST.slope)
    load = tuple(Arrivals(5.0 * i, 5.0 * i + 5, 4.1 * full / COST.work * 5) for i in range(120))
    sizing = Sizing(errors=Errors(prior=(1.0,) * 14, quantile=0.5), kappa=Kappa(value=1.0))
    for end in range(5, len(load) + 1):
        sizing, found = plan(sizing, seen(load[:end], 5, allowed_misses=allowed))
    assert found is not None
    assert found.sell_to == replicas
    four = Sizing(errors=sizing.errors, kappa=sizing.kappa)
    bought = [
        end
        for end in range(5, len(load))
        if (p := plan(four, seen(load[:end], 4, allowed_misses=allowed))[1]) and p.up > 4
    ]
    assert bool(bought) is (replicas > 4)


def test_bursts_that_do_not_stay_are_bought_for_less_each_time() -> None:
    load: tuple[Arrivals, ...] = ()
    for minute in range(0, 60, 6):
        load += poisson(20, 320, minute, start=60.0 * minute)
        load += poisson(50, 40, minute, start=60.0 * minute + 320)
    made, _ = followed(load, 4)
    bought = [after for at, after in made if after >= 5]
    assert bought
    assert max(after for at, after in made if at < 720) > max(after for at, after in made if at > 2400)


@settings(deadline=None)
@given(st.lists(st.floats(0, 200), min_size=12, max_size=200), st.integers(1, 12))
def test_whatever_arrives_the_numbers_are_sane(rates: list[float], replicas: int) -> None:
    arrivals = tuple(Arrivals(5.0 * i, 5.0 * i + 5, 5 * rate) for i, rate in enumerate(rates))
    made, last = followed(arrivals, replicas)
    assert last.up >= 1
    assert all(after >= 1 and math.isfinite(at) for at, after in made)
    most = max(rates) * COST.work * 1.5 * 3 / (0.4 * 0.79) + 2
    assert all(after <= max(most, replicas) for _, after in made)
