from dataclasses import replace

import pytest
from test_tuning_window import BASE, NEXT, read, sample

from busload_operator.tuning import Bottleneck, Law, Objectives, words
from busload_operator.tuning.diagnose import diagnose
from busload_operator.tuning.observe import wait_seconds
from busload_operator.tuning.window import PodWindow, View, view

window = read(BASE, sample(NEXT), 102.0).window
assert window is not None
WINDOW: PodWindow = window
seen = view([WINDOW])
assert seen is not None
QUEUED: View = seen
CALM = replace(QUEUED, queue=0.0, full=False, itl=0.05)
# The knee a/g is at a batch of 5.
LAW = Law(a=0.02, b=0.004, c=0.0, d=0.001, error=0.05, samples=80, batch_min=1, batch_max=16, usable=True)
NOTHING_PREFILLED = {"prefill_per_token": 0.0, "prefill_per_step": 0.0, "kv_per_request": 0.0}


@pytest.mark.parametrize(
    ("view_", "law", "expected", "says"),
    [
        (QUEUED, None, Bottleneck.SLOT_BOUND, "28.0 requests wait (8.0s), 3.9 of 4 places are taken"),
        (replace(QUEUED, preemptions=3.0), None, Bottleneck.KV_BOUND, "3 preemptions"),
        (replace(QUEUED, full=False, batch=2.0, kv_used=0.97), None, Bottleneck.KV_BOUND, "peaks at 97%"),
        (replace(QUEUED, full=False, batch=2.0), None, Bottleneck.PREFILL_BOUND, "only 2.0 of 4 places"),
        (replace(QUEUED, batch=16.0, batch_limit=16.0, **NOTHING_PREFILLED), LAW, Bottleneck.SATURATED, "knee of 5.0"),
        (replace(QUEUED, batch=14.0, batch_limit=14.0, **NOTHING_PREFILLED), LAW, Bottleneck.SLOT_BOUND, "14.0 of 14"),
        (replace(CALM, batch=0.0), None, Bottleneck.IDLE, "0.0 of 4"),
        (replace(CALM, itl=0.2), None, Bottleneck.DECODE_BOUND, "a token takes 200ms (objective 100ms)"),
        (replace(CALM, batch=1.0), None, Bottleneck.UNDER_BATCHED, "1.0 of 4"),
        (replace(CALM, batch=3.0), None, Bottleneck.DECODE_BOUND, "3.0 of 4"),
        (replace(CALM, batch=3.0, **NOTHING_PREFILLED), LAW, Bottleneck.UNDER_BATCHED, "knee of the step law"),
        (replace(CALM, batch=9.0, **NOTHING_PREFILLED), LAW, Bottleneck.DECODE_BOUND, "50ms"),
        (replace(CALM, batch=18.0, **NOTHING_PREFILLED), LAW, Bottleneck.SATURATED, "18.0"),
        (replace(CALM, prefill_per_step=200.0), LAW, Bottleneck.PREFILL_BOUND, "of step time goes to prompts"),
        (
            replace(CALM, batch=3.0, itl=None, prefill_per_step=500.0),
            None,
            Bottleneck.PREFILL_BOUND,
            "no request got a",
        ),
        (replace(CALM, batch=3.0), replace(LAW, usable=False), Bottleneck.DECODE_BOUND, "3.0 of 4"),
    ],
)
def test_bottleneck_and_its_numbers(view_: View, law: Law | None, expected: Bottleneck, says: str) -> None:
    found = diagnose(view_, 8.0, law, Objectives(2.0, 0.1))
    assert found.bottleneck is expected, found.evidence
    assert says in found.evidence
    assert found.evidence.endswith(".")


ROUGH = replace(LAW, usable=False, error=0.2)
"""As of a node that others use: too rough to act on."""


@pytest.mark.parametrize(
    ("view_", "error", "expected"),
    [
        # 200 prompt tokens are 200 ms, beside 30 ms of 3 places: 83% of a step.
        (replace(CALM, batch=3.0, prefill_per_step=200.0), 0.2, Bottleneck.PREFILL_BOUND),
        (replace(CALM, batch=3.0, prefill_per_step=150.0), 0.35, Bottleneck.DECODE_BOUND),
        (replace(CALM, batch=3.0, prefill_per_step=2000.0), 0.45, Bottleneck.DECODE_BOUND),
        (replace(QUEUED, batch=19.0, batch_limit=19.0, **NOTHING_PREFILLED), 0.2, Bottleneck.SATURATED),
        (replace(QUEUED, batch=17.0, batch_limit=17.0, **NOTHING_PREFILLED), 0.2, Bottleneck.SLOT_BOUND),
        (replace(QUEUED, batch=17.0, batch_limit=17.0, **NOTHING_PREFILLED), 0.05, Bottleneck.SLOT_BOUND),
    ],
)
def test_a_law_that_is_too_rough_to_act_on_names_what_is_plain_by_more_than_its_error(
    view_: View, error: float, expected: Bottleneck
) -> None:
    found = diagnose(view_, 8.0, replace(ROUGH, error=error), Objectives(2.0, 0.1))
    assert found.bottleneck is expected, found.evidence


def test_wait_is_queue_over_finish_rate() -> None:
    # 157 tokens in 1.9 busy seconds, 100 tokens per request: 0.826 requests/s finish.
    wait, bound = wait_seconds(QUEUED, (replace(WINDOW, finished=1.0),), 100.0)
    assert wait == pytest.approx(28 / (157 / 1.9 / 100))
    assert not bound
    assert wait_seconds(replace(QUEUED, queue=0.0), (WINDOW,), None) == (0.0, False)


def test_wait_before_any_request_finished_is_a_lower_bound() -> None:
    # 3.9 places freed nobody for 2 s, so at most 1.95 requests/s finish.
    wait, bound = wait_seconds(QUEUED, (WINDOW,), None)
    assert wait == pytest.approx(28 / (3.9 / 2))
    assert bound
    # The running requests are longer than the mean ever seen: the bound is the better number.
    assert wait_seconds(QUEUED, (WINDOW,), 10.0) == (wait, True)


def test_wait_is_unknown_when_nothing_is_known() -> None:
    assert wait_seconds(QUEUED, (replace(WINDOW, finished=1.0),), None) == (None, False)


@pytest.mark.parametrize(
    ("value", "text"), [(None, "unknown"), (0.0, "0s"), (0.0642, "64ms"), (8.2, "8.2s"), (140.4, "140s")]
)
def test_seconds_for_people(value: float | None, text: str) -> None:
    assert words.seconds(value) == text


def test_sizes_and_counts_for_people() -> None:
    assert words.size(3 * 2**29) == "1.5 GiB"
    assert words.size(17) == "17 bytes"
    assert words.count(1, "pod") == "1 pod"
    assert words.count(2, "pod") == "2 pods"
    assert words.number(61.04) == "61.0"
    assert words.number(610.4) == "610"
