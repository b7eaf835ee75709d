"""Follows a change until its outcome is known: in force, settled, compared with before, kept or put back."""

from collections import Counter
from dataclasses import dataclass, replace

from busload_operator.tuning import words
from busload_operator.tuning.diagnose import IDLE_BATCH
from busload_operator.tuning.fit import MAX_ERROR
from busload_operator.tuning.observe import Picture
from busload_operator.tuning.state import Pending, Refused
from busload_operator.tuning.trial import (
    APPLY_SECONDS,
    BAND,
    COMPARED_SECONDS,
    SETTLE_SECONDS,
    SLOW_KNOBS,
    follow_trial,
    scatter,
)
from busload_operator.tuning.types import Decision, Inputs, Knob, Law, Outcome, Reason, Verdict
from busload_operator.tuning.window import PodWindow, view
from busload_runtime.contract import Limits

READY_SECONDS = 300.0
"""In which a new replica must be ready."""
TRANSIENT_SECONDS = 10.0
"""After a change throughput and token times still show the prompts that fill the new places."""
JUDGE_SECONDS = 120.0
"""In which a setting is judged, on whatever was seen."""
LOADED_STEPS = 3
"""Windows per pod under load that a comparison needs."""
LOADED_STEPS_AT_LEAST = 2
"""The same when the load ends early."""
QUIET_STEPS = 3
"""Steps in a row without load after which no further load is waited for."""
CALM_SECONDS = 60.0
"""Without a missed objective after which a smaller setting is found good."""
RETRY_SECONDS = 600.0
"""In which a value that did not help is not tried again."""
AGAIN_SECONDS = 60.0
"""The same for more of a raise that showed neither gain nor loss, if a usable law says that it is worth it: a neighbour
may have had the machine while it was judged, and by then the law has learned from it."""
WORTH_IT_SECONDS = 1800.0
"""In which a lower sequence length that was worth it is not raised again for the requests it turns away."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """`pending` goes on, or it is `closed`."""

    pending: Pending | None
    closed: Decision | None = None
    passed: str | None = None
    """What its trial in one pod showed, in the step in which it goes on to all."""
    put_back: bool = False
    refused: Refused | None = None


def follow(
    pending: Pending, inputs: Inputs, picture: Picture, law: Law | None, missed: bool, killed: tuple[str, ...] = ()
) -> Judgement:
    """One step further. `missed`: the wait in this step's windows is over the objective; `killed`: pods that were
    killed for their memory since the last step."""
    if pending.trial is not None:
        return _follow_trial(pending, inputs, picture, killed)
    if inputs.limits != _expected(pending, inputs) or inputs.replicas != pending.replicas_after:
        in_time = pending.applied_at is None and inputs.now - pending.written_at <= APPLY_SECONDS
        if in_time and not pending.is_overruled(inputs.limits, inputs.replicas):
            return Judgement(pending)
        return _close(pending, Verdict.INCONCLUSIVE, "the values in force were changed from outside")
    if pending.decision.reason is Reason.OUT_OF_MEMORY:
        return _follow_less_memory(pending, inputs, picture, killed)
    lowered = pending.decision.reason in (Reason.LOW_USE, Reason.REQUESTS_TOO_LONG)
    of_setting = pending.decision.knob is not Knob.REPLICAS and pending.decision.reason is not Reason.LOW_USE
    if of_setting and (judged := _follow_pods(pending, inputs, killed)) is not None:
        return judged
    if pending.applied_at is None:
        return _await(pending, inputs, picture)
    if lowered:
        return _follow_lowered(pending, inputs, picture, missed)
    if pending.decision.reason is Reason.OFFERED_WORK:
        return _follow_bought(pending, inputs, missed)
    pending = _collect(pending, picture)
    if pending.decision.knob is Knob.REPLICAS:
        return _follow_replicas(pending, inputs, picture)
    return _follow_setting(pending, inputs, law)


def _expected(pending: Pending, inputs: Inputs) -> Limits:
    """What a change puts in force. The sequence length follows the spec and the size of the KV cache meanwhile, unless
    it is what is changed."""
    if pending.decision.knob is Knob.MAX_SEQUENCE_LENGTH:
        return pending.limits_after
    now = inputs.limits
    return replace(
        pending.limits_after, max_sequence_length=now.max_sequence_length, max_queued_tokens=now.max_queued_tokens
    )


def _follow_trial(pending: Pending, inputs: Inputs, picture: Picture, killed: tuple[str, ...]) -> Judgement:
    """While one pod alone has it: passed, it goes to all; else it ends there, and no other pod ever had it."""
    if inputs.limits != pending.limits_before or inputs.replicas != pending.replicas_before:
        return _close(pending, Verdict.INCONCLUSIVE, "the values in force were changed from outside; its trial ended")
    found = follow_trial(pending, inputs, picture, killed)
    if found.passed is None:
        return Judgement(found.pending)
    if found.passed:
        assert found.pending.trial is not None
        return Judgement(replace(found.pending, trial=None, passed_at=inputs.now), passed=found.text)
    if not found.tried:
        return _close(pending, Verdict.INCONCLUSIVE, found.text)
    return _put_back(pending, inputs, found.text)


def _follow_pods(pending: Pending, inputs: Inputs, killed: tuple[str, ...]) -> Judgement | None:
    """A setting is compared on the pods that ran before it. One that went down after it may have done so because of
    it (a larger batch or KV cache needs memory); one that is gone was replaced, by an update say, and tells nothing."""
    ready = {sample.pod: sample.ready for sample in inputs.pods}
    if down := [pod for pod in pending.pods if ready.get(pod) is False or pod in killed]:
        what = "was killed for its memory" if set(down) & set(killed) else "stopped being ready"
        judged = _put_back(pending, inputs, f"{', '.join(down[:3])} {what} after it; it was put back")
        if _is_shorter(pending.decision):
            return judged
        # A pod that goes down costs its requests: nothing in between is tried for a while either.
        refused = Refused(pending.decision.knob, pending.decision.before + 1, inputs.now + RETRY_SECONDS)
        return replace(judged, refused=refused)
    if ready.keys().isdisjoint(pending.pods):
        return _close(pending, Verdict.INCONCLUSIVE, "its pods were replaced before it could be judged; it is kept")
    return None


def _await(pending: Pending, inputs: Inputs, picture: Picture) -> Judgement:
    """Until the pods run it: the values are written, the pods must report the generation or be ready."""
    decision = pending.decision
    passed = inputs.now - pending.written_at
    if decision.knob is Knob.REPLICAS:
        if decision.after < decision.before:
            return Judgement(replace(pending, applied_at=inputs.now))
        if len(picture.ready) >= decision.after:
            return Judgement(replace(pending, applied_at=inputs.now))
        if passed > READY_SECONDS:
            text = f"only {len(picture.ready)} of {decision.after} replicas were ready after {READY_SECONDS:.0f} s"
            return _close(pending, Verdict.INCONCLUSIVE, text)
        return Judgement(pending)
    wrong = [w.pod for w in picture.windows if decision.knob is Knob.BATCH_SIZE and w.batch_limit != decision.after]
    if picture.majority and not wrong:
        return Judgement(replace(pending, applied_at=inputs.now))
    if passed > APPLY_SECONDS:
        who = ", ".join((*picture.outdated, *wrong)) or "most pods"
        text = f"{who} did not report it within {APPLY_SECONDS:.0f} s; it was put back"
        return _put_back(pending, inputs, text)
    return Judgement(pending)


def _collect(pending: Pending, picture: Picture) -> Pending:
    """Keeps the windows of steps under load. The window in which the change arrived is not among them: in it the new
    places were still being filled."""
    windows = picture.windows
    if pending.decision.knob is not Knob.REPLICAS:
        windows = tuple(w for w in windows if w.pod in pending.pods)
    if not windows:
        return pending
    busy = [_under_load(w, pending.decision) for w in windows]
    if not any(busy):
        return replace(pending, quiet=pending.quiet + 1)
    # What replicas are worth shows only while all of them have work.
    if pending.decision.knob is Knob.REPLICAS and not all(busy):
        return replace(pending, quiet=0)
    return replace(pending, quiet=0, loaded=pending.loaded + windows)


def _under_load(window: PodWindow, decision: Decision) -> bool:
    """As loaded as before the change: work for every place, or more running than the old batch limit let in. When
    tokens were too slow without a queue, any running request tells."""
    if decision.reason is Reason.INTER_TOKEN_OBJECTIVE_MISSED:
        return window.batch >= IDLE_BATCH
    return window.loaded or (decision.knob is Knob.BATCH_SIZE and window.batch >= decision.before)


def _per_pod(windows: tuple[PodWindow, ...]) -> list[int]:
    return list(Counter(w.pod for w in windows).values())


def _follow_setting(pending: Pending, inputs: Inputs, law: Law | None) -> Judgement:
    """Better is believed at once; worse or equal only on windows after the transient, with prompts no heavier than
    before: while new places are being filled, prompts take the time of tokens."""
    decision = pending.decision
    passed = inputs.now - pending.written_at
    if passed < pending.settle:
        return Judgement(pending)
    if not pending.tokens_per_second_before:
        # More load would not tell more, and the next change waits for this one's outcome.
        return _close(pending, Verdict.INCONCLUSIVE, "there was no load to compare with; it is kept")
    if decision.knob is Knob.TOKEN_BUDGET:
        return _follow_token_budget(pending, inputs, passed)
    if _enough(decision, pending.loaded):
        judged = _compare(pending, inputs, pending.loaded, late=False)
        if judged.closed is not None and judged.closed.outcome.verdict is Verdict.CONFIRMED:
            return judged
    settled = tuple(w for w in pending.loaded if w.start >= pending.written_at + max(TRANSIENT_SECONDS, pending.settle))
    recent = _newest(settled)
    late = pending.quiet >= QUIET_STEPS or passed > JUDGE_SECONDS + pending.settle
    if _enough(decision, recent) and _more_prefill(pending, recent, law) <= BAND:
        return _compare(pending, inputs, recent, late)
    if not late:
        return Judgement(pending)
    if _steps(pending.loaded) < LOADED_STEPS_AT_LEAST:
        return _close(pending, Verdict.INCONCLUSIVE, "the load ended before it could be judged; it is kept")
    if (heavier := _more_prefill(pending, pending.loaded, law)) > BAND:
        share = words.percent(heavier)
        text = f"prompts took {share} more of the step time than before, so it cannot be compared; it is kept"
        return _close(pending, Verdict.INCONCLUSIVE, text)
    return _compare(pending, inputs, pending.loaded, late)


def _follow_token_budget(pending: Pending, inputs: Inputs, passed: float) -> Judgement:
    """By the prompts computed and the time of a token: more prompts at once are what it is for, and take the time of
    tokens."""
    settled = tuple(w for w in pending.loaded if w.start >= pending.written_at + pending.settle)
    if not _enough(pending.decision, settled):
        if pending.quiet < QUIET_STEPS and passed <= JUDGE_SECONDS + pending.settle:
            return Judgement(pending)
        return _close(pending, Verdict.INCONCLUSIVE, "the load ended before it could be judged; it is kept")
    seen = view(settled)
    assert seen is not None, "there are enough windows"
    before, prompts = pending.prefill_before, seen.prefill_per_busy_second
    tokens, itl = _measured(settled, len(pending.pods))
    text = f"{words.number(before)} -> {words.number(prompts)} prompt tokens/s in steps"
    if slow := _newly_slow(pending, inputs, itl):
        return _put_back(pending, inputs, f"{text}, but {slow}; it was put back", tokens, settled)
    if prompts > (1 + BAND) * before:
        return _close(pending, Verdict.CONFIRMED, text, tokens, settled)
    judged = _close(pending, Verdict.INCONCLUSIVE, f"{text}, within the noise; it is kept", tokens, settled)
    more = Refused(Knob.TOKEN_BUDGET, pending.decision.after + 1, inputs.now + RETRY_SECONDS)
    return replace(judged, refused=more)


def _newly_slow(pending: Pending, inputs: Inputs, itl: float | None) -> str | None:
    """That tokens miss their objective, which they did not before; else None."""
    tau = inputs.objectives.inter_token_latency
    was_slow = pending.inter_token_before is not None and pending.inter_token_before > tau
    if itl is None or itl <= tau or was_slow:
        return None
    return f"a token takes {words.seconds(itl)}, over the objective of {words.seconds(tau)}"


def _newest(windows: tuple[PodWindow, ...]) -> tuple[PodWindow, ...]:
    """Those of the last seconds, more where scrapes are rare."""
    if not windows:
        return ()
    late = tuple(w for w in windows if w.end > windows[-1].end - COMPARED_SECONDS)
    if _steps(late) >= LOADED_STEPS:
        return late
    return windows[-LOADED_STEPS * len({w.pod for w in windows}) :]


def _more_prefill(pending: Pending, windows: tuple[PodWindow, ...], law: Law | None) -> float:
    """By how much the share of step time that goes to prompts has grown since before the change, by the law; 0 while
    the law fits too badly to say."""
    seen = view(windows)
    if law is None or seen is None or law.error > MAX_ERROR:
        return 0.0
    return law.d * (seen.prefill_per_busy_second - pending.prefill_before)


def _enough(decision: Decision, windows: tuple[PodWindow, ...]) -> bool:
    if _steps(windows) < LOADED_STEPS:
        return False
    if decision.knob in SLOW_KNOBS:
        return windows[-1].end - windows[0].start >= COMPARED_SECONDS
    return True


def _steps(windows: tuple[PodWindow, ...]) -> int:
    """Windows of the pod that has most."""
    return max(_per_pod(windows), default=0)


def _compare(pending: Pending, inputs: Inputs, windows: tuple[PodWindow, ...], late: bool) -> Judgement:
    """Worse is what is worse than the band and than what the windows scatter by; between the two it is looked at for
    longer, until it is late."""
    before = pending.tokens_per_second_before
    assert before, "without load before, nothing is compared"
    tokens, itl = _measured(windows, len(pending.pods))
    change = _change(before, tokens)
    if tokens < (1 - max(BAND, 2 * scatter(pending.before, windows))) * before:
        return _put_back(pending, inputs, f"{change}; it was put back", tokens, windows)
    if slow := _newly_slow(pending, inputs, itl):
        return _put_back(pending, inputs, f"{change}, but {slow}; it was put back", tokens, windows)
    if tokens > (1 + BAND) * before:
        judged = _close(pending, Verdict.CONFIRMED, change, tokens, windows)
        return replace(judged, refused=_worth_it(pending.decision, inputs.now))
    if _is_shorter(pending.decision):
        text = f"{change}, within the noise, so it would turn requests away for nothing; it was put back"
        return _put_back(pending, inputs, text, tokens, windows)
    if tokens < (1 - BAND) * before and not late:
        return Judgement(pending)
    judged = _close(pending, Verdict.INCONCLUSIVE, f"{change}, within the noise; it is kept", tokens, windows)
    # More of the same is not tried at once.
    until, law_from = inputs.now + RETRY_SECONDS, inputs.now + AGAIN_SECONDS
    more = Refused(pending.decision.knob, pending.decision.after + 1, until, law_from=law_from)
    return replace(judged, refused=more)


def _follow_replicas(pending: Pending, inputs: Inputs, picture: Picture) -> Judgement:
    since = inputs.now - (pending.applied_at or inputs.now)
    counts = _per_pod(pending.loaded)
    everywhere = len(counts) >= pending.decision.after and min(counts) >= LOADED_STEPS
    if since >= SETTLE_SECONDS and everywhere and pending.tokens_per_second_before:
        tokens, itl = _measured(pending.loaded, len(picture.ready))
        if pending.decision.reason is Reason.INTER_TOKEN_OBJECTIVE_MISSED:
            return _close_inter_token(pending, inputs, tokens, itl)
        change = _change(pending.tokens_per_second_before, tokens)
        if tokens > (1 + BAND) * pending.tokens_per_second_before:
            return _close(pending, Verdict.CONFIRMED, change, tokens, pending.loaded)
        if tokens < (1 - BAND) * pending.tokens_per_second_before:
            text = f"{change}; replicas are kept while requests wait"
            return _close(pending, Verdict.WORSE, text, tokens, pending.loaded)
        return _close(pending, Verdict.INCONCLUSIVE, f"{change}, within the noise; it is kept", tokens, pending.loaded)
    if since >= SETTLE_SECONDS and pending.quiet >= QUIET_STEPS:
        return _close(pending, Verdict.INCONCLUSIVE, "the load ended before it could be judged; it is kept")
    if since >= 2 * CALM_SECONDS:
        return _close(pending, Verdict.INCONCLUSIVE, "load did not reach every replica; it is kept")
    return Judgement(pending)


def _close_inter_token(pending: Pending, inputs: Inputs, tokens: float, itl: float | None) -> Judgement:
    before, tau = pending.inter_token_before, inputs.objectives.inter_token_latency
    text = f"{words.seconds(before)} -> {words.seconds(itl)} per token (objective {words.seconds(tau)})"
    if before is None or itl is None:
        return _close(pending, Verdict.INCONCLUSIVE, text, tokens, pending.loaded)
    better = itl <= tau or itl < (1 - BAND) * before
    return _close(pending, Verdict.CONFIRMED if better else Verdict.INCONCLUSIVE, text, tokens, pending.loaded)


def _follow_less_memory(pending: Pending, inputs: Inputs, picture: Picture, killed: tuple[str, ...]) -> Judgement:
    """Right when pods live on; a further kill asks for a further step."""
    if killed:
        return _close(pending, Verdict.WORSE, f"{', '.join(killed[:3])} was killed for its memory again")
    if pending.applied_at is None and picture.complete:
        pending = replace(pending, applied_at=inputs.now)
    if pending.applied_at is not None and inputs.now - pending.applied_at >= CALM_SECONDS:
        return _close(pending, Verdict.CONFIRMED, f"no pod was killed for its memory in {CALM_SECONDS:.0f} s")
    if inputs.now - pending.decision.at > READY_SECONDS:
        return _close(pending, Verdict.INCONCLUSIVE, f"not every pod was ready {READY_SECONDS:.0f} s after it")
    return Judgement(pending)


def _follow_bought(pending: Pending, inputs: Inputs, missed: bool) -> Judgement:
    """Replicas for a load to come do not raise throughput now: they are right when no objective is missed."""
    since = inputs.now - (pending.applied_at or inputs.now)
    if since < CALM_SECONDS:
        return Judgement(pending)
    if missed:
        return _close(pending, Verdict.INCONCLUSIVE, f"the wait is over the objective {since:.0f} s after it")
    return _close(pending, Verdict.CONFIRMED, f"the objective is met {since:.0f} s after they were ready")


def _follow_lowered(pending: Pending, inputs: Inputs, picture: Picture, missed: bool) -> Judgement:
    """A smaller setting is at fault when requests wait for what it takes from them; a smaller batch limit, therefore,
    only once its places are taken."""
    if pending.decision.knob is Knob.BATCH_SIZE:
        missed = missed and any(w.running_peak >= pending.decision.after for w in picture.windows)
    since = inputs.now - (pending.applied_at or inputs.now)
    if missed and pending.decision.knob is Knob.REPLICAS:
        text = f"the wait is over the objective {since:.0f} s after it"
        refused = Refused(Knob.REPLICAS, pending.decision.after, inputs.now + RETRY_SECONDS)
        return replace(_close(pending, Verdict.WORSE, text), refused=refused)
    if missed:
        text = f"the wait is over the objective {since:.0f} s after it; it was put back"
        return replace(_put_back(pending, inputs, text), refused=None)
    if since >= CALM_SECONDS:
        return _close(pending, Verdict.CONFIRMED, f"no objective was missed for {since:.0f} s")
    return Judgement(pending)


def _measured(windows: tuple[PodWindow, ...], pods: int) -> tuple[float, float | None]:
    """Tokens per second of so many pods (silent ones taken to be like the others), and seconds per token, under load
    since the change."""
    after = view(windows)
    assert after is not None, "called with windows under load only"
    return after.tokens_per_second / after.pods * pods, after.itl


def _change(before: float, after: float) -> str:
    return f"{words.number(before)} -> {words.number(after)} tokens/s ({100 * (after / before - 1):+.0f}%)"


def _put_back(
    pending: Pending, inputs: Inputs, text: str, tokens: float | None = None, windows: tuple[PodWindow, ...] = ()
) -> Judgement:
    before, after = pending.decision.before, pending.decision.after
    if _is_shorter(pending.decision):
        refused = Refused(pending.decision.knob, after, inputs.now + RETRY_SECONDS, down=True)
        return replace(_close(pending, Verdict.ROLLED_BACK, text, tokens, windows), put_back=True, refused=refused)
    # A batch half as far away may be tried next; a KV fraction is left alone.
    from_here = (before + after) // 2 + 1 if pending.decision.knob is Knob.BATCH_SIZE else before + 1
    refused = Refused(pending.decision.knob, from_here, inputs.now + RETRY_SECONDS)
    return replace(_close(pending, Verdict.ROLLED_BACK, text, tokens, windows), put_back=True, refused=refused)


def _is_shorter(decision: Decision) -> bool:
    return decision.knob is Knob.MAX_SEQUENCE_LENGTH and decision.after < decision.before


def _worth_it(decision: Decision, now: float) -> Refused | None:
    """Keeps a lower sequence length that helped from being raised at once by the requests it turns away."""
    if not _is_shorter(decision):
        return None
    return Refused(decision.knob, decision.after + 1, now + WORTH_IT_SECONDS)


def _close(
    pending: Pending, verdict: Verdict, text: str, tokens: float | None = None, windows: tuple[PodWindow, ...] = ()
) -> Judgement:
    """`windows` are those that `tokens` were counted in."""
    after = (min(w.start for w in windows), max(w.end for w in windows)) if windows else None
    before = pending.tokens_per_second_before
    outcome = Outcome(verdict, before, tokens, f"{text}.", pending.span_before, after)
    return Judgement(None, replace(pending.decision, outcome=outcome))
