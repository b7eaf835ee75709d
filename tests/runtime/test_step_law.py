"""The solver of the step law: exact where the data are, never negative, nothing from nothing."""

import itertools

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from busload_runtime import step_law

coefficients = st.tuples(st.floats(1e-3, 0.1), st.floats(1e-5, 1e-2), st.floats(1e-8, 1e-5), st.floats(1e-6, 1e-3))
STEPS = [
    (1.0, float(batch), float(batch * length), float(prompt))
    for batch in (1, 4, 16, 64)
    for length in (16, 700)
    for prompt in (0, 100)
]


@given(law=coefficients)
@settings(max_examples=60, deadline=None)
def test_steps_that_follow_a_law_are_predicted_by_the_fitted_one(law: tuple[float, float, float, float]) -> None:
    seconds = [float(np.dot(law, step)) for step in STEPS]
    found = step_law.fit(zip(STEPS, seconds, strict=True))
    assert found is not None
    for step, took in zip(STEPS, seconds, strict=True):
        assert np.dot((found.a, found.b, found.c, found.d), step) == pytest.approx(took, rel=0.02)


@given(noise=st.lists(st.floats(0.2, 5.0), min_size=len(STEPS), max_size=len(STEPS)), law=coefficients)
@settings(max_examples=60, deadline=None)
def test_coefficients_are_never_negative_and_no_feasible_set_is_much_better(
    noise: list[float], law: tuple[float, float, float, float]
) -> None:
    seconds = [float(np.dot(law, step)) * factor for step, factor in zip(STEPS, noise, strict=True)]
    found = step_law.fit(zip(STEPS, seconds, strict=True))
    assert found is not None
    theta = np.array([found.a, found.b, found.c, found.d])
    assert (theta >= 0).all()
    rows = np.array(STEPS) / np.array(seconds)[:, None]
    errors = []
    for size in range(1, 5):
        for active in itertools.combinations(range(4), size):
            some = np.linalg.lstsq(rows[:, active], np.ones(len(rows)), rcond=None)[0]
            if (some >= 0).all():
                errors.append(np.linalg.norm(rows[:, active] @ some - 1))
    assert np.linalg.norm(rows @ theta - 1) <= 1.05 * min(errors) + 1e-4


def test_nothing_gives_no_law() -> None:
    assert step_law.fit([]) is None
    assert step_law.fit([((0.0, 0.0, 0.0, 0.0), 1.0)]) is None
