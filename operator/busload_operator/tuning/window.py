"""From scrapes to windows: what one pod did between two usable snapshots, on the engine's own clock.

A pod that is silent, stands still or reports what cannot be true is set aside by name; the others go on without it.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from busload_operator.tuning.counters import CUMULATIVE, OPTIONAL_SAMPLES, SAMPLES, Counters
from busload_operator.tuning.types import PodSample

MAX_SCRAPE_AGE = 10.0
"""Seconds after which a sample says nothing about now."""
MOST_ARRIVALS = 10_000.0
"""Requests per second that one pod's HTTP process cannot take."""
MAX_WINDOW = 60.0
"""Seconds; the mean of a longer gap describes the past, so it is skipped."""


@dataclass(frozen=True, slots=True)
class Base:
    """The last usable snapshot of one pod."""

    at: float
    counters: Counters


@dataclass(frozen=True, slots=True)
class PodWindow:
    """Differences of one pod's counters over one window, and the levels at its ends."""

    pod: str
    start: float
    end: float
    """Caller's clock."""
    seconds: float
    """Engine's clock."""
    steps: float
    busy_seconds: float
    step_batch: float
    step_kv_tokens: float
    prefill_tokens: float
    generated_tokens: float
    arrived: float
    preemptions: float
    batch_seconds: float
    queue_seconds: float
    kv_token_seconds: float
    ttft_sum: float
    ttft_count: float
    itl_sum: float
    itl_count: float
    output_tokens_sum: float
    finished: float
    running: float
    """Requests in the batch at the end."""
    running_peak: float
    """The larger of both ends."""
    waiting: float
    waiting_throughout: bool
    """Requests waited at both ends."""
    kv_used: float
    """Share of KV blocks in use at the end, 0 to 1."""
    kv_tokens: float
    """Tokens that the pool holds."""
    batch_limit: float
    generation: float
    """Limits generation that was in force from start to end; the older one when it changed meanwhile."""
    prompt_tokens_arrived: float | None = None
    """None here and below: the pod does not count it."""
    judged: float | None = None
    """Requests whose time to first token was compared with its objective."""
    missed: float | None = None
    """Objectives missed, of both kinds."""
    turned_away: float | None = None
    """Requests refused or cut off by `maxSequenceLength`."""
    finished_prompt_tokens: float | None = None
    """Prompt tokens of the requests that `finished` counts."""
    sequence_lengths: tuple[float, ...] | None = None
    """Of them, those at most as long (prompt and output) as each of `SEQUENCE_LENGTHS`."""

    @property
    def batch(self) -> float:
        return self.batch_seconds / self.seconds

    @property
    def queue(self) -> float:
        return self.queue_seconds / self.seconds

    @property
    def at_limit(self) -> bool:
        """The batch limit was (nearly always) used up."""
        return self.batch >= 0.9 * self.batch_limit

    @property
    def full(self) -> bool:
        """What waited, waited for a place in the batch. In a window in which the queue began, its end tells: the mean
        still holds the time before."""
        began = self.waiting > 0 and not self.waiting_throughout
        return self.at_limit or (began and self.running >= 0.9 * self.batch_limit)

    @property
    def loaded(self) -> bool:
        """There was work for every place in the batch all the time: its tokens per second are a capacity."""
        return self.waiting_throughout or self.at_limit


@dataclass(frozen=True, slots=True)
class Reading:
    """What one sample gave: a window, or why there is none; and the base for the next one."""

    base: Base | None
    window: PodWindow | None
    problem: str | None


def read(base: Base | None, sample: PodSample, now: float) -> Reading:
    """Judges one sample against the pod's last usable snapshot. Never raises on bad numbers."""
    counters = sample.counters
    if counters is None:
        return Reading(base, None, sample.problem)
    if not now - MAX_SCRAPE_AGE <= sample.at <= now + 1.0:
        return Reading(base, None, f"last scrape is {now - sample.at:.0f} s old")
    if lie := _impossible_level(counters):
        return Reading(base, None, lie)
    fresh = Base(sample.at, counters)
    if base is None:
        return Reading(fresh, None, None)
    if sample.at <= base.at:
        return Reading(base, None, "no scrape since the last look")
    if fallen := _fallen(base.counters, counters):
        return Reading(fresh, None, fallen)
    if sample.at - base.at > MAX_WINDOW:
        return Reading(fresh, None, f"no usable scrape for {sample.at - base.at:.0f} s")
    if stuck := _stuck(base.counters, counters):
        return Reading(base, None, stuck)
    window = _difference(sample.pod, base, fresh)
    if lie := _implausible(window):
        return Reading(fresh, None, lie)
    return Reading(fresh, window, None)


def _impossible_level(counters: Counters) -> str | None:
    for name, sample in (SAMPLES | OPTIONAL_SAMPLES).items():
        value = getattr(counters, name)
        if value is not None and (not math.isfinite(value) or value < 0):
            return f"{sample} is {value:g}, which cannot be"
    lengths = counters.sequence_lengths or ()
    if any(not 0 <= shorter <= longer < math.inf for shorter, longer in pairwise((0.0, *lengths))):
        return "busload_sequence_length_tokens counts fewer requests up to a larger length, which cannot be"
    if counters.kv_blocks_free > counters.kv_blocks:
        return f"{counters.kv_blocks_free:g} KV blocks are free of {counters.kv_blocks:g}, which cannot be"
    if counters.batch_size < 1:
        return f"{SAMPLES['batch_size']} is {counters.batch_size:g}, but at least 1 is needed to run anything"
    return None


def _fallen(old: Counters, new: Counters) -> str | None:
    for name in CUMULATIVE:
        before, after = getattr(old, name), getattr(new, name)
        if after < before:
            return f"{SAMPLES[name]} fell from {before:g} to {after:g}: the engine restarted, this window is skipped"
    return None


def _stuck(old: Counters, new: Counters) -> str | None:
    if new.clock <= old.clock:
        return f"its engine clock stands at {new.clock:.1f} s"
    if new.steps == old.steps and old.running + old.waiting > 0 and new.running + new.waiting > 0:
        return f"no step finished while {new.running:g} requests run and {new.waiting:g} wait"
    return None


def _difference(pod: str, base: Base, fresh: Base) -> PodWindow:
    old, new = base.counters, fresh.counters
    delta = {name: getattr(new, name) - getattr(old, name) for name in CUMULATIVE}
    seconds = delta.pop("clock")
    return PodWindow(
        pod=pod,
        start=base.at,
        end=fresh.at,
        seconds=seconds,
        running=new.running,
        running_peak=max(old.running, new.running),
        waiting=new.waiting,
        waiting_throughout=old.waiting > 0 and new.waiting > 0,
        kv_used=1 - new.kv_blocks_free / new.kv_blocks if new.kv_blocks else 0.0,
        kv_tokens=new.kv_blocks * new.kv_block_size,
        batch_limit=max(old.batch_size, new.batch_size),
        generation=min(old.generation, new.generation),
        prompt_tokens_arrived=_more(old, new, "prompt_tokens_arrived"),
        judged=_more(old, new, "ttft_judged"),
        missed=_more(old, new, "ttft_missed", "itl_missed"),
        turned_away=_more(old, new, "too_long", "answers_cut"),
        finished_prompt_tokens=_more(old, new, "finished_prompt_tokens"),
        sequence_lengths=_more_lengths(old.sequence_lengths, new.sequence_lengths),
        **delta,
    )


def _more(old: Counters, new: Counters, *names: str) -> float | None:
    """By how much these counters have grown together; None when one is not there, or was not, or fell."""
    total = 0.0
    for name in names:
        before, after = getattr(old, name), getattr(new, name)
        if before is None or after is None or after < before:
            return None
        total += after - before
    return total


def _more_lengths(old: tuple[float, ...] | None, new: tuple[float, ...] | None) -> tuple[float, ...] | None:
    if old is None or new is None or len(old) != len(new):
        return None
    grown = tuple(after - before for before, after in zip(old, new, strict=True))
    return grown if all(count >= 0 for count in grown) else None


def _implausible(window: PodWindow) -> str | None:
    wall = window.end - window.start
    # A snapshot may be a second or one long step old, hence the slack.
    if abs(window.seconds - wall) > 0.5 * wall + 5:
        return f"its engine clock moved {window.seconds:.1f} s in {wall:.1f} s"
    longest = window.busy_seconds / window.steps if window.steps else 0.0
    if window.busy_seconds > 1.1 * window.seconds + 2 * longest + 0.1:
        return f"it reports {window.busy_seconds:.1f} busy seconds in {window.seconds:.1f} s"
    if window.batch > 1.05 * max(window.batch_limit, window.running_peak):
        return f"it reports {window.batch:.1f} running requests at a limit of {window.batch_limit:g}"
    if window.arrived > MOST_ARRIVALS * window.seconds:
        return f"it reports {window.arrived:g} requests in {window.seconds:.1f} s"
    if window.generated_tokens > 1.05 * (window.step_batch + window.prefill_tokens) + window.batch_limit:
        return f"it reports {window.generated_tokens:g} tokens from {window.step_batch:g} decodes"
    return None


@dataclass(frozen=True, slots=True)
class View:
    """Means over the windows of several pods. Rates and queues are sums over pods, batch is per pod."""

    pods: int
    start: float
    end: float
    """Caller's clock."""
    seconds: float
    """Engine seconds per pod."""
    batch: float
    batch_limit: float
    full: bool
    """The pods at which most requests wait (without a queue: all pods) use up their batch limit."""
    queue: float
    tokens_per_second: float
    busy_tokens_per_second: float
    """Sampled tokens per second inside steps."""
    busy: float
    """Share of time inside steps, 0 to 1."""
    arrived_per_second: float
    finished: float
    kv_used: float
    """Highest share seen, 0 to 1."""
    kv_tokens: float
    """Tokens the smallest pool holds."""
    kv_per_request: float
    """Mean KV tokens held by a running request."""
    prefill_per_token: float
    """Prompt tokens computed per sampled token."""
    prefill_per_step: float
    prefill_per_busy_second: float
    preemptions: float
    ttft: float | None
    itl: float | None


def view(windows: Iterable[PodWindow]) -> View | None:
    """Time-weighted means; None without windows."""
    by_pod: dict[str, list[PodWindow]] = {}
    for window in windows:
        by_pod.setdefault(window.pod, []).append(window)
    if not by_pod:
        return None
    every = [w for group in by_pod.values() for w in group]

    def total(name: str) -> float:
        return sum((float(getattr(w, name)) for w in every), 0.0)

    def rate(name: str, over: str = "seconds") -> float:
        return sum(
            _ratio(sum(getattr(w, name) for w in group), sum(getattr(w, over) for w in group))
            for group in by_pod.values()
        )

    newest = [max(group, key=lambda w: w.end) for group in by_pod.values()]
    pods = len(by_pod)
    return View(
        pods=pods,
        start=min(w.start for w in every),
        end=max(w.end for w in every),
        seconds=total("seconds") / pods,
        batch=rate("batch_seconds") / pods,
        batch_limit=min(w.batch_limit for w in newest),
        full=_full(by_pod),
        queue=rate("queue_seconds"),
        tokens_per_second=rate("generated_tokens"),
        busy_tokens_per_second=rate("generated_tokens", "busy_seconds"),
        busy=rate("busy_seconds") / pods,
        arrived_per_second=rate("arrived"),
        finished=total("finished"),
        kv_used=max(w.kv_used for w in every),
        kv_tokens=min(w.kv_tokens for w in newest),
        kv_per_request=_ratio(total("kv_token_seconds"), total("batch_seconds")),
        prefill_per_token=_ratio(total("prefill_tokens"), total("generated_tokens")),
        prefill_per_step=_ratio(total("prefill_tokens"), total("steps")),
        prefill_per_busy_second=_ratio(total("prefill_tokens"), total("busy_seconds")),
        preemptions=total("preemptions"),
        ttft=_mean(total("ttft_sum"), total("ttft_count")),
        itl=_mean(total("itl_sum"), total("itl_count")),
    )


def _full(by_pod: dict[str, list[PodWindow]]) -> bool:
    """Whether most of the waiting was for a place in the batch; without a queue, whether all places were taken."""
    windows = [w for group in by_pod.values() for w in group]
    waiting = sum(w.queue_seconds for w in windows)
    if waiting > 0:
        return sum(w.queue_seconds for w in windows if w.full) >= 0.5 * waiting
    return all(w.at_limit for w in windows)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def _mean(part: float, count: float) -> float | None:
    return part / count if count > 0 else None
