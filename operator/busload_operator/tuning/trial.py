"""A slow setting on one pod first: it is compared there with before and with the other pods, then all get it or none.

The other pods are the control: what changes for all of them (load, prompts) is not the setting's doing. A difference
counts once it is over the band and over twice its standard error, taken from the scatter of the windows themselves.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev

from busload_operator.tuning import words
from busload_operator.tuning.observe import Picture
from busload_operator.tuning.state import Pending, TrialPod
from busload_operator.tuning.types import Decision, Inputs, Knob, Reason, Trial
from busload_operator.tuning.window import PodWindow, view

SLOW_KNOBS = frozenset({Knob.KV_CACHE_PERCENT, Knob.MAX_SEQUENCE_LENGTH})
"""Those that shrink or plan the pool anew."""
APPLY_SECONDS = 60.0
"""In which the new values must be written and the pods must run them."""
SETTLE_SECONDS = 10.0
"""After which it is judged at the earliest."""
SETTLE_MOST_SECONDS = 300.0
"""The same for a lower sequence length: requests that run keep the one they were admitted under."""
COMPARED_SECONDS = 30.0
"""The newest seconds that are compared; a slow setting needs as many, because with preemptions throughput comes in
waves."""
BAND = 0.10
"""Throughput this much lower is worse, this much higher is better."""
MOST_SECONDS = 120.0
"""In which a trial in one pod must be judged."""
FIRST_SECONDS = 60.0
"""For which replicas wait for a slow setting, in one pod and again in all: what it brings may spare them."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of a trial: `passed` None goes on."""

    pending: Pending
    passed: bool | None = None
    text: str = ""
    tried: bool = True
    """False: nothing was learned about the value."""


def choose(
    reason: Reason, lately: Sequence[PodWindow], before: Sequence[PodWindow], ready: Sequence[str]
) -> TrialPod | None:
    """The pod with most work lately, and how all did before; None when there is no other to compare it with.

    `before` are the windows of the load before the change. What is made ready before anybody waits for it brings no
    throughput yet, so it is not compared by that.
    """
    if len(ready) < 2:
        return None
    load = {pod: sum(w.batch_seconds + w.queue_seconds for w in lately if w.pod == pod) for pod in ready}
    pod = max(sorted(ready), key=lambda name: load[name])
    ahead = reason in (Reason.NEARLY_FULL, Reason.REQUESTS_TOO_LONG)
    return TrialPod(pod, () if ahead else tuple(before))


def settle_seconds(decision: Decision, inter_token: float | None) -> float:
    """When a change can show: after those that run under a longer sequence length have had time to end."""
    if decision.knob is not Knob.MAX_SEQUENCE_LENGTH or decision.after > decision.before or inter_token is None:
        return SETTLE_SECONDS
    return min(SETTLE_MOST_SECONDS, max(SETTLE_SECONDS, (decision.before - decision.after) * inter_token))


def is_first(pending: Pending, now: float) -> bool:
    """Whether its outcome is waited for before a replica is bought."""
    slow = pending.decision.knob in SLOW_KNOBS and (pending.trial is not None or pending.passed_at is not None)
    return slow and now - pending.written_at < FIRST_SECONDS


def in_force(pending: Pending) -> Trial | None:
    """What the limits document should say while this change is on trial in one pod."""
    return None if pending.trial is None else Trial(pending.trial.pod, pending.limits_after)


def follow_trial(pending: Pending, inputs: Inputs, picture: Picture, killed: tuple[str, ...]) -> Verdict:
    """One step further."""
    trial = pending.trial
    assert trial is not None
    passed_seconds = inputs.now - pending.decision.at
    ready = {sample.pod: sample.ready for sample in inputs.pods}
    if trial.pod not in ready:
        return Verdict(pending, False, f"{trial.pod} is gone, so it could not be judged there", tried=False)
    if not ready[trial.pod] or trial.pod in killed:
        what = "was killed for its memory" if trial.pod in killed else "stopped being ready"
        return Verdict(pending, False, f"{trial.pod} {what} after it; it was put back there")
    if inputs.trial != in_force(pending):
        if trial.applied_at is not None:
            return Verdict(pending, False, "the trial was ended from outside", tried=False)
        if passed_seconds > APPLY_SECONDS:
            return Verdict(pending, False, "it was not written in time", tried=False)
        return Verdict(pending)
    mine = [w for w in picture.windows if w.pod == trial.pod]
    if trial.applied_at is None:
        if mine:
            return Verdict(replace(pending, trial=replace(trial, applied_at=inputs.now)))
        if passed_seconds > APPLY_SECONDS:
            text = f"{trial.pod} did not report it within {APPLY_SECONDS:.0f} s; it was put back there"
            return Verdict(pending, False, text)
        return Verdict(pending)
    since = trial.applied_at + pending.settle
    trial = replace(trial, after=trial.after + tuple(w for w in picture.windows if w.start >= since))
    pending = replace(pending, trial=trial)
    if inputs.now - since < COMPARED_SECONDS:
        return Verdict(pending)
    return _judge(pending, trial, inputs, late=passed_seconds > MOST_SECONDS + pending.settle)


def scatter(before: Sequence[PodWindow], after: Sequence[PodWindow]) -> float:
    """Standard error of the throughput after a change over that before it, as a share, from how the windows of a pod
    scatter around their mean, in both; 0 when no pod has two of them."""
    squares, free = 0.0, 0
    for windows in (before, after):
        for pod in {w.pod for w in windows}:
            rates = [w.generated_tokens / w.seconds for w in windows if w.pod == pod]
            if len(rates) > 1 and (mean := fmean(rates)) > 0:
                squares += sum((rate / mean - 1) ** 2 for rate in rates)
                free += len(rates) - 1
    return math.sqrt(squares / free * (1 / len(before) + 1 / len(after))) if free and before and after else 0.0


def _judge(pending: Pending, trial: TrialPod, inputs: Inputs, late: bool) -> Verdict:
    mine = [w for w in trial.after if w.pod == trial.pod]
    slow = _too_slow(trial, inputs.objectives.inter_token_latency)
    if mine and slow is not None:
        return Verdict(pending, False, f"{slow}; it was put back there")
    if not trial.before:
        # Nothing waited before, so throughput tells nothing: that the pod runs well with it is all there is to see.
        if mine or late:
            return Verdict(pending, bool(mine), _after_calm(trial, bool(mine)), tried=bool(mine))
        return Verdict(pending)
    compared = _compare(trial)
    if compared is None:
        text = f"the load ended before it could be judged on {trial.pod}; it was ended there"
        return Verdict(pending, False, text, tried=False) if late else Verdict(pending)
    change, error = compared
    band = max(BAND, 2 * error)
    text = f"{100 * change:+.0f}% on {trial.pod} against the other pods (noise {words.percent(2 * error)})"
    if change < -band:
        return Verdict(pending, False, f"{text}; it was put back there")
    return Verdict(pending, True, text)


def _after_calm(trial: TrialPod, well: bool) -> str:
    return f"{trial.pod} runs well with it" if well else f"{trial.pod} gave no usable numbers; it was ended there"


def _too_slow(trial: TrialPod, objective: float) -> str | None:
    """That tokens of the trial pod miss the objective while those of the others, and its own before, did not."""
    seen = view(w for w in trial.after if w.pod == trial.pod)
    others = view(w for w in trial.after if w.pod != trial.pod)
    before = view(w for w in trial.before if w.pod == trial.pod)
    if seen is None or seen.itl is None or seen.itl <= objective:
        return None
    if any(v is not None and v.itl is not None and v.itl > objective for v in (others, before)):
        return None
    return f"a token takes {words.seconds(seen.itl)} on {trial.pod}, over the objective of {words.seconds(objective)}"


def _compare(trial: TrialPod) -> tuple[float, float] | None:
    """By what share the pod's throughput under load grew more than that of the others, and the standard error of that;
    None while too few windows tell.

    The ratio of four means; relative variances of independent means add up (first order).
    """
    groups = [
        [w.generated_tokens / w.seconds for w in windows if w.loaded and (w.pod == trial.pod) is mine]
        for mine in (True, False)
        for windows in (trial.before, trial.after)
    ]
    if any(len(group) < 2 for group in (groups[0], groups[1])):
        return None
    # Without other pods under load both times there is no control, and only the pod's own before to compare with.
    used = groups if all(len(group) >= 2 for group in groups) else groups[:2]
    means = [fmean(group) for group in used]
    if min(means) <= 0:
        return None
    change = means[1] / means[0] / (means[3] / means[2] if len(means) > 2 else 1.0) - 1
    error = math.sqrt(sum((stdev(g) / m) ** 2 / len(g) for g, m in zip(used, means, strict=True)))
    return change, error
