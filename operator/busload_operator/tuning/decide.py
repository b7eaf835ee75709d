"""Chooses at most one change. Settings come before replicas: they cost nothing and work within seconds."""

import math
from dataclasses import replace

from busload_operator.tuning import words
from busload_operator.tuning.diagnose import QUEUE
from busload_operator.tuning.fit import TRUSTED_BEYOND
from busload_operator.tuning.lengths import lower_length, raise_length
from busload_operator.tuning.prompts import prepare_token_budget, raise_token_budget
from busload_operator.tuning.scale import add_replicas, buy_ahead, remove_replica, sell
from busload_operator.tuning.settings import (
    Candidate,
    Situation,
    batch_ceiling,
    predict,
    prepare,
    raise_again,
    raise_batch,
    raise_kv_cache,
)
from busload_operator.tuning.state import Phase
from busload_operator.tuning.types import Bottleneck, Knob, Mode, Prediction, Reason

WINDOWS = 3
"""Windows in a row that must show a miss."""
WINDOWS_BADLY_MISSED = 2
"""The same, when the wait is over twice the objective."""
REPLICA_SECONDS = 10.0
"""For how long requests must wait before a replica is bought because no setting helps: a burst's first seconds are all
prompts and look like a service that cannot keep up with them."""
KV_SECONDS = 30.0
"""For how long a miss must last when memory is the cause: preemptions make throughput come in waves."""
SETTINGS_SECONDS = 60.0
"""How long a missed objective may be met with settings alone."""
_LATE = f"the time to first token is missed for over {SETTINGS_SECONDS:.0f} s"
LOW_SECONDS = 300.0
"""How long low use must last, and the pause between two slow changes."""
FAR_OVER, LOWERED_ROOM = 2.0, 1.5
"""Times what the law and memory allow: from over the first a batch limit is lowered, to the second."""
SMALLER = 0.85
"""Dead band downwards."""


def decide(s: Situation) -> Candidate | str | None:
    """The change to make now; or why none is made although an objective is missed; or None."""
    found = _by_phase(s)
    if isinstance(found, Candidate) or not _is_in_time(s):
        return found
    others = (option(s) for option in (buy_ahead, raise_length, prepare, prepare_token_budget, sell))
    said = [other for other in others if other is not None]
    return next((other for other in said if isinstance(other, Candidate)), said[0] if said else found)


def replicas_meanwhile(s: Situation) -> Candidate | None:
    """While an earlier change of the replicas is on trial: the computed number does not wait for it."""
    found = buy_ahead(s) or (sell(s) if _is_in_time(s) else None)
    return found if isinstance(found, Candidate) else None


def _is_in_time(s: Situation) -> bool:
    """What waits, waits no longer than its objective; otherwise settings are looked at before replicas."""
    return s.wait is not None and s.wait <= s.inputs.objectives.time_to_first_token


def _by_phase(s: Situation) -> Candidate | str | None:
    streak, objective = s.state.streak, s.inputs.objectives.time_to_first_token
    if streak.phase is Phase.SLOW:
        if streak.count < WINDOWS:
            return _more_windows(streak.count, WINDOWS)
        text = f"a token takes {words.seconds(s.seen.itl)} and nothing waits, so no larger batch helps"
        return add_replicas(s, Reason.INTER_TOKEN_OBJECTIVE_MISSED, text)
    if streak.phase is Phase.CALM:
        return _lower(s)
    if s.wait is None:
        return f"{words.number(s.seen.queue)} requests wait, but for how long is not known before one has finished"
    if s.wait <= objective:
        return None
    needed = WINDOWS_BADLY_MISSED if s.wait > 2 * objective else WINDOWS
    if streak.count < needed:
        return _more_windows(streak.count, needed)
    if s.diagnosis.bottleneck is Bottleneck.KV_BOUND and s.inputs.now - streak.since < KV_SECONDS:
        return f"requests wait for KV cache; a change needs this for {KV_SECONDS:.0f} s"
    return _clear_wait(s)


def _more_windows(seen: int, needed: int) -> str:
    return f"an objective is missed in {words.count(seen, 'window')}; a change needs {needed} in a row"


def _clear_wait(s: Situation) -> Candidate | str:
    settings = [raise_batch(s), raise_kv_cache(s), raise_token_budget(s)]
    if not any(isinstance(c, Candidate) for c in settings):
        settings.append(lower_length(s))  # it costs requests: last
    possible = [c for c in settings if isinstance(c, Candidate)]
    if not possible:
        if (lasted := s.inputs.now - s.state.streak.since) < REPLICA_SECONDS:
            return f"no setting helps for {lasted:.0f} s of waiting; a replica needs this for {REPLICA_SECONDS:.0f} s"
        if s.inputs.mode is Mode.AUTO and (again := raise_again(s)) is not None:
            return add_replicas(s, Reason.TIME_LIMIT_PASSED, _LATE) if _overdue(s) else again
        why = _why_not(s, [c for c in settings if isinstance(c, str)])
        return add_replicas(s, Reason.SETTINGS_CANNOT_CLEAR_WAIT, why)
    # Largest predicted throughput first.
    best = max(possible, key=lambda c: c.prediction.tokens_per_second or 0.0)
    if _overdue(s):
        replicas = add_replicas(s, Reason.TIME_LIMIT_PASSED, _LATE)
    elif (hopeless := _hopeless(s, best)) is not None:
        replicas = add_replicas(s, Reason.SETTINGS_CANNOT_CLEAR_WAIT, hopeless)
    else:
        return best
    return replicas if isinstance(replicas, Candidate) else best


def overdue_replicas(s: Situation) -> Candidate | None:
    """While another change is on trial: the replicas that a long missed objective must not wait for."""
    objective = s.inputs.objectives.time_to_first_token
    if s.state.streak.phase is not Phase.QUEUE or s.wait is None or s.wait <= objective or not _overdue(s):
        return None
    found = add_replicas(s, Reason.TIME_LIMIT_PASSED, _LATE)
    return found if isinstance(found, Candidate) else None


def _overdue(s: Situation) -> bool:
    """Settings had their time. Those that were only recommended had none."""
    if s.inputs.mode is not Mode.AUTO:
        return False
    return s.state.missed_since is not None and s.inputs.now - s.state.missed_since > SETTINGS_SECONDS


def _why_not(s: Situation, reasons: list[str]) -> str:
    """The reason that belongs to what limits the service, for the message of the replica decision."""
    own = [r for r in reasons if "is not what requests wait for" not in r]
    if own:
        return "; ".join(own)
    return f"no setting clears a {s.diagnosis.bottleneck} wait"


def _hopeless(s: Situation, best: Candidate) -> str | None:
    """Why even the most of the best setting is predicted not to clear the wait; None when it may, or when the law
    would have to be stretched to say so."""
    law = s.usable_law
    if best.knob is Knob.KV_CACHE_PERCENT:
        most = s.inputs.bounds.kv_cache_percent.max
        batch, text = s.seen.batch * most / best.before, f"kvCachePercent {most}"
    elif best.knob is Knob.BATCH_SIZE:
        batch = float(batch_ceiling(s).value)
        text = f"batchSize {batch:.0f}"
    else:
        return None
    if law is None or batch > TRUSTED_BEYOND * law.batch_max:
        return None
    wait = predict(s, batch).wait
    if wait is None or wait <= s.inputs.objectives.time_to_first_token:
        return None
    return f"even {text} is predicted to leave a wait of {words.seconds(wait)}"


def _lower(s: Situation) -> Candidate | str | None:
    """After a long calm: one replica less, or a smaller batch limit; replicas cost, so they go first."""
    usage, now = s.state.usage, s.inputs.now
    if not usage or usage[-1].at - usage[0].at < LOW_SECONDS or any(u.queue > QUEUE for u in usage):
        return None
    if s.state.changed_at is not None and now - s.state.changed_at < LOW_SECONDS:
        return None
    fewer = remove_replica(s, s.seen, usage) if s.plan is None else None
    if isinstance(fewer, Candidate):
        return fewer
    return _lower_batch(s) or fewer


def _lower_batch(s: Situation) -> Candidate | None:
    now, bounds = s.inputs.limits.batch_size, s.inputs.bounds
    peak = max(u.running_per_pod for u in s.state.usage)
    after = max(bounds.batch_size.clamp(bounds.batch_size_initial), math.ceil(2 * peak))
    if s.usable_law is not None:
        # What the law allows is harmless: unused places of a paged cache take nothing. Nor are a few more than that,
        # so that neither the next short requests ask for them back nor the next long ones move it again.
        most = batch_ceiling(s).value
        if now <= FAR_OVER * most:
            return None
        after = max(after, math.ceil(LOWERED_ROOM * most))
    if after > SMALLER * now:
        return None
    message = (
        f"batchSize {now} -> {after}: for {LOW_SECONDS:.0f} s at most {peak:.0f} requests ran at once in a pod and "
        f"none waited; {after} leaves room for twice that."
    )
    prediction = Prediction(s.seen.tokens_per_second, 0.0, s.seen.itl, "the load of the last five minutes")
    limits = replace(s.inputs.limits, batch_size=after)
    return Candidate(Knob.BATCH_SIZE, now, after, Reason.LOW_USE, message, prediction, limits, s.inputs.replicas)
