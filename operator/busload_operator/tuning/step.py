"""The whole loop of one service, once: observe, fit, diagnose, verify, decide. Deterministic, no I/O, no clock."""

import json
import math
from dataclasses import dataclass, replace

from busload_operator.tuning import words
from busload_operator.tuning.decide import LOW_SECONDS, decide, overdue_replicas, replicas_meanwhile
from busload_operator.tuning.diagnose import QUEUE, Diagnosis, diagnose
from busload_operator.tuning.fit import MAX_ERROR, MIN_SAMPLES, solve
from busload_operator.tuning.headroom import Errors, Kappa
from busload_operator.tuning.lengths import with_length
from busload_operator.tuning.memory import ask_for_less, follow_kills
from busload_operator.tuning.need import ASSUMED_STARTUP, replica_plan
from busload_operator.tuning.observe import RELEARN_SECONDS, SHOWN_SECONDS, Picture, observe, wait_seconds
from busload_operator.tuning.outside import follow_outside
from busload_operator.tuning.settings import Candidate, Situation
from busload_operator.tuning.sizing import Plan, Sizing, changed
from busload_operator.tuning.state import Pending, Phase, Recommended, State, Streak, Usage
from busload_operator.tuning.trial import APPLY_SECONDS, SLOW_KNOBS, choose, in_force, is_first, settle_seconds
from busload_operator.tuning.types import (
    Bottleneck,
    Bounds,
    Decision,
    Inputs,
    Knob,
    Law,
    Mode,
    Outcome,
    Reason,
    Result,
    Scaling,
    Trial,
    Verdict,
)
from busload_operator.tuning.verify import RETRY_SECONDS, Judgement, follow
from busload_operator.tuning.window import PodWindow, View, view
from busload_runtime.contract import Limits

LOST_SECONDS = 300.0
"""Without a step, after which the past says nothing about now."""
LOADED_SECONDS = 30.0
"""What a change is predicted from and compared with."""
MAX_GAP = 30.0
"""Seconds without sight after which windows in a row, and the record of use, start anew."""


@dataclass(frozen=True, slots=True)
class _Target:
    """What should be in force after this step."""

    limits: Limits
    replicas: int
    trial: Trial | None = None


def step(state: State, inputs: Inputs) -> tuple[State, Result]:
    """One look at the service and at most one change. See `Result` for what comes out; bad data never raises."""
    state, lost = _after_gap(state, inputs)
    state = follow_outside(state, inputs)
    state, picture = observe(state, inputs)
    state, killed = follow_kills(state, inputs)
    law = solve(state.fit)
    if law is not None and state.disarmed_at is not None:
        law = replace(law, usable=False)
    state, missed = _follow_phase(state, inputs, picture)
    state, plan = replica_plan(state, inputs, picture, law)
    situation = _situation(state, inputs, picture, law, plan)
    state, target = _in_force(state, inputs)

    closed = lost
    if state.pending is not None:
        state, closed, target = _verify(state, state.pending, inputs, picture, law, missed, target, killed)
    hold = _hold(state, inputs, picture, target)
    decision: Decision | None = None
    if killed and inputs.mode is Mode.AUTO and state.restored is None:
        state, decision, interrupted, target, hold = _less_memory(state, inputs, killed, target, hold)
        closed += interrupted
    elif situation is not None and not closed:
        situation = replace(situation, state=state)
        found = decide(situation) if hold is None else _overdue(situation, picture)
        if isinstance(found, str):
            hold = found
        elif found is not None:
            state, decision, interrupted, target, hold = _change(situation, found, target)
            closed += interrupted

    diagnosis = situation.diagnosis if situation is not None else _without_sight(state, picture)
    state = replace(state, diagnosis=diagnosis, found=inputs.limits, asked=target.limits)
    result = Result(
        observed=picture.observed,
        bottleneck=diagnosis.bottleneck,
        evidence=diagnosis.evidence,
        law=law,
        decision=decision,
        closed=closed,
        limits=target.limits,
        replicas=target.replicas,
        hold=hold if hold is not None or situation is not None else diagnosis.evidence,
        trial=target.trial,
        disarmed=_disarmed(state),
    )
    return state, result


def _after_gap(state: State, inputs: Inputs) -> tuple[State, tuple[Decision, ...]]:
    """When the clock went back, or no step was taken for minutes, times and rates of before say nothing about now:
    only what was learned stays. Also returns the change on trial, which nobody can judge any more."""
    last = state.stepped_at
    if last is None or last - 1.0 <= inputs.now <= last + LOST_SECONDS:
        return replace(state, stepped_at=inputs.now), ()
    closed: tuple[Decision, ...] = ()
    if state.pending is not None:
        text = (
            f"the clock went from {last:.0f} to {inputs.now:.0f} s before it could be judged; {_left(state.pending)}."
        )
        outcome = replace(state.pending.decision.outcome, verdict=Verdict.INCONCLUSIVE, message=text)
        closed = (replace(state.pending.decision, outcome=outcome),)
    learned = State(
        next_id=state.next_id,
        fit=state.fit,
        output_length=state.output_length,
        lengths=state.lengths,
        tail=replace(state.tail, since=None),
        sizing=Sizing(
            errors=Errors(prior=state.sizing.errors.sketch(), quantile=state.sizing.errors.quantile),
            kappa=Kappa(state.sizing.kappa.value, state.sizing.kappa.bad),
        ),
        kills=state.kills,
        startup_seconds=state.startup_seconds,
        stepped_at=inputs.now,
    )
    return learned, closed


def _follow_phase(state: State, inputs: Inputs, picture: Picture) -> tuple[State, bool]:
    """Counts windows in a row with the same phase, since when the objective is missed, and use. Also says whether
    this step's windows miss the objective."""
    latest = view(picture.windows)
    if picture.blind or (state.seen_at is not None and inputs.now - state.seen_at > MAX_GAP):
        state = replace(state, streak=Streak(), missed_since=None)
    if latest is None or not picture.majority:
        return state, False
    phase = _phase(latest, inputs)
    old = state.streak
    if phase is old.phase and old.count > 0:
        streak = replace(old, count=old.count + 1)
    else:
        streak = Streak(phase, 1, min(w.start for w in picture.windows), max(w.end for w in picture.windows))
    wait, _ = wait_seconds(latest, _since(state, streak, inputs), state.output_length)
    missed = wait is not None and wait > inputs.objectives.time_to_first_token
    missed_since = (state.missed_since if state.missed_since is not None else inputs.now) if missed else None
    usage = _record_use(state.usage, inputs.now, picture, latest)
    state = replace(state, seen_at=inputs.now, streak=streak, missed_since=missed_since, usage=usage)
    return state, missed


def _record_use(usage: tuple[Usage, ...], now: float, picture: Picture, latest: View) -> tuple[Usage, ...]:
    """The record of the last minutes with this step; only steps in which every ready pod speaks count."""
    if usage and now - usage[-1].at > MAX_GAP:
        usage = ()
    if not picture.complete or picture.observed is None:
        return usage
    running = [max(w.running_peak, w.batch) for w in picture.windows]
    kept = (u for u in usage if u.at >= now - LOW_SECONDS - MAX_GAP)
    return (*kept, Usage(now, max(running), sum(running), latest.queue, picture.observed.tokens_per_second))


def _phase(latest: View, inputs: Inputs) -> Phase:
    if latest.queue > QUEUE:
        return Phase.QUEUE
    slow = latest.itl is not None and latest.itl > inputs.objectives.inter_token_latency
    return Phase.SLOW if slow else Phase.CALM


def _since(state: State, streak: Streak, inputs: Inputs) -> tuple[PodWindow, ...]:
    """The windows of the present phase, at most 15 s of them, under the limits in force."""
    return tuple(
        w
        for w in state.windows
        if w.end > inputs.now - SHOWN_SECONDS and w.start >= streak.since and w.generation >= inputs.generation
    )


def _situation(state: State, inputs: Inputs, picture: Picture, law: Law | None, plan: Plan | None) -> Situation | None:
    """None when the service cannot be seen now, or not yet under the limits in force."""
    windows = _since(state, state.streak, inputs)
    seen = None if picture.blind else view(windows)
    if seen is None:
        return None
    wait, lower_bound = wait_seconds(seen, windows, state.output_length)
    diagnosis = diagnose(seen, wait, law, inputs.objectives)
    return Situation(
        inputs,
        state,
        seen,
        _under_load(state, inputs, windows) or seen,
        wait,
        lower_bound,
        law,
        diagnosis,
        ready=len(picture.ready),
        complete=picture.complete,
        plan=plan,
    )


def _under_load(state: State, inputs: Inputs, now: tuple[PodWindow, ...]) -> View | None:
    pods = {w.pod for w in now}
    late = [w for w in state.windows if w.end > inputs.now - LOADED_SECONDS and w.generation >= inputs.generation]
    loaded = [w for w in late if w.loaded and w.pod in pods]
    return view(loaded) if {w.pod for w in loaded} == pods else None


def _without_sight(state: State, picture: Picture) -> Diagnosis:
    known = state.diagnosis
    if not picture.blind and known is not None and known.bottleneck not in (Bottleneck.STARTING, Bottleneck.STALE):
        return known
    if not picture.ready:
        return Diagnosis(Bottleneck.STARTING, "No pod is ready yet.")
    if picture.outdated:
        pods = ", ".join(picture.outdated)
        return Diagnosis(Bottleneck.STARTING, f"The limits in force are not yet those that {pods} runs.")
    if not state.windows and not picture.silent:
        return Diagnosis(Bottleneck.STARTING, "The first scrape has nothing to be compared with yet.")
    why = "; ".join(picture.silent) or "no usable window in time"
    return Diagnosis(Bottleneck.STALE, f"No ready pod gives usable numbers ({why}), so nothing is changed.")


def _in_force(state: State, inputs: Inputs) -> tuple[State, _Target]:
    """The inputs, moved into the bounds, or what an earlier step asked for and is not written yet."""
    limits, replicas, trial = inputs.limits, inputs.replicas, None
    pending, restored = state.pending, state.restored
    since_change = inputs.now - state.changed_at if state.changed_at is not None else 0.0
    if restored is not None and (restored == limits or since_change > APPLY_SECONDS):
        restored = None
        state = replace(state, restored=None)
    if inputs.mode is Mode.AUTO:
        if pending is not None and pending.trial is not None:
            trial = in_force(pending)
        elif (
            pending is not None
            and pending.applied_at is None
            and since_change <= APPLY_SECONDS
            and not pending.is_overruled(inputs.limits, inputs.replicas)
        ):
            # What no decision moves stays with the caller, who may have followed an edit of the spec meanwhile.
            after = pending.limits_after
            limits = replace(
                limits,
                batch_size=after.batch_size,
                kv_cache_percent=after.kv_cache_percent,
                token_budget=after.token_budget,
            )
            if pending.decision.knob is Knob.MAX_SEQUENCE_LENGTH:
                limits = with_length(limits, after.max_sequence_length)
            replicas = pending.replicas_after
        elif restored is not None:
            limits = restored
    limits = _within(limits, inputs.bounds)
    replicas = inputs.bounds.replicas.clamp(replicas) if inputs.scaling is Scaling.OBSERVED else inputs.replicas
    return state, _Target(limits, replicas, trial)


def _within(limits: Limits, bounds: Bounds) -> Limits:
    batch = bounds.batch_size.clamp(limits.batch_size)
    return replace(
        limits,
        max_sequence_length=bounds.max_sequence_length.clamp(limits.max_sequence_length),
        batch_size=batch,
        kv_cache_percent=bounds.kv_cache_percent.clamp(limits.kv_cache_percent),
        token_budget=max(limits.token_budget, batch),
    )


def _verify(
    state: State,
    pending: Pending,
    inputs: Inputs,
    picture: Picture,
    law: Law | None,
    missed: bool,
    target: _Target,
    killed: tuple[str, ...],
) -> tuple[State, tuple[Decision, ...], _Target]:
    """Follows the change on trial; when it is put back, the old limits are the new target."""
    if inputs.mode is not Mode.AUTO:
        text = f"tuning is {inputs.mode} now."
        outcome = replace(pending.decision.outcome, verdict=Verdict.INCONCLUSIVE, message=text)
        judged = Judgement(None, replace(pending.decision, outcome=outcome))
    else:
        judged = follow(pending, inputs, picture, law, missed, killed)
    state = replace(state, pending=judged.pending)
    if judged.passed is not None:
        state = replace(state, changed_at=inputs.now)
        target = _Target(_within(pending.limits_after, inputs.bounds), target.replicas)
    if judged.refused is not None:
        kept = tuple(r for r in state.refused if r.until > inputs.now)
        state = replace(state, refused=(*kept, judged.refused))
    if judged.closed is None:
        return state, (), target
    state = replace(state, streak=Streak(), usage=())
    target = replace(target, trial=None)
    if judged.put_back:
        limits = _within(pending.limits_before, inputs.bounds)
        state = replace(state, restored=limits, changed_at=inputs.now)
        target = replace(target, limits=limits)
    return state, (judged.closed,), target


def _hold(state: State, inputs: Inputs, picture: Picture, target: _Target) -> str | None:
    """Why no decision may be made now."""
    if inputs.mode is Mode.OFF:
        return "Tuning is off (spec.tuning.mode)."
    if state.pending is not None:
        d, trial = state.pending.decision, state.pending.trial
        where = "" if trial is None else f" in pod {trial.pod} alone"
        return f"Change {d.id} ({d.knob} {d.before} -> {d.after}) is on trial{where}, its outcome is not known yet."
    if not picture.majority:
        speak = f"{len(picture.windows)} of {words.count(len(picture.ready), 'ready pod')} gave usable numbers"
        late = tuple(f"{pod}: still runs limits older than generation {inputs.generation}" for pod in picture.outdated)
        why = "; ".join((*picture.silent, *late))
        return f"Only {speak} in this step{f' ({why})' if why else ''}, so nothing is changed."
    if (disarmed := _disarmed(state)) is not None:
        return disarmed
    if state.restored is not None:
        return "The limits before the last change are being put back."
    if inputs.trial is not None:
        return f"What {inputs.trial.pod} tried alone is being ended."
    if target != _Target(inputs.limits, inputs.replicas):
        return "The limits or replicas in force are outside spec.bounds and are being moved inside."
    return None


def _disarmed(state: State) -> str | None:
    if state.disarmed_at is None:
        return None
    return (
        f"The step law misses step times by {words.percent(state.model_error)} ({words.percent(MAX_ERROR)} are "
        "allowed), so nothing is predicted from it: settings stay and no replica goes until it fits again; after "
        f"{RELEARN_SECONDS:.0f} s it is learned anew, from {MIN_SAMPLES} windows on."
    )


def _less_memory(
    state: State, inputs: Inputs, killed: tuple[str, ...], target: _Target, hold: str | None
) -> tuple[State, Decision | None, tuple[Decision, ...], _Target, str | None]:
    """A step down after a kill, whatever else is on trial."""
    found = ask_for_less(state, inputs, killed)
    if isinstance(found, str):
        return state, None, (), target, found
    interrupted: tuple[Decision, ...] = ()
    if (pending := state.pending) is not None:
        text = f"a pod was killed for its memory before it could be judged; {_left(pending)}."
        outcome = replace(pending.decision.outcome, verdict=Verdict.INCONCLUSIVE, message=text)
        interrupted = (replace(pending.decision, outcome=outcome),)
    after, decision = found
    assert after.pending is not None, "a decision was made"
    return after, decision, interrupted, replace(target, limits=after.pending.limits_after, trial=None), None


def _overdue(situation: Situation, picture: Picture) -> Candidate | None:
    pending = situation.state.pending
    if situation.inputs.mode is not Mode.AUTO or not picture.majority:
        return None
    if pending is None:
        return overdue_replicas(situation) if situation.state.disarmed_at is not None else None
    if pending.decision.knob is Knob.REPLICAS:
        return replicas_meanwhile(situation)
    if is_first(pending, situation.inputs.now):
        return None
    if pending.decision.reason is Reason.LOW_USE:
        return None
    return overdue_replicas(situation)


def _change(
    s: Situation, found: Candidate, target: _Target
) -> tuple[State, Decision | None, tuple[Decision, ...], _Target, str | None]:
    """Makes the change (or the recommendation) and puts it on trial; a change on trial before it ends unjudged."""
    state, now = s.state, s.inputs.now
    decision = Decision(
        id=state.next_id,
        at=now,
        knob=found.knob,
        before=found.before,
        after=found.after,
        reason=found.reason,
        message=found.message,
        inputs=_numbers(s),
        prediction=found.prediction,
        outcome=Outcome(Verdict.PENDING),
        applied=True,
    )
    if s.inputs.mode is Mode.RECOMMEND:
        return _recommend(state, decision, target)
    windows = _before_windows(s)
    before, trial = view(windows), None
    if found.knob in SLOW_KNOBS:
        trial = choose(found.reason, state.windows, windows, _speaking(s))
    if trial is not None:
        decision = replace(decision, message=f"{decision.message} {trial.pod} alone tries it first.")
    tokens = before.tokens_per_second / before.pods * s.ready if before is not None else None
    span = (before.start, before.end) if before is not None else None
    decision = replace(decision, outcome=Outcome(Verdict.PENDING, tokens, span_before=span))
    interrupted: tuple[Decision, ...] = ()
    if state.pending is not None:
        text = f"the number of replicas was changed before it could be judged; {_left(state.pending)}."
        outcome = replace(state.pending.decision.outcome, verdict=Verdict.INCONCLUSIVE, message=text)
        interrupted = (replace(state.pending.decision, outcome=outcome),)
    pending = Pending(
        decision=decision,
        limits_before=s.inputs.limits,
        limits_after=found.limits,
        replicas_before=s.inputs.replicas,
        replicas_after=found.replicas,
        pods=tuple(sorted({sample.pod for sample in s.inputs.pods if sample.ready})),
        tokens_per_second_before=tokens,
        inter_token_before=before.itl if before is not None else None,
        prefill_before=before.prefill_per_busy_second if before is not None else 0.0,
        span_before=span,
        before=windows if found.knob is not Knob.REPLICAS else (),
        trial=trial,
        settle=settle_seconds(decision, before.itl if before is not None else None),
    )
    if found.knob is Knob.REPLICAS:
        lead = state.startup_seconds or ASSUMED_STARTUP
        state = replace(state, sizing=changed(state.sizing, now, found.before, found.after, s.plan, lead))
    state = replace(
        state, next_id=state.next_id + 1, pending=pending, changed_at=now, streak=Streak(), usage=(), restored=None
    )
    if trial is not None:
        return state, decision, interrupted, _Target(s.inputs.limits, s.inputs.replicas, in_force(pending)), None
    return state, decision, interrupted, _Target(found.limits, found.replicas), None


def _left(pending: Pending) -> str:
    """What becomes of a change whose trial ends unjudged."""
    return "it is kept" if pending.trial is None else f"it was ended on {pending.trial.pod}"


def _speaking(s: Situation) -> tuple[str, ...]:
    """Ready pods that gave windows lately."""
    ready = {sample.pod for sample in s.inputs.pods if sample.ready}
    return tuple(sorted(ready & {w.pod for w in s.state.windows}))


def _before_windows(s: Situation) -> tuple[PodWindow, ...]:
    """The service under load before a change. The window in which the queue began is not part of it, unless it was
    loaded from its start. What was loaded before the change before this one was judged, is."""
    streak = s.state.streak
    if streak.phase is Phase.CALM:
        return ()
    since = s.inputs.now - LOADED_SECONDS if streak.phase is Phase.QUEUE else math.inf

    def tells(w: PodWindow) -> bool:
        of_now = w.start >= streak.since and (w.end > streak.first_end or w.loaded)
        return of_now or (w.loaded and w.end > since)

    return tuple(w for w in s.state.windows if w.generation >= s.inputs.generation and tells(w))


def _recommend(
    state: State, decision: Decision, target: _Target
) -> tuple[State, Decision | None, tuple[Decision, ...], _Target, str | None]:
    hold = f"Only recommended (spec.tuning.mode is Recommend): {decision.message}"
    known = tuple(r for r in state.recommended if r.until > decision.at)
    if any((r.knob, r.before) == (decision.knob, decision.before) for r in known):
        return state, None, (), target, hold
    text = "only recommended, nothing was changed."
    decision = replace(
        decision,
        message=f"Recommended: {decision.message} As a merge patch: {merge_patch(decision)}",
        outcome=Outcome(Verdict.INCONCLUSIVE, message=text),
        applied=False,
    )
    made = Recommended(decision.knob, decision.before, decision.at + RETRY_SECONDS)
    state = replace(state, next_id=state.next_id + 1, recommended=(*known, made))
    return state, decision, (), target, hold


def merge_patch(decision: Decision) -> str:
    """The recommendation as a JSON merge patch of the service, for a pull request or `kubectl patch --type merge`: a
    bound moves what is in force even where tuning only recommends. `initial` goes along, which must stay inside."""
    bounds = {"min" if decision.after > decision.before else "max": decision.after}
    if decision.knob is not Knob.REPLICAS:
        bounds["initial"] = decision.after
    return json.dumps({"spec": {"bounds": {decision.knob.value: bounds}}}, separators=(",", ":"))


def _numbers(s: Situation) -> tuple[tuple[str, str], ...]:
    return (
        ("batch", words.number(s.seen.batch)),
        ("batchLimit", f"{s.seen.batch_limit:g}"),
        ("queueDepth", words.number(s.seen.queue)),
        ("wait", s.wait_text),
        ("kvCachePercent", words.percent(s.seen.kv_used)),
        ("tokensPerSecond", words.number(s.seen.tokens_per_second)),
        ("interTokenLatency", words.seconds(s.seen.itl)),
    )
