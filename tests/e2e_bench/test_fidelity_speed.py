from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from busload_operator.tuning import Law
from busload_operator.tuning.window import PodWindow
from busload_runtime.bench.outcome import Outcome
from e2e.bench.reference_steps import Reference
from e2e.bench.simulator_fidelity import Fitted, Round, Speed, fit_law

FITTED = Fitted(Law(a=0.01, b=0.0, c=0.0, d=0.0, error=0.0, samples=1, batch_min=1, batch_max=1, usable=True), 0.0, 0.0)

STEADY = Reference([100.0], [0.01])


def windows(*busy: float) -> list[PodWindow]:
    """A second each, of as many steps as take half a second at the speed of the fit; busy for so long."""
    nothing: dict[str, Any] = {field.name: 0.0 for field in fields(PodWindow)}
    given = [
        {"start": 100.0 + i, "end": 101.0 + i, "seconds": 1.0, "steps": 50.0 if b else 0.0, "busy_seconds": b}
        for i, b in enumerate(busy)
    ]
    return [PodWindow(**(nothing | values)) for values in given]


def test_at_half_the_speed_a_load_takes_half_as_many_seconds_of_the_machine_of_the_fit() -> None:
    speed = Speed.seen(FITTED, windows(*[1.0] * 10), began=100.0)
    assert (speed.fastest, speed.slowest) == (2.0, 2.0)
    assert speed.machine(4.0) == pytest.approx(2.0)
    assert speed.wall(2.0) == pytest.approx(4.0)
    assert speed.wall(20.0) == pytest.approx(40.0), "beyond the last window it goes on as it was"


def test_five_windows_tell_a_speed() -> None:
    speed = Speed.seen(FITTED, windows(*[0.5] * 10, *[1.0] * 10), began=100.0)
    assert (speed.fastest, speed.slowest) == (1.0, 2.0)
    assert speed.machine(8.0) == pytest.approx(8.0)
    assert speed.machine(20.0) - speed.machine(12.0) == pytest.approx(4.0)


def test_an_idle_machine_is_as_fast_as_in_the_fit() -> None:
    assert Speed.seen(FITTED, windows(0.0, 0.0, 0.0), began=100.0).machine(2.5) == pytest.approx(2.5)


def test_one_speed_for_all_of_a_load() -> None:
    speed = Speed([(1.0, 1.25)])
    assert (speed.machine(0.5), speed.machine(5.0), speed.wall(4.0)) == pytest.approx((0.4, 4.0, 5.0))


def test_a_pace_is_the_sum_over_its_windows() -> None:
    assert FITTED.pace(windows(0.5, 1.0, 1.0, 1.0)) == pytest.approx(1.75)


def test_reference_steps_tell_the_speed_of_a_load() -> None:
    """Twice as slow in the second ten seconds; nothing runs in the third."""
    reference = Reference([100.0 + i / 4 for i in range(80)], [0.01] * 40 + [0.02] * 40)
    assert reference.typical == pytest.approx(0.015)
    speed = Speed.told(reference, began=100.0, seconds=30.0)
    assert (speed.fastest, speed.slowest) == pytest.approx((2 / 3, 4 / 3))
    assert speed.machine(6.0) == pytest.approx(9.0)
    assert speed.machine(18.0) - speed.machine(14.0) == pytest.approx(3.0)
    assert speed.machine(29.0) - speed.machine(25.0) == pytest.approx(3.0), "as before"
    assert reference.pace(0.0, 50.0) == pytest.approx(2 / 3), "before the first one, as with it"


def test_the_law_is_that_of_a_machine_of_one_speed() -> None:
    """Windows of a batch of 4 on a machine half as fast as for those of 16: it looks as if a batch took no time."""
    nothing: dict[str, Any] = {field.name: 0.0 for field in fields(PodWindow)}
    kept, ended, seconds = list[PodWindow](), list[float](), list[float]()
    for i in range(160):
        batch, slow = (4.0, 2.0) if i // 10 % 2 else (16.0, 1.0)
        work = {"steps": 50.0, "step_batch": 50.0 * batch, "busy_seconds": 50.0 * slow * (0.004 + 0.001 * batch)}
        times = {"start": 100.0 + i, "end": 101.0 + i, "seconds": work["busy_seconds"]}
        kept.append(PodWindow(**(nothing | work | times)))
        ended += [100.25 + i, 100.75 + i]
        seconds += [0.01 * slow] * 2
    middles = [w for i, w in enumerate(kept) if 2 <= i % 10 < 8]
    alone = (115.0, Outcome(1.0, chunks=[1.0 + 4 / 3 * 1.5 * 0.004 + 0.005], input_tokens=20))
    fitted = fit_law([Round(middles, middles, [alone])], Reference(ended, seconds))
    # Speed 1 is that of the mean reference step, which takes 1.5 times as long as the fast one.
    assert (fitted.law.a, fitted.law.b) == pytest.approx((1.5 * 0.004, 1.5 * 0.001), rel=1e-3)
    assert fitted.front_end == pytest.approx(0.005, rel=1e-2), "beyond a step as slow as the machine then was"


@given(
    st.lists(st.floats(min_value=0.1, max_value=1.0), min_size=1, max_size=30), st.floats(min_value=0, max_value=100)
)
def test_there_and_back(busy: list[float], wall: float) -> None:
    speed = Speed.seen(FITTED, windows(*busy), began=100.0)
    assert speed.wall(speed.machine(wall)) == pytest.approx(wall, abs=1e-6)


def test_the_fit_tells_steps_from_what_is_between_them_and_outside() -> None:
    """An engine with a known law, 0.5 ms between steps, 6 ms of HTTP in which it idles with a single client."""
    a, b, d, gap, front_end = 0.004, 0.001, 0.0003, 0.0005, 0.006
    kept, together, alone = list[PodWindow](), list[PodWindow](), list[tuple[float, Outcome]]()
    for batch in (1, 1, 1, 4, 12, 24) * 8:
        for prompt in (20.0, 200.0):
            steps, prompts = 100.0, 10.0
            busy = steps * (a + b * batch - gap) + prompts * prompt * d
            outside = prompts * front_end if batch == 1 else 0.0
            work = {"steps": steps, "step_batch": steps * batch, "prefill_tokens": prompts * prompt}
            nothing: dict[str, Any] = {field.name: 0.0 for field in fields(PodWindow)}
            seconds = {"busy_seconds": busy, "seconds": busy + gap * steps + outside}
            window = PodWindow(**(nothing | work | seconds))
            kept.append(window)
            if batch > 1:
                together.append(window)
    for prompt_tokens in (20, 200):
        alone.append(
            (100.0, Outcome(1.0, chunks=[1.0 + a + d * prompt_tokens + front_end], input_tokens=prompt_tokens))
        )
    fitted = fit_law([Round(kept, together, alone)], STEADY)
    assert (fitted.gap, fitted.front_end) == pytest.approx((gap, front_end), rel=1e-4)
    assert (fitted.law.a, fitted.law.b, fitted.law.d) == pytest.approx((a, b, d), rel=1e-3)
    assert fitted.pace(kept) == pytest.approx(1.0)
