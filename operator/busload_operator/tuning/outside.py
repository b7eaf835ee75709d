"""Settings that somebody else has changed: they are not fought over."""

from dataclasses import replace

from busload_operator.tuning.state import Refused, State
from busload_operator.tuning.types import Inputs, Knob
from busload_operator.tuning.verify import RETRY_SECONDS


def follow_outside(state: State, inputs: Inputs) -> State:
    """A setting that somebody else has lowered (another operator, a person) is not raised again for a while. Bounds
    that lower it need no such care: they are kept anyway."""
    now, found, bounds = inputs.limits, state.found, inputs.bounds
    if found is None or now in (found, state.asked):
        return state
    until = inputs.now + RETRY_SECONDS
    lowered = [
        Refused(knob, after + 1, until)
        for knob, before, after, most in (
            (Knob.BATCH_SIZE, found.batch_size, now.batch_size, bounds.batch_size.max),
            (Knob.KV_CACHE_PERCENT, found.kv_cache_percent, now.kv_cache_percent, bounds.kv_cache_percent.max),
            (Knob.TOKEN_BUDGET, found.token_budget, now.token_budget, None),
        )
        if after < before and after != most
    ]
    return replace(state, refused=(*(r for r in state.refused if r.until > inputs.now), *lowered))
