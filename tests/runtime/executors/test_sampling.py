"""Drawing tokens: the kept set against transformers' own filters, the draw against exact probabilities."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from warped import probabilities

from busload_runtime.engine.plan import SamplingParams
from busload_runtime.executors.sampling import sample, uniform


def draws(logits: np.ndarray, count: int, **params: float) -> Counter[int]:
    chosen = SamplingParams(**params)  # type: ignore[arg-type]
    return Counter(sample(logits, chosen, index) for index in range(count))


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.5, 0, 1.0, 0.0),
        (2.0, 5, 1.0, 0.0),
        (1.0, 0, 0.8, 0.0),
        (1.3, 10, 0.6, 0.0),
        (1.0, 1, 1.0, 0.0),
        (1.0, 0, 1e-6, 0.0),
        (1.0, 0, 1.0, 0.05),
        (3.0, 0, 1.0, 0.5),
        (2.0, 10, 0.9, 0.1),
        (1.0, 0, 1.0, 1.0),
    ],
)
def test_the_frequencies_of_sample(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    logits = np.random.default_rng(5).normal(0, 2, 40).astype(np.float32)
    expected = probabilities(logits, temperature, top_k, top_p, min_p)
    seen = draws(logits, 4000, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=11)
    assert set(seen) <= set(np.flatnonzero(expected).tolist())
    frequencies = np.array([seen[token] for token in range(40)]) / 4000
    # 4.5 standard deviations of a binomial share; the seed is fixed, so this never flickers.
    np.testing.assert_array_less(np.abs(frequencies - expected), 4.5 * np.sqrt(expected / 4000) + 1e-9)


def test_top_p_on_a_large_vocabulary() -> None:
    rng = np.random.default_rng(2)
    for spread in (0.01, 1.0, 6.0):  # the nucleus is nearly everything, a lot, a few
        logits = rng.normal(0, spread, 20000).astype(np.float32)
        expected = probabilities(logits, 1.0, 0, 0.7)
        seen = draws(logits, 300, top_p=0.7, seed=1)
        assert set(seen) <= set(np.flatnonzero(expected).tolist())


def test_greedy_takes_the_first_of_equals() -> None:
    assert sample(np.array([0, 3, 1, 3], np.float32), SamplingParams(temperature=0), 9) == 1


@given(
    st.integers(),
    st.integers(0, 2**40),
    st.integers(0, 2**31),
    st.floats(0.05, 3),
    st.integers(0, 60),
    st.floats(0.01, 1),
)
@settings(max_examples=150, deadline=None)
def test_a_draw_is_a_function_of_seed_and_index(
    seed: int, index: int, data: int, temperature: float, top_k: int, top_p: float
) -> None:
    logits = np.random.default_rng(data).normal(0, 5, 50).astype(np.float32)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    token = sample(logits, params, index)
    assert 0 <= token < 50
    sample(logits, params, index + 1)
    assert sample(logits, params, index) == token


def test_extreme_logits_and_temperatures() -> None:
    logits = np.array([1e30, -1e30, 0, 1e30], np.float32)
    assert set(draws(logits, 60, temperature=1e-3, seed=1)) == {0, 3}
    assert set(draws(np.zeros(3, np.float32), 100, temperature=1e6)) == {0, 1, 2}


def test_seeds_and_indexes_give_different_numbers() -> None:
    numbers = {uniform(seed, index) for seed in range(40) for index in range(40)}
    assert len(numbers) == 1600
    assert abs(np.mean(list(numbers)) - 0.5) < 0.03
    assert uniform(-1, 0) == uniform(2**64 - 1, 0)
