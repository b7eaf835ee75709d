"""What is learned of one's own planning: how full a replica may be, how wrong forecasts are, what jumps are worth."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from busload_operator.tuning.headroom import (
    Errors,
    Jumps,
    Kappa,
    Outcomes,
    learn_errors,
    learn_jumps,
    learn_kappa,
    learn_quantile,
)


def outcomes(at: float, share: float, load: float) -> Outcomes:
    return Outcomes(at, 100.0, 100.0 * share, load)


def learned(share: float, load: float, minutes: int = 60) -> Kappa:
    kappa = Kappa()
    for step in range(minutes * 12):
        kappa = learn_kappa(kappa, outcomes(5.0 * step, share, load * kappa.value), False, 4)
    return kappa


def test_kappa_rises_while_hardly_any_request_misses_and_falls_while_too_many_do() -> None:
    assert learned(0.0, 0.95).value == pytest.approx(1.0)
    assert learned(0.05, 0.95).value == pytest.approx(0.70)
    assert learned(0.006, 0.95).value == Kappa().value, "neither good enough to rise nor bad enough to fall"
    idle = Kappa()
    for step in range(720):
        idle = learn_kappa(idle, outcomes(5.0 * step, 0.0, 0.2), False, 1)
    assert idle.value == Kappa().value, "a single idle replica tests nothing"


def test_kappa_falls_before_misses_are_as_many_as_the_target_allows() -> None:
    """Of 1%, so that misses in bursts, from which nothing is learned, have room in it."""
    assert learned(0.008, 0.8, minutes=10).value < Kappa().value == learned(0.006, 0.8, minutes=10).value


def test_a_lower_share_of_requests_lets_a_replica_be_fuller_and_plans_for_commoner_errors() -> None:
    """2% miss: too many of 1%, hardly any of 10%."""
    for allowed, fuller in ((0.01, False), (0.1, True)):
        kappa, errors = Kappa(), Errors()
        for step in range(720):
            kappa = learn_kappa(kappa, outcomes(5.0 * step, 0.02, 0.95 * kappa.value), False, 4, allowed)
            errors = learn_quantile(errors, Outcomes(5.0 * step, 100.0, 2.0), allowed=allowed)
        assert (kappa.value > Kappa().value) is fuller
        assert (errors.quantile < Errors().quantile) is fuller


def test_kappa_learns_nothing_while_the_plan_is_not_kept() -> None:
    assert learned(0.5, 1.2).value == Kappa().value


def test_kappa_stays_under_what_was_bad() -> None:
    kappa, bad = Kappa(value=0.9), 0.0
    for step in range(12 * 60 * 3):
        load = 0.95 * kappa.value
        share = 0.05 if load > 0.85 else 0.0
        before = kappa.value
        kappa = learn_kappa(kappa, outcomes(5.0 * step, share, load), False, 4)
        bad += kappa.value < before
    assert 0.7 < kappa.value <= 0.9
    assert bad <= 24, "it does not run into the same wall every few minutes"


def swinging(share: Callable[[float], float], minutes: int = 90) -> Kappa:
    """Five minutes at 90% of kappa and five at 40%, in turn; `share` of the load misses."""
    kappa = Kappa()
    for step in range(minutes * 12):
        load = (0.9 if step // 60 % 2 else 0.4) * kappa.value
        kappa = learn_kappa(kappa, outcomes(5.0 * step, share(load), load), False, 4)
    return kappa


def test_misses_that_are_as_many_at_low_load_do_not_lower_kappa() -> None:
    """Two in a hundred prompts are too long for the objective on an idle pod, too."""
    kappa = swinging(lambda load: 0.02)
    assert kappa.unavoidable == pytest.approx(0.02)
    assert kappa.value > Kappa().value


def test_misses_that_come_with_the_load_still_lower_kappa() -> None:
    kappa = swinging(lambda load: 0.02 if load < 0.5 else 0.05)
    assert kappa.unavoidable == pytest.approx(0.02)
    assert kappa.value == pytest.approx(0.70)


def test_misses_at_low_load_after_a_queue_are_not_called_unavoidable() -> None:
    """For a minute after load was high, what is late is still of that time."""
    kappa = Kappa()
    for step in range(720):
        high = step % 18 < 6
        share = 0.5 if 6 <= step % 18 < 10 else 0.0
        kappa = learn_kappa(kappa, outcomes(5.0 * step, share, 0.9 if high else 0.2), False, 4)
    assert kappa.unavoidable == 0.0


def test_the_quantile_leaves_unavoidable_misses_out() -> None:
    errors = Errors()
    for step in range(720):
        errors = learn_quantile(errors, Outcomes(5.0 * step, 100.0, 2.0), unavoidable=0.02)
    assert errors.quantile == pytest.approx(0.70)


def test_errors_of_forecasts_are_learned() -> None:
    errors = Errors()
    assert errors.up() == pytest.approx(1.12, abs=0.03)
    for step in range(720):
        errors = learn_errors(errors, 5.0 * step, 1.0, 1.3, 65.0)
    assert errors.up() == pytest.approx(1.3, abs=0.02)
    assert errors.down() >= errors.up()


@given(st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e6)), max_size=60))
def test_factors_stay_in_their_range(values: list[tuple[float, float]]) -> None:
    errors = Errors()
    for step, (expected, arriving) in enumerate(values):
        errors = learn_errors(errors, 20.0 * step, expected, arriving, 40.0)
    assert 1.05 <= errors.up() <= errors.down() <= 1.5


@pytest.mark.parametrize(
    ("allowed", "factor", "quantile"), [(0.01, 1.05, 0.70), (0.05, 1.0278, 0.611), (0.10, 1.0, 0.5)]
)
def test_the_more_may_miss_the_less_is_planned_for_at_the_least(allowed: float, factor: float, quantile: float) -> None:
    """Nothing was ever wrong, and nothing missed."""
    errors = Errors()
    for step in range(720):
        errors = learn_errors(errors, 5.0 * step, 1.0, 1.0, 65.0)
        errors = learn_quantile(errors, Outcomes(5.0 * step, 100.0, 0.0), allowed=allowed)
    assert errors.up(allowed) == pytest.approx(factor, abs=1e-3)
    assert errors.down(allowed) == pytest.approx(factor, abs=1e-3)
    assert errors.quantile == pytest.approx(quantile, abs=1e-3)


def test_half_of_all_may_miss_is_planned_for_as_a_tenth() -> None:
    assert Errors(prior=(0.9,) * 14).up(0.5) == 1.0


def test_the_quantile_follows_the_misses() -> None:
    many = few = Errors()
    for step in range(720):
        many = learn_quantile(many, Outcomes(5.0 * step, 100.0, 5.0))
        few = learn_quantile(few, Outcomes(5.0 * step, 100.0, 0.0))
    assert many.quantile == pytest.approx(0.93)
    assert few.quantile == pytest.approx(0.70)


def test_misses_after_an_error_that_nothing_is_planned_for_do_not_move_the_quantile() -> None:
    errors = Errors()
    for step in range(720):
        errors = replace(errors, seen=((5.0 * step, 2.5),))
        errors = learn_quantile(errors, Outcomes(5.0 * step, 100.0, 5.0))
    assert errors.quantile == Errors().quantile


def jumped(stays: bool, times: int) -> Jumps:
    """Load doubles every ten minutes, for good or for half a minute."""
    jumps = Jumps()
    for step in range(120 * times):
        since = 5.0 * (step % 120)
        jump, there = since < 20, stays or since < 30
        jumps = learn_jumps(jumps, 5.0 * step, 1.0, 2.0 if jump else 1.0, 2.0 if there else 1.0, 65.0)
    return jumps


def test_jumps_that_are_over_before_a_replica_comes_are_trusted_less_each_time() -> None:
    trust = [jumped(stays=False, times=times).trust for times in range(4)]
    assert trust == pytest.approx([1, 1 / 2, 1 / 3, 1 / 4])
    assert jumped(stays=False, times=1).tempered(1.0, 3.0) == pytest.approx(2.0)
    assert jumped(stays=False, times=50).trust >= 0.1, "old ones are forgotten"


def test_jumps_that_stay_are_trusted() -> None:
    assert jumped(stays=True, times=4).trust == 1.0
