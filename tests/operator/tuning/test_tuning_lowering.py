"""A batch limit that is far over what memory holds is lowered once, and is not at fault for every later wait."""

from dataclasses import replace

import pytest
from fluid_service import BOUNDS, LIMITS, OBJECTIVES
from test_tuning_prepare import LAW, SEEN

from busload_operator.tuning import (
    Bottleneck,
    Decision,
    Inputs,
    Knob,
    Mode,
    Prediction,
    Reason,
    Scaling,
    State,
    Verdict,
)
from busload_operator.tuning.decide import LOWERED_ROOM, decide
from busload_operator.tuning.diagnose import Diagnosis
from busload_operator.tuning.observe import Picture
from busload_operator.tuning.settings import Candidate, Situation, batch_ceiling
from busload_operator.tuning.state import Pending, Phase, Streak, Usage
from busload_operator.tuning.types import Outcome
from busload_operator.tuning.verify import follow
from busload_operator.tuning.window import PodWindow

NOW = 1000.0
WINDOW = PodWindow(
    **dict.fromkeys(PodWindow.__dataclass_fields__, 0.0)  # type: ignore[arg-type]
    | {"pod": "a", "waiting_throughout": False, "sequence_lengths": None}
)


def inputs(batch_size: int) -> Inputs:
    return Inputs(
        now=NOW,
        pods=(),
        limits=replace(LIMITS, batch_size=batch_size),
        generation=1,
        replicas=1,
        bounds=replace(BOUNDS, batch_size=replace(BOUNDS.batch_size, max=256)),
        objectives=OBJECTIVES,
        mode=Mode.AUTO,
        scaling=Scaling.OBSERVED,
    )


def calm(batch_size: int, per_request: float = 500.0) -> Situation:
    """Five minutes in which at most 4 of the places were taken; 90% of the cache holds 9 requests of 500 tokens."""
    usage = tuple(Usage(NOW - t, 4.0, 4.0, 0.0, 50.0) for t in range(310, -1, -5))
    state = replace(State.initial(), usage=usage, streak=Streak(Phase.CALM, 60, NOW - 310, NOW - 305))
    seen = replace(SEEN, batch=3.0, batch_limit=float(batch_size), queue=0.0, kv_used=0.3, kv_per_request=per_request)
    diagnosis = Diagnosis(Bottleneck.UNDER_BATCHED, "")
    return Situation(inputs(batch_size), state, seen, seen, 0.0, False, LAW, diagnosis, ready=1, complete=True)


def test_it_is_lowered_to_a_few_more_places_than_memory_holds() -> None:
    found = decide(calm(64))
    assert isinstance(found, Candidate)
    assert (found.knob, found.reason) == (Knob.BATCH_SIZE, Reason.LOW_USE)
    assert batch_ceiling(calm(64)).value == 9
    assert found.after == 14 == -(-LOWERED_ROOM * 9 // 1)


@pytest.mark.parametrize("per_request", [420.0, 500.0, 580.0])
def test_a_lowered_limit_is_not_lowered_again_because_requests_are_a_little_longer(per_request: float) -> None:
    assert decide(calm(14, per_request)) is None


def lowered(peak: float) -> tuple[Pending, Picture]:
    decision = Decision(
        1, NOW - 20, Knob.BATCH_SIZE, 64, 14, Reason.LOW_USE, "", (), Prediction(None, None, None, ""),
        Outcome(Verdict.PENDING), applied=True,
    )  # fmt: skip
    pending = Pending(
        decision=decision,
        limits_before=replace(LIMITS, batch_size=64),
        limits_after=replace(LIMITS, batch_size=14),
        replicas_before=1,
        replicas_after=1,
        pods=("a",),
        tokens_per_second_before=None,
        inter_token_before=None,
        prefill_before=0.0,
        span_before=None,
        applied_at=NOW - 15,
    )
    return pending, Picture(("a",), (replace(WINDOW, running_peak=peak),), (), (), False, None)


def test_a_wait_puts_it_back_where_its_places_are_taken() -> None:
    pending, picture = lowered(peak=14.0)
    judged = follow(pending, inputs(14), picture, LAW, missed=True)
    assert judged.put_back


def test_a_wait_for_something_else_does_not() -> None:
    pending, picture = lowered(peak=9.0)
    judged = follow(pending, inputs(14), picture, LAW, missed=True)
    assert judged.pending is not None
    assert not judged.put_back
