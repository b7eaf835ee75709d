"""Names what limits the service, with the numbers that decided."""

from dataclasses import dataclass

from busload_operator.tuning import words
from busload_operator.tuning.fit import MAX_ERROR, Workload, slope
from busload_operator.tuning.types import Bottleneck, Law, Objectives
from busload_operator.tuning.window import View

QUEUE = 0.5
"""Waiting requests (mean) from which there is a queue."""
IDLE_BATCH = 0.1
KV_ROOM = 0.85
KV_FULL = 0.95
KNEES_SATURATED = 3.0
"""Batches above 3 a/g are at 75% of the ceiling: a further place buys little (field rule B > 3a/g)."""
ROUGH_ERROR = 0.40
"""Error up to which a law that is too rough to act on can still name what is plain by more than its error."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    bottleneck: Bottleneck
    evidence: str


def diagnose(seen: View, wait: float | None, law: Law | None, objectives: Objectives) -> Diagnosis:
    """The bottleneck of a service whose pods speak."""
    if seen.queue > QUEUE:
        return _with_queue(seen, wait, law)
    return _without_queue(seen, law, objectives)


def _doubt(law: Law | None) -> float | None:
    """By how much what the law says must be exceeded: nothing for a usable one, its error for one that scatters too
    much to be acted on, as on a node that others use. None: it says nothing."""
    if law is None or law.usable:
        return None if law is None else 0.0
    return law.error if MAX_ERROR < law.error <= ROUGH_ERROR else None


def _knee(law: Law, seen: View) -> float | None:
    """a/g, the batch at which half a step is spent on what the batch shares."""
    g = slope(law, Workload(seen.kv_per_request, seen.prefill_per_token))
    return law.a / g if g > 0 else None


def _with_queue(seen: View, wait: float | None, law: Law | None) -> Diagnosis:
    queue = f"{words.number(seen.queue)} requests wait ({words.seconds(wait)})"
    batch = f"{words.number(seen.batch)} of {seen.batch_limit:g} places are taken"
    kv = f"KV cache use peaks at {words.percent(seen.kv_used)}"
    if seen.preemptions > 0 or (seen.kv_used > KV_FULL and not seen.full):
        text = f"{queue}, {kv} with {words.count(seen.preemptions, 'preemption')}, {batch}."
        return Diagnosis(Bottleneck.KV_BOUND, text)
    if seen.full:
        doubt = _doubt(law)
        bend = None if law is None or doubt is None else _knee(law, seen)
        if bend is not None and doubt is not None and seen.batch > KNEES_SATURATED * (1 + doubt) * bend:
            text = f"{queue}, {batch}, and the batch is over {KNEES_SATURATED:g} times the knee of {bend:.1f}."
            return Diagnosis(Bottleneck.SATURATED, text)
        return Diagnosis(Bottleneck.SLOT_BOUND, f"{queue}, {batch}, {kv}.")
    if seen.kv_used > KV_ROOM:
        return Diagnosis(Bottleneck.KV_BOUND, f"{queue}, {kv}, only {batch}.")
    text = f"{queue} though only {batch} and {kv}; a step computes {words.number(seen.prefill_per_step)} prompt tokens."
    return Diagnosis(Bottleneck.PREFILL_BOUND, text)


def _without_queue(seen: View, law: Law | None, objectives: Objectives) -> Diagnosis:
    batch = f"{words.number(seen.batch)} of {seen.batch_limit:g} places are taken and nothing waits"
    if seen.batch < IDLE_BATCH:
        return Diagnosis(Bottleneck.IDLE, f"{batch}.")
    itl = f"a token takes {words.seconds(seen.itl)} (objective {words.seconds(objectives.inter_token_latency)})"
    if seen.itl is not None and seen.itl > objectives.inter_token_latency:
        return Diagnosis(Bottleneck.DECODE_BOUND, f"{batch}, but {itl}.")
    doubt = _doubt(law)
    if law is not None and doubt is not None and _prefill_share(law, seen) > 0.5 + doubt:
        share = words.percent(_prefill_share(law, seen))
        return Diagnosis(Bottleneck.PREFILL_BOUND, f"{batch}; {share} of step time goes to prompts.")
    if seen.itl is None and seen.prefill_per_step > 0:
        prompts = f"a step computes {words.number(seen.prefill_per_step)} prompt tokens"
        return Diagnosis(Bottleneck.PREFILL_BOUND, f"{batch}; {prompts}, and no request got a second token.")
    bend = _knee(law, seen) if law is not None and law.usable else None
    if bend is None:
        kind = Bottleneck.UNDER_BATCHED if seen.batch < 0.5 * seen.batch_limit else Bottleneck.DECODE_BOUND
        return Diagnosis(kind, f"{batch}; {itl}.")
    if seen.batch < bend:
        return Diagnosis(Bottleneck.UNDER_BATCHED, f"{batch}; the knee of the step law is at a batch of {bend:.1f}.")
    kind = Bottleneck.SATURATED if seen.batch > KNEES_SATURATED * bend else Bottleneck.DECODE_BOUND
    return Diagnosis(kind, f"{batch}; the knee of the step law is at a batch of {bend:.1f}, and {itl}.")


def _prefill_share(law: Law, seen: View) -> float:
    prefill = law.d * seen.prefill_per_step
    total = law.a + seen.batch * (law.b + law.c * seen.kv_per_request) + prefill
    return prefill / total if total > 0 else 0.0
