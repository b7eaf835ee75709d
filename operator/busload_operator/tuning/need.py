"""Brings what a step saw together for the computed number of replicas."""

import math
from dataclasses import replace

from busload_operator.tuning.demand import Cost, cost
from busload_operator.tuning.headroom import Outcomes
from busload_operator.tuning.observe import Picture
from busload_operator.tuning.settings import KV_MARGIN
from busload_operator.tuning.sizing import Plan, Seen, plan, unplanned
from busload_operator.tuning.state import State
from busload_operator.tuning.types import Inputs, Knob, Law
from busload_operator.tuning.window import PodWindow

ASSUMED_STARTUP = 60.0
"""Seconds from asking for a replica to its being ready, until one was measured."""


def replica_plan(state: State, inputs: Inputs, picture: Picture, law: Law | None) -> tuple[State, Plan | None]:
    """The computed number, or None while the law or the lengths are not known, or too few pods speak."""
    if not picture.majority or law is None or not law.usable or not state.lengths.known:
        return replace(state, sizing=unplanned(state.sizing, inputs.now)), None
    windows = picture.windows
    each = cost(law, state.lengths)
    if not each.slope > 0:
        return state, None
    scrape = sum(w.end - w.start for w in windows) / len(windows)
    sizing, made = plan(
        state.sizing,
        Seen(
            now=inputs.now,
            arrivals=state.arrivals,
            cost=each,
            law=law,
            batch=_largest_batch(state, inputs, picture, law, each),
            waiting=sum(w.waiting for w in windows) * len(picture.ready) / len(windows),
            ready=len(picture.ready),
            replicas=inputs.replicas,
            lead=(state.startup_seconds or ASSUMED_STARTUP) + scrape,
            time_to_first_token=inputs.objectives.time_to_first_token,
            outcomes=_outcomes(inputs.now, windows),
            allowed_misses=inputs.objectives.allowed_misses,
        ),
    )
    return replace(state, sizing=sizing), made


def _outcomes(now: float, windows: tuple[PodWindow, ...]) -> Outcomes | None:
    """Requests of this step that were judged, and their misses; None when a pod does not count them."""
    judged = [w.judged for w in windows if w.judged is not None]
    missed = [w.missed for w in windows if w.missed is not None]
    if len(judged) < len(windows) or len(missed) < len(windows):
        return None
    return Outcomes(now, sum(judged), sum(missed))


def _largest_batch(state: State, inputs: Inputs, picture: Picture, law: Law, each: Cost) -> float:
    """By the inter-token objective, the KV cache at the lengths seen, and bounds; settings follow when they must."""
    within = (inputs.objectives.inter_token_latency - law.a) / each.slope
    held = state.lengths.held
    fits = KV_MARGIN * min(w.kv_tokens for w in picture.windows) / held if held > 0 else math.inf
    refused = [r.value for r in state.refused if r.knob is Knob.BATCH_SIZE and r.holds(inputs.now, law=True)]
    allowed = min([inputs.bounds.batch_size.max, *(max(r - 1, inputs.limits.batch_size) for r in refused)])
    return max(0.0, min(within, fits, float(allowed)))
