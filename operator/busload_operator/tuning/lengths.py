"""Candidates that move `maxSequenceLength`, by the observed tail of lengths and never by a ratio.

The pool takes blocks as a request grows, so a lower limit frees nothing by itself: it keeps out what the longest
requests would have held. That is worth it only while memory is what requests wait for, no more of it can be had, and
the few that would be turned away hold much of it. `bounds.maxSequenceLength.min` is the user's floor.
"""

from dataclasses import replace

from busload_operator.tuning import words
from busload_operator.tuning.diagnose import KV_ROOM
from busload_operator.tuning.settings import Candidate, Situation, expected, predict, worthwhile
from busload_operator.tuning.trial import SETTLE_MOST_SECONDS
from busload_operator.tuning.types import Bottleneck, Knob, Prediction, Reason
from busload_runtime.contract import SEQUENCE_LENGTHS, Limits

MOST_TURNED_AWAY = 0.01
"""Share of requests that a lower limit may refuse or cut off: as many as may miss an objective."""
REQUESTS_AT_LEAST = 300.0
"""Finished requests without which a tail of 1% is not known."""
RAISE_SECONDS = 60.0
"""Between a change of any setting and a raise."""


def lower_length(s: Situation) -> Candidate | str:
    """A lower limit, or why it is not moved."""
    now, least = s.inputs.limits.max_sequence_length, s.inputs.bounds.max_sequence_length.min
    if s.diagnosis.bottleneck is not Bottleneck.KV_BOUND:
        return "the longest sequence is not what requests wait for"
    stays = f"maxSequenceLength stays at {now}"
    tail = s.state.tail
    if now <= least:
        return f"{stays}: bounds.maxSequenceLength.min is {least}"
    if tail.requests < REQUESTS_AT_LEAST:
        return (
            f"{stays}: the lengths of only {tail.requests:.0f} requests are known, {REQUESTS_AT_LEAST:.0f} are needed"
        )
    watched = s.inputs.now - (s.inputs.now if tail.since is None else tail.since)
    if (missing := _longest_seconds(s) - watched) > 0:
        return f"{stays}: its longest requests may still run, {missing:.0f} s more are needed to know how many they are"
    allowed = MOST_TURNED_AWAY * tail.requests
    possible = [c for c in SEQUENCE_LENGTHS if least <= c < now and tail.over(c) <= allowed]
    if not possible:
        return f"{stays}: any lower limit would turn away more than {words.percent(MOST_TURNED_AWAY)} of the requests"
    after = possible[0]
    counted = f"{tail.over(after):.0f} of the last {tail.requests:.0f} requests were longer than {after}"
    freed = tail.share_over(after, now)
    prediction = predict(s, min(s.seen.batch / max(0.01, 1 - freed), float(s.inputs.limits.batch_size)))
    if not worthwhile(s, prediction):
        return (
            f"{stays}: the KV cache is taken as requests grow, and {counted}, with "
            f"{words.percent(freed)} of all tokens beyond it, so a lower limit would free no more than that"
        )
    if any(after <= low for low in s.refused_down(Knob.MAX_SEQUENCE_LENGTH)):
        return f"{stays}: a lower one did not help a while ago"
    message = (
        f"maxSequenceLength {now} -> {after}: {words.number(s.seen.queue)} requests wait {s.wait_text} because the KV "
        f"cache is {words.percent(s.seen.kv_used)} full ({words.count(s.seen.preemptions, 'preemption')}); {counted} "
        f"and would have been refused or cut off, and they held {words.percent(freed)} of all tokens beyond it; "
        f"expected {expected(prediction)}."
    )
    return _candidate(s, after, Reason.WAIT_FROM_KV_CACHE, message, prediction)


def _longest_seconds(s: Situation) -> float:
    """How long a request of the present length runs, as far as that is waited for."""
    if s.seen.itl is None:
        return SETTLE_MOST_SECONDS
    return min(SETTLE_MOST_SECONDS, s.inputs.limits.max_sequence_length * s.seen.itl)


def raise_length(s: Situation) -> Candidate | str | None:
    """A higher limit when requests are refused or cut off and memory is free; or why not; None: nobody is."""
    away = sum(w.turned_away or 0.0 for w in s.state.windows if w.start >= _all_admitted(s))
    limits, most = s.inputs.limits, s.inputs.bounds.max_sequence_length.max
    if away < 1 or limits.max_sequence_length >= most:
        return None
    now = limits.max_sequence_length
    told = f"{words.count(round(away), 'request')} of the last minute were longer than {now}"
    after = min([most, *(c for c in SEQUENCE_LENGTHS if c > now)])
    used = max(w.kv_used for w in s.state.windows)
    if used >= KV_ROOM or any(w.preemptions > 0 for w in s.state.windows):
        return f"{told}; maxSequenceLength stays there while the KV cache is up to {words.percent(used)} full"
    if after > s.seen.kv_tokens:
        return f"{told}; maxSequenceLength stays there: the KV cache holds {s.seen.kv_tokens:.0f} tokens in all"
    if refused := s.refused(Knob.MAX_SEQUENCE_LENGTH):
        after = min(after, min(refused) - 1)
    if after <= now:
        return f"{told}; maxSequenceLength stays there: a lower limit was worth it a while ago"
    if s.state.changed_at is not None and s.inputs.now - s.state.changed_at < RAISE_SECONDS:
        return None
    message = (
        f"maxSequenceLength {now} -> {after}: {told} and were refused or cut off, while the KV cache was at most "
        f"{words.percent(used)} full."
    )
    prediction = Prediction(
        s.seen.tokens_per_second, 0.0, s.seen.itl, "the load as it is; blocks are taken when needed"
    )
    return _candidate(s, after, Reason.REQUESTS_TOO_LONG, message, prediction)


def _all_admitted(s: Situation) -> float:
    """From when on requests run under the limit in force: they keep the one that they were admitted under."""
    if s.state.changed_at is None:
        return 0.0
    longest = s.inputs.limits.max_sequence_length * (s.seen.itl or 0.0)
    return s.state.changed_at + min(SETTLE_MOST_SECONDS, longest)


def _candidate(s: Situation, after: int, reason: Reason, message: str, prediction: Prediction) -> Candidate:
    now = s.inputs.limits.max_sequence_length
    limits = with_length(s.inputs.limits, after)
    return Candidate(Knob.MAX_SEQUENCE_LENGTH, now, after, reason, message, prediction, limits, s.inputs.replicas)


def with_length(limits: Limits, length: int) -> Limits:
    """The limits with another greatest length; one request of it must always be able to wait."""
    return replace(limits, max_sequence_length=length, max_queued_tokens=max(limits.max_queued_tokens, length))
