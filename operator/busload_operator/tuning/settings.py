"""Candidates that change a setting: what they would bring, or why they are out."""

import math
from dataclasses import dataclass, replace

from busload_operator.tuning import words
from busload_operator.tuning.diagnose import KV_ROOM, Diagnosis
from busload_operator.tuning.fit import (
    TRUSTED_BEYOND,
    Workload,
    batch_within,
    step_error,
    step_seconds,
    tokens_per_second,
)
from busload_operator.tuning.sizing import Plan
from busload_operator.tuning.state import Phase, State
from busload_operator.tuning.types import Bottleneck, Inputs, Knob, Law, Prediction, Reason
from busload_operator.tuning.window import View
from busload_runtime.contract import Limits, default_token_budget

MIN_GAIN = 0.15
"""Dead band: twice the error of a good law."""
MAX_FACTOR = 2.0
"""A change at most doubles: the law says little further out."""
ITL_MARGIN = 0.9
"""Share of the inter-token objective that a mean step may use; the rest is for the noise of steps."""
KV_MARGIN = 0.9
"""Share of the KV pool that the mean request lengths may fill; the rest spares preemptions."""
NEARLY_KV, NEARLY_PLACES = 0.7, 0.9
"""Share of the KV cache and of the batch limit in use from which more is made ready."""
PREPARE_SECONDS = 30.0
"""Between two such changes."""
PREPARE_WINDOWS = 3
"""Windows in a row, once requests wait: then the change has a before to be judged by."""
SURE = 0.05
"""Standard error of a predicted step time that is worth a word."""
KV_STEP, KV_STEP_TRIED = 20, 40
"""Percentage points per change: of all pods at once, and where one pod tries it first and so risks no other."""


@dataclass(frozen=True, slots=True)
class Situation:
    """What a decision is made from."""

    inputs: Inputs
    state: State
    seen: View
    """Over the windows since the objective is missed (or since it is met), at most 15 s."""
    loaded: View
    """The same pods with work for every place, under the limits in force, at most 30 s: what a change is predicted
    from and compared with. A machine's speed moves within seconds, and half of a burst's first window is idle. `seen`
    where there is no such window."""
    wait: float | None
    wait_is_lower_bound: bool
    law: Law | None
    diagnosis: Diagnosis
    ready: int
    """Ready pods."""
    complete: bool
    """Every ready pod speaks."""
    plan: Plan | None = None
    """The computed number of replicas; None: not known yet."""

    @property
    def work(self) -> Workload:
        return Workload(self.seen.kv_per_request, self.seen.prefill_per_token)

    @property
    def usable_law(self) -> Law | None:
        return self.law if self.law is not None and self.law.usable else None

    @property
    def kv_step(self) -> int:
        return KV_STEP_TRIED if self.ready > 1 else KV_STEP

    @property
    def wait_text(self) -> str:
        return ("at least " if self.wait_is_lower_bound else "") + words.seconds(self.wait)

    def refused(self, knob: Knob) -> list[int]:
        """The values of the knob that were tried and did not help lately."""
        return self._refused(knob, down=False)

    def refused_down(self, knob: Knob) -> list[int]:
        """The same for values that were too low to help."""
        return self._refused(knob, down=True)

    def _refused(self, knob: Knob, down: bool) -> list[int]:
        now, law = self.inputs.now, self.usable_law is not None
        return [r.value for r in self.state.refused if (r.knob, r.down) == (knob, down) and r.holds(now, law)]


@dataclass(frozen=True, slots=True)
class Candidate:
    knob: Knob
    before: int
    after: int
    reason: Reason
    message: str
    prediction: Prediction
    limits: Limits
    replicas: int


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The largest useful value of a setting, and what sets it."""

    value: int
    because: str


def batch_ceiling(s: Situation) -> Ceiling:
    """The largest batch limit that bounds, memory, the inter-token objective and experience allow."""
    bounds, seen, objective = s.inputs.bounds, s.seen, s.inputs.objectives.inter_token_latency
    ceilings = [Ceiling(bounds.batch_size.max, f"bounds.batchSize.max is {bounds.batch_size.max}")]
    if seen.kv_per_request > 0:
        fits = int(KV_MARGIN * seen.kv_tokens / seen.kv_per_request)
        ceilings.append(
            Ceiling(fits, f"the KV cache holds {fits} requests of {seen.kv_per_request:.0f} tokens in {KV_MARGIN:.0%}")
        )
    if (law := s.usable_law) is not None:
        within = batch_within(law, s.work, ITL_MARGIN * objective)
        if within < 1e6:
            text = f"the step law allows a batch of {within:.0f} within the inter-token objective of"
            ceilings.append(Ceiling(int(within), f"{text} {words.seconds(objective)}"))
    elif seen.itl is not None and seen.itl >= ITL_MARGIN * objective:
        text = f"a token takes {words.seconds(seen.itl)} already, of an objective of {words.seconds(objective)}"
        ceilings.append(Ceiling(s.inputs.limits.batch_size, text))
    if refused := s.refused(Knob.BATCH_SIZE):
        ceilings.append(Ceiling(min(refused) - 1, "a larger one did not help a while ago"))
    return min(ceilings, key=lambda c: c.value)


def raise_batch(s: Situation) -> Candidate | str:
    """A larger batch limit, or why not."""
    now = s.inputs.limits.batch_size
    if s.diagnosis.bottleneck not in (Bottleneck.SLOT_BOUND, Bottleneck.SATURATED):
        return "the batch limit is not what requests wait for"
    if s.seen.kv_used >= KV_ROOM:
        return f"the KV cache is {words.percent(s.seen.kv_used)} full, a larger batch needs room in it"
    ceiling = batch_ceiling(s)
    after = min(ceiling.value, int(MAX_FACTOR * now))
    if after <= now:
        return f"batchSize stays at {now}: {ceiling.because}"
    prediction = predict(s, after)
    if not worthwhile(s, prediction):
        return f"batchSize {after} is predicted to bring only {words.number(prediction.tokens_per_second)} tokens/s"
    budget = max(s.inputs.limits.token_budget, default_token_budget(after))
    limits = replace(s.inputs.limits, batch_size=after, token_budget=budget)
    message = (
        f"batchSize {now} -> {after}: {words.number(s.seen.queue)} requests wait {s.wait_text} (objective "
        f"{words.seconds(s.inputs.objectives.time_to_first_token)}) because the batch limit of {now} is used up, "
        f"while the KV cache is at most {words.percent(s.seen.kv_used)} full; expected {expected(prediction)}."
    )
    return Candidate(
        Knob.BATCH_SIZE, now, after, Reason.WAIT_FROM_BATCH_LIMIT, message, prediction, limits, s.inputs.replicas
    )


def raise_again(s: Situation) -> str | None:
    """That a larger batch limit is soon tried again, since the law says that it is worth it: its last raise showed
    nothing, as a neighbour may have had the machine. None: it is not."""
    now = s.inputs.now
    soon = [r for r in s.state.refused if r.knob is Knob.BATCH_SIZE and now < r.law_from < math.inf]
    if not soon or s.usable_law is None:
        return None
    kept = tuple(r for r in s.state.refused if r not in soon)
    if isinstance(raise_batch(replace(s, state=replace(s.state, refused=kept))), str):
        return None
    seconds = max(r.law_from for r in soon) - now
    return f"the last larger batch showed no gain where the law expects one; it is tried again in {seconds:.0f} s"


def raise_kv_cache(s: Situation) -> Candidate | str:
    """A larger share of memory for the KV cache, or why not."""
    now, allowed = s.inputs.limits.kv_cache_percent, s.inputs.bounds.kv_cache_percent.max
    if s.diagnosis.bottleneck != Bottleneck.KV_BOUND:
        return "the KV cache is not what requests wait for"
    after = min(allowed, now + s.kv_step)
    if refused := s.refused(Knob.KV_CACHE_PERCENT):
        after = min(after, min(refused) - 1)
    if after <= now:
        because = "a larger one did not help a while ago" if refused else f"bounds.kvCachePercent.max is {allowed}"
        return f"kvCachePercent stays at {now}: {because}"
    batch = min(s.seen.batch * after / now, float(s.inputs.limits.batch_size))
    prediction = predict(s, batch)
    if not worthwhile(s, prediction) and s.seen.preemptions == 0:
        return (
            f"kvCachePercent {after} is predicted to bring only {words.number(prediction.tokens_per_second)} tokens/s"
        )
    message = (
        f"kvCachePercent {now} -> {after}: {words.number(s.seen.queue)} requests wait {s.wait_text} because the KV "
        f"cache is {words.percent(s.seen.kv_used)} full ({words.count(s.seen.preemptions, 'preemption')}); expected "
        f"{expected(prediction)}."
    )
    limits = replace(s.inputs.limits, kv_cache_percent=after)
    return Candidate(
        Knob.KV_CACHE_PERCENT, now, after, Reason.WAIT_FROM_KV_CACHE, message, prediction, limits, s.inputs.replicas
    )


def prepare(s: Situation) -> Candidate | None:
    """More room before requests wait for long, where it is nearly used up and the law says that more is good: KV cache
    while memory bounds the batch rather than the inter-token objective, then places in the batch."""
    law, changed = s.usable_law, s.state.changed_at
    if law is None or (changed is not None and s.inputs.now - changed < PREPARE_SECONDS):
        return None
    if s.state.streak.phase is Phase.QUEUE and s.state.streak.count < PREPARE_WINDOWS:
        return None  # the first windows of a burst are nothing to compare with
    limits, most = s.inputs.limits, s.inputs.bounds.kv_cache_percent.max
    within = batch_within(law, s.work, ITL_MARGIN * s.inputs.objectives.inter_token_latency)
    held = s.seen.kv_per_request
    fits = KV_MARGIN * s.seen.kv_tokens / held if held > 0 else math.inf
    percent = min([most, limits.kv_cache_percent + s.kv_step, *(r - 1 for r in s.refused(Knob.KV_CACHE_PERCENT))])
    if s.seen.kv_used >= NEARLY_KV and fits < within and percent > limits.kv_cache_percent:
        text = f"the KV cache is {words.percent(s.seen.kv_used)} full, and the objective allows a larger batch"
        lifted = replace(limits, kv_cache_percent=percent)
        return _prepared(s, Knob.KV_CACHE_PERCENT, limits.kv_cache_percent, percent, text, lifted)
    after = min(batch_ceiling(s).value, int(MAX_FACTOR * limits.batch_size))
    peak = max((u.running_per_pod for u in s.state.usage if u.at > s.inputs.now - PREPARE_SECONDS), default=0.0)
    if peak >= NEARLY_PLACES * limits.batch_size and after > (1 + MIN_GAIN) * limits.batch_size:
        text = f"up to {peak:.0f} of {limits.batch_size} places are taken, and the law allows more"
        budget = max(limits.token_budget, default_token_budget(after))
        lifted = replace(limits, batch_size=after, token_budget=budget)
        return _prepared(s, Knob.BATCH_SIZE, limits.batch_size, after, text, lifted)
    return None


def _prepared(s: Situation, knob: Knob, before: int, after: int, text: str, limits: Limits) -> Candidate:
    if s.state.streak.phase is not Phase.QUEUE:
        prediction = Prediction(s.seen.tokens_per_second, 0.0, s.seen.itl, "the load as it is, which nothing waits for")
        message = f"{knob} {before} -> {after}: {text}."
    else:
        prediction = predict(s, min(s.seen.batch * after / before, float(limits.batch_size)))
        message = f"{knob} {before} -> {after}: {text}; expected {expected(prediction)}."
    return Candidate(knob, before, after, Reason.NEARLY_FULL, message, prediction, limits, s.inputs.replicas)


def predict(s: Situation, places: float) -> Prediction:
    """What a pod with so many places would do with the present queue.

    With the law the figures measured under load are scaled by the law's ratio, so that a constant error of the law
    cancels. Without it only a bound is known: step time does not fall when the batch grows.
    """
    seen, waiting = s.loaded, s.seen.queue
    batch = max(seen.batch, min(places, seen.batch + waiting / seen.pods))
    growth = batch / seen.batch if seen.batch > 0 else 1.0
    queue = max(0.0, waiting - (batch - seen.batch) * seen.pods)
    law = s.usable_law
    if law is None:
        speedup, slower = growth, None
        basis = "step law not known yet: linear bound, at best"
    else:
        now = tokens_per_second(law, s.work, seen.batch)
        speedup = tokens_per_second(law, s.work, batch) / now if now > 0 else 1.0
        slower = step_seconds(law, s.work, batch) / step_seconds(law, s.work, seen.batch)
        basis = f"step law (error {words.percent(law.error)}, {law.samples} windows)"
        if (unsure := step_error(law, s.work, batch)) > SURE:
            basis += f", its step time known to {words.percent(unsure)}"
        if batch > TRUSTED_BEYOND * law.batch_max:
            basis += f", extrapolated: batches up to {law.batch_max:.1f} were seen"
    wait = None
    if s.wait is not None and waiting > 0:
        wait = s.wait * queue / waiting / speedup
    itl = seen.itl * slower if seen.itl is not None and slower is not None else None
    return Prediction(seen.tokens_per_second * speedup, wait, itl, basis)


def worthwhile(s: Situation, prediction: Prediction) -> bool:
    """Over the dead band, or enough to meet the objective."""
    after, before = prediction.tokens_per_second, s.loaded.tokens_per_second
    gains = after is not None and after > (1 + MIN_GAIN) * before
    return gains or (prediction.wait is not None and prediction.wait <= s.inputs.objectives.time_to_first_token)


def expected(prediction: Prediction) -> str:
    """A prediction in words."""
    parts = [f"{words.number(prediction.tokens_per_second)} tokens/s"]
    if prediction.wait is not None:
        parts.append(f"a wait of {words.seconds(prediction.wait)}")
    if prediction.inter_token_latency is not None:
        parts.append(f"{words.seconds(prediction.inter_token_latency)} per token")
    return f"{', '.join(parts)} ({prediction.basis})"
