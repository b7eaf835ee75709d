"""The work that requests bring, in replicas: what arrived, how long it is, and what it will be one lead time from now.

Offered work is `prompt tokens/s x d*s + requests/s x D*(b + c*h)`, both as they arrive: seconds of pure work per
second, so the number of replicas that would be busy all the time with nothing shared (s the share of prompt tokens that
is computed, D output tokens of a request, h KV tokens it holds on average). Where pods do not count the prompt tokens
that arrive, it is the mean prompt of a request instead. The past is recomputed with today's law and lengths; otherwise
learning them would look like a change of the load.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, linear_regression, stdev

from busload_operator.tuning.types import Law
from busload_operator.tuning.window import PodWindow

BIN_SECONDS = 5.0
KEPT_SECONDS = 1800.0
LEVEL_SECONDS = 60.0
SHORT_SECONDS = 15.0
STEADY_SECONDS = 300.0
"""The level is a mean over up to so long, as long as the time before the last minute looks like it."""
MIN_SECONDS = 20.0
"""Of arrivals, before anything is said about the load."""
_LENGTH_REQUESTS = 300.0
"""Requests after which what was learned of lengths counts a third (1/e)."""
_RISE_SIGMA = 1.5
_FALL_SIGMA = 2.0
"""Standard errors by which the last minute may be above or below the time before and still belong to the same level."""
_JUMP_SIGMA = 3.5
_JUMP_FACTOR = 1.25
_STEEP = 1.5
"""A jump by this factor is taken to go on, if the fleet is short already."""
_MOST_RATIO = 3.0
_RISE_SECONDS = 75.0
_RISE_BINS = 8
_RISE_CERTAIN = 3.0
"""Standard errors by which the slope of the load must be above none: it is looked at every few seconds."""
_RISE_MOST = 0.25
_BURST_SCATTER = 0.5
"""Coefficient of variation of 15 s means above which, with as little memory over the lead, load comes in bursts."""
_BURST_COVERED = 0.95


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Requests that arrived at all ready pods between two moments, on the clock of `Inputs.now`."""

    start: float
    end: float
    requests: float
    prompt_tokens: float | None = None
    """Of these requests; None: a pod does not count them."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Sums over requests, forgetting: means of lengths are their ratios."""

    finished: float = 0.0
    output_tokens: float = 0.0
    started: float = 0.0
    prompt_tokens: float = 0.0
    batch_seconds: float = 0.0
    kv_token_seconds: float = 0.0
    asked: float = 0.0
    """Finished requests whose prompt tokens are known, as they were sent, and these."""
    asked_tokens: float = 0.0

    @property
    def known(self) -> bool:
        return min(self.finished, self.output_tokens, self.started, self.batch_seconds) > 0

    @property
    def output(self) -> float:
        """Output tokens per request."""
        return self.output_tokens / self.finished

    @property
    def prompt(self) -> float:
        """Prompt tokens computed per request; what a prefix cache saved is not among them."""
        return self.prompt_tokens / self.started

    @property
    def computed_share(self) -> float | None:
        """Prompt tokens computed (prefix caches save some, preemptions repeat some) over those sent; None: unknown."""
        if self.asked <= 0 or self.asked_tokens <= 0 or self.started <= 0:
            return None
        return self.prompt / (self.asked_tokens / self.asked)

    @property
    def held(self) -> float:
        """KV tokens of a running request, over its time in the batch."""
        return self.kv_token_seconds / self.batch_seconds


def count_arrivals(old: tuple[Arrivals, ...], windows: Sequence[PodWindow], ready: int) -> tuple[Arrivals, ...]:
    """The record with one more round of windows. Pods that gave none are taken to be like the others, as a router
    deals evenly; bins of at least five seconds, half an hour of them."""
    end = max(w.end for w in windows)
    start = max(end - fmean(w.end - w.start for w in windows), old[-1].end if old else -math.inf)
    if start >= end:
        return old
    seconds = (end - start) * ready / len(windows)
    told = [w.prompt_tokens_arrived / w.seconds for w in windows if w.prompt_tokens_arrived is not None]
    tokens = seconds * sum(told) if len(told) == len(windows) else None
    new = Arrivals(start, end, seconds * sum(w.arrived / w.seconds for w in windows), tokens)
    if old and start - old[-1].end < 1.0 and old[-1].end - old[-1].start < BIN_SECONDS - 0.5:
        last = old[-1]
        both = None if tokens is None or last.prompt_tokens is None else last.prompt_tokens + tokens
        new = Arrivals(last.start, end, last.requests + new.requests, both)
        old = old[:-1]
    return (*(a for a in old if a.end > end - KEPT_SECONDS), new)


def learn_lengths(old: Lengths, windows: Sequence[PodWindow]) -> Lengths:
    """The lengths with one more round of windows."""
    finished = sum(w.finished for w in windows)
    started = sum(w.ttft_count for w in windows)
    told = [(w.finished, w.finished_prompt_tokens) for w in windows if w.finished_prompt_tokens is not None]
    ended, begun = math.exp(-finished / _LENGTH_REQUESTS), math.exp(-started / _LENGTH_REQUESTS)
    return Lengths(
        finished=ended * old.finished + finished,
        output_tokens=ended * old.output_tokens + sum(w.output_tokens_sum for w in windows),
        started=begun * old.started + started,
        prompt_tokens=begun * old.prompt_tokens + sum(w.prefill_tokens for w in windows),
        batch_seconds=ended * old.batch_seconds + sum(w.batch_seconds for w in windows),
        kv_token_seconds=ended * old.kv_token_seconds + sum(w.kv_token_seconds for w in windows),
        asked=ended * old.asked + sum(requests for requests, _ in told),
        asked_tokens=ended * old.asked_tokens + sum(tokens for _, tokens in told),
    )


@dataclass(frozen=True, slots=True)
class Cost:
    """What a request costs by the law, and a place in the batch."""

    work: float
    """Seconds of pure work per request of the mean lengths, `d*P + D*(b + c*h)`."""
    slope: float
    """Seconds that a place in the batch adds to a step, `g = b + c*h + d*P/D`."""
    decode: float = 0.0
    """The part of `work` that is not the prompt's."""
    prompt_token: float | None = None
    """Seconds per prompt token that is sent, `d*s`; None: unknown."""

    def of(self, arrivals: Sequence[Arrivals]) -> float:
        """Seconds of work that these requests bring."""
        total = 0.0
        for a in arrivals:
            if a.prompt_tokens is None or self.prompt_token is None:
                total += a.requests * self.work
            else:
                total += a.requests * self.decode + a.prompt_tokens * self.prompt_token
        return total

    def rate(self, arrivals: Sequence[Arrivals]) -> float:
        """The same per second."""
        return self.of(arrivals) / sum(a.end - a.start for a in arrivals)


def cost(law: Law, lengths: Lengths) -> Cost:
    """Of requests of these lengths, which must be known."""
    decode = lengths.output * (law.b + law.c * lengths.held)
    work = law.d * lengths.prompt + decode
    share = lengths.computed_share
    return Cost(work, work / lengths.output, decode, None if share is None else law.d * share)


@dataclass(frozen=True, slots=True)
class Forecast:
    """Offered work, in replicas."""

    level: float
    """Mean of the last minute."""
    steady: float
    """Mean of up to five minutes, as long as load was steady: a minute of few long prompts scatters much."""
    scatter: float
    """Standard deviation of its 15 s means."""
    short: float
    """Mean of the last 15 seconds."""
    jump: float
    """By what factor the last 15 s are above the time before, when that is no accident; else 1."""
    rise: float
    """By what share of `short` load grows in one lead time if it goes on as in the last 75 s, as far as that is
    certain; 0 where it is not."""
    floor: float | None
    """What bursts need that are over before a replica could come; None: load does not come in such bursts."""

    def expected(self, able: float) -> float:
        """One lead time ahead, before the error of forecasts; `able`: what the present fleet can do. A trend is not
        extrapolated, as that would buy on noise, but for a steep jump that is over the fleet already; and see `risen`.
        """
        if self.jump <= 1:
            return self.steady
        onward = min(_MOST_RATIO, self.jump) if self.jump >= _STEEP and self.short > able else 1.0
        return max(self.steady, self.short * onward)

    @property
    def risen(self) -> float:
        """One lead time ahead if load goes on rising; 0 if it does not rise for certain. For a fleet that is short
        already: its means of a minute lag behind by half of it, and a replica that is not bought for what the load will
        be is too few when it comes."""
        return self.short * (1 + self.rise) if self.rise > 0 else 0.0


def forecast(arrivals: Sequence[Arrivals], each: Cost, lead: float) -> Forecast | None:
    """None with less than 20 s of arrivals in the last minute. `lead` in seconds."""
    if not arrivals:
        return None
    now = arrivals[-1].end
    minute = [a for a in arrivals if a.end > now - LEVEL_SECONDS]
    if sum(a.end - a.start for a in minute) < MIN_SECONDS:
        return None
    late = [a for a in minute if a.end > now - SHORT_SECONDS]
    level, short = each.rate(minute), each.rate(late)
    before = [each.rate([a]) for a in minute if a.end <= now - SHORT_SECONDS]
    steady, scatter = _steady(arrivals, level, each)
    jump = _jump(before, short, len(late))
    rise = _rise(arrivals, each, lead) / short if short > 0 else 0.0
    return Forecast(level, steady, scatter, short, jump, min(_RISE_MOST, rise), _burst_floor(arrivals, each, lead))


def _steady(arrivals: Sequence[Arrivals], level: float, each: Cost) -> tuple[float, float]:
    """Mean of the last minute and of as much of the time before as differs from it by no more than chance; and the
    scatter of the 15 s means.

    The scatter comes from the differences of neighbours, which a trend hardly moves (von Neumann's
    estimate: half of their mean square).
    """
    now = arrivals[-1].end
    groups: dict[int, list[Arrivals]] = {}
    for a in reversed(arrivals):
        if a.end <= now - STEADY_SECONDS:
            break
        groups.setdefault(int((now - a.end) // SHORT_SECONDS), []).append(a)
    means = [each.rate(groups[i]) for i in sorted(groups)]
    last = round(LEVEL_SECONDS / SHORT_SECONDS)
    older = means[last:]
    if len(means) < 2:
        return level, 0.0
    scatter = math.sqrt(fmean((x - y) ** 2 for x, y in pairwise(means)) / 2)
    alike = 0
    for count in range(last, len(older) + 1, last):
        above = (level - fmean(older[:count])) / math.sqrt(1 / last + 1 / count)
        if not -_FALL_SIGMA * scatter <= above <= _RISE_SIGMA * scatter:
            break
        alike = count
    return (last * level + sum(older[:alike])) / (last + alike), scatter


def _jump(before: list[float], short: float, bins: int) -> float:
    if len(before) < 3:
        return 1.0
    mean = fmean(before)
    scatter = max(stdev(before), 0.05 * mean) / math.sqrt(bins)
    if short <= mean + _JUMP_SIGMA * scatter or short <= _JUMP_FACTOR * mean:
        return 1.0
    return short / mean if mean > 0 else _MOST_RATIO


def _rise(arrivals: Sequence[Arrivals], each: Cost, lead: float) -> float:
    """Work by which load grows in one lead time: the slope of a straight line through the last 75 s, less its standard
    error; 0 where the slope is below three of these."""
    now = arrivals[-1].end
    late = [a for a in arrivals if a.end > now - _RISE_SECONDS]
    if len(late) < _RISE_BINS:
        return 0.0
    times, rates = [(a.start + a.end) / 2 for a in late], [each.rate([a]) for a in late]
    line = linear_regression(times, rates)
    around = sum((y - line.intercept - line.slope * x) ** 2 for x, y in zip(times, rates, strict=True))
    middle = fmean(times)
    error = math.sqrt(around / (len(late) - 2) / sum((x - middle) ** 2 for x in times))
    return (line.slope - error) * lead if line.slope > _RISE_CERTAIN * error else 0.0


def _burst_floor(arrivals: Sequence[Arrivals], each: Cost, lead: float) -> float | None:
    """What 95% of the 15 s means need, where these scatter widely and say nothing about one lead time later."""
    if arrivals[-1].end - arrivals[0].start < 300.0:
        return None
    groups: dict[int, list[Arrivals]] = {}
    for a in arrivals:
        groups.setdefault(int(a.start // SHORT_SECONDS), []).append(a)
    values = [each.rate(group) for group in groups.values()]
    mean = fmean(values)
    if len(values) < 20 or mean <= 0 or stdev(values) <= _BURST_SCATTER * mean:
        return None
    ahead = max(1, round(lead / SHORT_SECONDS))
    around = [value - mean for value in values]
    likeness = sum(x * y for x, y in zip(around, around[ahead:], strict=False)) / sum(x * x for x in around[:-ahead])
    if likeness >= 0.5:
        return None
    return sorted(values)[min(len(values) - 1, math.ceil(_BURST_COVERED * len(values)) - 1)]
