"""After a pod was killed for its memory: less of it is asked for, at once, instead of the same again.

This does not wait for windows: a pod that is killed in a loop never gives one.
"""

from dataclasses import replace

from busload_operator.tuning import words
from busload_operator.tuning.state import Pending, Refused, State
from busload_operator.tuning.types import Decision, Inputs, Knob, Outcome, Prediction, Reason, Verdict

STEP_DOWN = 10
"""Percentage points of the KV fraction."""
REMEMBERED_SECONDS = 86_400.0
"""In which the KV fraction that was too much is not tried again."""


def follow_kills(state: State, inputs: Inputs) -> tuple[State, tuple[str, ...]]:
    """The pods that were killed for memory since the last step. Of a pod that is seen for the first time and is ready,
    what happened before is history; one that is not ready may be in a loop of kills."""
    known = dict(state.kills)
    killed = []
    for sample in inputs.pods:
        before = known.get(sample.pod, sample.memory_kills if sample.ready else 0)
        if sample.memory_kills > before:
            killed.append(sample.pod)
    return replace(state, kills=tuple((s.pod, s.memory_kills) for s in inputs.pods)), tuple(sorted(killed))


def ask_for_less(state: State, inputs: Inputs, killed: tuple[str, ...]) -> tuple[State, Decision] | str:
    """The KV fraction a step down; at its least, half the batch limit; or why neither."""
    limits, bounds = inputs.limits, inputs.bounds
    percent = max(bounds.kv_cache_percent.min, limits.kv_cache_percent - STEP_DOWN)
    batch = max(bounds.batch_size.min, limits.batch_size // 2)
    pods = ", ".join(killed[:3])
    if percent < limits.kv_cache_percent:
        knob, before, after = Knob.KV_CACHE_PERCENT, limits.kv_cache_percent, percent
        lower = replace(limits, kv_cache_percent=percent)
    elif batch < limits.batch_size:
        knob, before, after = Knob.BATCH_SIZE, limits.batch_size, batch
        lower = replace(limits, batch_size=batch)
    else:
        return (
            f"{pods} was killed for its memory with kvCachePercent {percent} and batchSize {batch}, the least that "
            "spec.bounds allow: raise resources.limits.memory or lower the bounds"
        )
    decision = Decision(
        id=state.next_id,
        at=inputs.now,
        knob=knob,
        before=before,
        after=after,
        reason=Reason.OUT_OF_MEMORY,
        message=f"{knob} {before} -> {after}: {pods} was killed for its memory (OOMKilled).",
        inputs=(("killed", words.count(len(killed), "pod")), (knob.value, str(before))),
        prediction=Prediction(None, None, None, "a smaller cache and batch need less memory"),
        outcome=Outcome(Verdict.PENDING),
        applied=True,
    )
    pending = Pending(
        decision=decision,
        limits_before=limits,
        limits_after=lower,
        replicas_before=inputs.replicas,
        replicas_after=inputs.replicas,
        pods=tuple(sorted({sample.pod for sample in inputs.pods if sample.ready})),
        tokens_per_second_before=None,
        inter_token_before=None,
        prefill_before=0.0,
        span_before=None,
    )
    refused = (
        *(r for r in state.refused if r.until > inputs.now),
        Refused(knob, before, inputs.now + REMEMBERED_SECONDS),
    )
    after_it = replace(
        state, next_id=state.next_id + 1, pending=pending, changed_at=inputs.now, refused=refused, restored=None
    )
    return replace(after_it, usage=()), decision
