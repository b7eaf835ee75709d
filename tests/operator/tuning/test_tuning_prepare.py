"""What is made ready before requests wait for long: when, and what it is predicted to bring."""

from dataclasses import replace

import pytest
from fluid_service import BOUNDS, LIMITS, OBJECTIVES

from busload_operator.tuning import Bottleneck, Inputs, Knob, Law, Mode, Scaling, State
from busload_operator.tuning.diagnose import Diagnosis
from busload_operator.tuning.fit import Workload, tokens_per_second
from busload_operator.tuning.settings import Situation, prepare
from busload_operator.tuning.state import Phase, Streak
from busload_operator.tuning.window import View

LAW = Law(0.04, 0.001, 0.0, 0.0, error=0.02, samples=60, batch_min=1, batch_max=32, usable=True)
SEEN = View(
    pods=1,
    start=100.0,
    end=106.0,
    seconds=6.0,
    batch=8.0,
    batch_limit=10,
    full=False,
    queue=40.0,
    tokens_per_second=tokens_per_second(LAW, Workload(500.0, 0.0), 8.0),
    busy_tokens_per_second=160.0,
    busy=1.0,
    arrived_per_second=2.0,
    finished=12.0,
    kv_used=0.8,
    kv_tokens=5000.0,
    kv_per_request=500.0,
    prefill_per_token=0.0,
    prefill_per_step=0.0,
    prefill_per_busy_second=0.0,
    preemptions=0.0,
    ttft=1.0,
    itl=0.05,
)


def situation(windows: int) -> Situation:
    """The KV cache is 80% full, 40 requests wait within their objective for so many windows, and 2 places are free."""
    inputs = Inputs(
        now=106.0,
        pods=(),
        limits=replace(LIMITS, batch_size=10),
        generation=1,
        replicas=1,
        bounds=BOUNDS,
        objectives=OBJECTIVES,
        mode=Mode.AUTO,
        scaling=Scaling.OBSERVED,
    )
    state = replace(State.initial(), streak=Streak(Phase.QUEUE, windows, 100.0, 102.0))
    diagnosis = Diagnosis(Bottleneck.KV_BOUND, "")
    return Situation(inputs, state, SEEN, SEEN, 1.5, False, LAW, diagnosis, ready=1, complete=True)


@pytest.mark.parametrize("windows", [1, 2])
def test_not_in_the_first_windows_of_a_queue(windows: int) -> None:
    assert prepare(situation(windows)) is None


def test_more_memory_is_predicted_to_fill_no_more_places_than_there_are() -> None:
    found = prepare(situation(3))
    assert found is not None
    assert (found.knob, found.before, found.after) == (Knob.KV_CACHE_PERCENT, 50, 70)
    # 8 * 70 / 50 = 11.2 requests would fit; the batch limit lets 10 in.
    expected = tokens_per_second(LAW, Workload(500.0, 0.0), 10.0)
    assert found.prediction.tokens_per_second == pytest.approx(expected)
