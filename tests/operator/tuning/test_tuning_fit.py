import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_tuning_window import BASE, NEXT, read, sample

from busload_operator.tuning.counters import Probed
from busload_operator.tuning.fit import (
    Fit,
    Workload,
    add,
    batch_within,
    from_probed,
    solve,
    step_error,
    step_seconds,
    tokens_per_second,
)
from busload_operator.tuning.observe import _check_law
from busload_operator.tuning.state import State
from busload_operator.tuning.types import Law
from busload_operator.tuning.window import PodWindow

window = read(BASE, sample(NEXT), 102.0).window
assert window is not None
WINDOW: PodWindow = window


def made(law: Sequence[float], batch: float, kv_each: float, prefill: float, noise: float = 1.0) -> PodWindow:
    """A window of 40 steps at this batch, as an engine with this law would report it."""
    a, b, c, d = law
    steps = 40
    busy = steps * (a + b * batch + c * kv_each * batch) + d * prefill
    return replace(
        WINDOW,
        steps=steps,
        step_batch=steps * batch,
        step_kv_tokens=steps * batch * kv_each,
        prefill_tokens=prefill,
        busy_seconds=busy * noise,
    )


def fitted(windows: list[PodWindow]) -> Law:
    fit = Fit()
    for w in windows:
        fit = add(fit, w)
    law = solve(fit)
    assert law is not None
    return law


def scattered(law: Sequence[float], count: int, spread: float, seed: int = 1) -> list[PodWindow]:
    rng = random.Random(seed)
    return [
        made(law, rng.uniform(1, 16), rng.uniform(50, 800), rng.uniform(0, 600), rng.uniform(1 - spread, 1 + spread))
        for _ in range(count)
    ]


def test_recovers_an_exact_law() -> None:
    law = fitted(scattered((0.02, 0.004, 2e-6, 0.0008), 60, 0.0))
    assert (law.a, law.b, law.c, law.d) == pytest.approx((0.02, 0.004, 2e-6, 0.0008), rel=0.02)
    assert law.error < 0.01
    assert law.usable
    assert law.samples == 60


@given(
    st.tuples(st.floats(1e-4, 0.1), st.floats(0, 0.02), st.floats(0, 1e-5), st.floats(0, 0.002)),
    st.integers(0, 1000),
)
def test_never_negative_and_as_good_as_the_noise(truth: tuple[float, float, float, float], seed: int) -> None:
    law = fitted(scattered(truth, 40, 0.1, seed))
    assert min(law.a, law.b, law.c, law.d) >= 0
    assert law.error <= 0.11


def test_predicts_under_noise() -> None:
    truth = (0.03, 0.005, 0.0, 0.001)
    law = fitted(scattered(truth, 120, 0.15))
    work = Workload(kv_per_request=200, prefill_per_token=0.25)
    for batch in (2, 8, 16):
        exact = truth[0] + batch * (truth[1] + 0.25 * truth[3])
        assert step_seconds(law, work, batch) == pytest.approx(exact, rel=0.1)


def test_not_usable_with_few_windows_or_one_batch_or_a_bad_fit() -> None:
    assert not fitted(scattered((0.02, 0.004, 0.0, 0.001), 10, 0.0)).usable
    assert not fitted([made((0.02, 0.004, 0, 0.001), 4, 100 + i, 10 * i) for i in range(60)]).usable
    assert not fitted(scattered((0.02, 0.004, 0.0, 0.001), 60, 0.9)).usable


def test_three_windows_of_a_batch_count_as_seen_fewer_do_not() -> None:
    law = (0.02, 0.004, 0.0, 0.001)
    windows = [made(law, 4, 100, 30)] * 30 + [made(law, 32, 100, 30)] * 2
    assert fitted(windows).batch_max == 4
    assert fitted([*windows, made(law, 32, 100, 30)]).batch_max == 32


def test_windows_without_enough_steps_change_nothing() -> None:
    assert add(Fit(), replace(WINDOW, steps=2)) == Fit()
    assert add(Fit(), replace(WINDOW, busy_seconds=0.0)) == Fit()
    assert solve(Fit()) is None


def test_forgets_an_old_law() -> None:
    old, new = (0.06, 0.001, 0.0, 0.001), (0.02, 0.01, 0.0, 0.001)
    fresh = fitted(scattered(old, 100, 0.0) + scattered(new, 8000, 0.0, seed=2))
    assert (fresh.a, fresh.b) == pytest.approx((0.02, 0.01), rel=0.05)
    both = fitted(scattered(old, 100, 0.0) + scattered(new, 100, 0.0, seed=2))
    assert not both.usable, "two contradicting laws must show as an error"


def test_batch_within_inverts_step_seconds() -> None:
    law = Law(0.02, 0.004, 1e-6, 0.001, error=0.0, samples=50, batch_min=1, batch_max=8, usable=True)
    work = Workload(kv_per_request=300, prefill_per_token=0.5)
    batch = batch_within(law, work, 0.1)
    assert step_seconds(law, work, batch) == pytest.approx(0.1)
    assert batch_within(law, work, 0.01) == 0
    assert tokens_per_second(law, work, batch) == pytest.approx(batch / 0.1)


def test_standard_errors_cover_the_truth() -> None:
    """Of 200 fits with 3% scatter the true step time is within two standard errors nearly always, inside the range."""
    truth = (0.02, 0.004, 0.0, 0.0008)
    work = Workload(400.0, 0.5)
    exact = truth[0] + 8 * (truth[1] + truth[3] * 0.5)
    hits = 0
    for seed in range(200):
        law = fitted(scattered(truth, 60, 0.05, seed))
        hits += abs(step_seconds(law, work, 8) - exact) <= 2 * step_error(law, work, 8) * step_seconds(law, work, 8)
    assert 170 <= hits <= 200


def test_the_error_grows_away_from_the_batches_seen_and_falls_with_windows() -> None:
    work = Workload(400.0, 0.5)
    few, many = (fitted(scattered((0.02, 0.004, 0.0, 0.0008), n, 0.17)) for n in (30, 600))
    assert step_error(few, work, 8) < step_error(few, work, 40) < step_error(few, work, 200)
    assert step_error(many, work, 40) < step_error(few, work, 40)


def test_an_exact_law_has_no_error() -> None:
    assert step_error(fitted(scattered((0.02, 0.004, 2e-6, 0.0008), 60, 0.0)), Workload(400.0, 0.5), 8) < 0.01


def test_steps_that_a_pod_tried_make_a_law_that_is_used_and_soon_outweighed():
    probed = Probed(4e-3, 5e-4, 1e-6, 3e-4, 32)
    first = from_probed(probed)
    law = solve(first)
    assert law is not None
    assert law.usable
    assert (law.batch_min, law.batch_max) == (1.0, 32.0)
    work = Workload(100.0, 2.0)
    told = probed.a + 20 * (probed.b + 100 * probed.c + 2 * probed.d)
    assert step_seconds(law, work, 20.0) == pytest.approx(told, rel=0.01)
    fit = first
    for batch in [4, 8, 16] * 100:
        slow = (2 * probed.a, 2 * probed.b, 2 * probed.c, 2 * probed.d)
        fit = add(fit, made(slow, batch, 256, 0))
    later = solve(fit)
    assert later is not None
    slower = step_seconds(later, Workload(256.0, 0.0), 16.0)
    assert slower == pytest.approx(2 * (probed.a + 16 * (probed.b + 256 * probed.c)), rel=0.15)


PROBED = Probed(4e-3, 5e-4, 1e-6, 3e-4, 32)


def law_times(a: float, b: float) -> tuple[float, float, float, float]:
    return a * PROBED.a, b * PROBED.b, b * PROBED.c, b * PROBED.d


@pytest.mark.parametrize("speed", [0.5, 1.3, 3.0])
def test_a_tried_law_on_a_machine_of_another_speed_keeps_what_it_says_of_batches(speed: float) -> None:
    """Tried while the machine was slow, or fast: a batch of 16 still takes so many times as long as one of 4."""
    state = replace(State.initial(next_id=1), fit=from_probed(PROBED))
    for second in range(20):
        window = made(law_times(speed, speed), 4, 256, 0)
        state = _check_law(state, float(second), [window])
        state = replace(state, fit=add(state.fit, window), windows=(*state.windows, window))
    assert state.disarmed_at is None
    law = solve(state.fit)
    assert law is not None
    assert law.usable
    assert law.batch_max == 32.0
    for batch in (4.0, 16.0):
        told = speed * (PROBED.a + batch * (PROBED.b + 256 * PROBED.c))
        assert step_seconds(law, Workload(256.0, 0.0), batch) == pytest.approx(told, rel=0.05)


def test_a_tried_law_that_no_speed_explains_is_dropped_at_once_and_disarms_nobody() -> None:
    """Large batches take five times what it says, small ones a third."""
    state = replace(State.initial(next_id=1), fit=from_probed(PROBED))
    for second in range(4):
        windows = [made(law_times(0.3, 0.3), 1, 256, 0), made(law_times(0.3, 5.0), 24, 256, 0)]
        state = _check_law(state, float(second), windows)
    assert state.fit == Fit()
    assert state.disarmed_at is None


def test_a_neighbour_of_seconds_moves_no_law() -> None:
    """Two windows of ten took three times as long: something else started on the same cores."""
    state = replace(State.initial(next_id=1), fit=from_probed(PROBED))
    for second, speed in enumerate([1.1] * 8 + [2.7, 2.9, 1.1, 1.0]):
        window = made(law_times(speed, speed), 8, 256, 0)
        state = _check_law(state, float(second), [window])
        state = replace(state, windows=(*state.windows, window))
    law = solve(state.fit)
    assert law is not None
    assert law.usable
    told = 1.1 * (PROBED.a + 16 * (PROBED.b + 256 * PROBED.c))
    assert step_seconds(law, Workload(256.0, 0.0), 16.0) == pytest.approx(told, rel=0.05)


def test_a_tried_law_that_is_right_stays() -> None:
    state = replace(State.initial(next_id=1), fit=from_probed(PROBED))
    for second in range(20):
        state = _check_law(state, float(second), [made(law_times(1.0, 1.0), 4, 256, 0)])
    assert state.fit == from_probed(PROBED)
