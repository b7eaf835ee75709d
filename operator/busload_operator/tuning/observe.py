"""Takes this step's samples into the state and says what can be seen: windows, means, wait, who is silent."""

from dataclasses import dataclass, replace
from statistics import median

from busload_operator.tuning.demand import count_arrivals, learn_lengths
from busload_operator.tuning.fit import MAX_ERROR, Fit, add, from_probed, misjudged, slower, solve, surprise
from busload_operator.tuning.state import State
from busload_operator.tuning.tail import learn_tail
from busload_operator.tuning.types import Inputs, Law, Observed, PodSample
from busload_operator.tuning.window import MAX_SCRAPE_AGE, Base, PodWindow, View, read, view

SHOWN_SECONDS = 15.0
KEPT_SECONDS = 60.0
RELEARN_SECONDS = 120.0
"""With a law that is wrong, after which it is learned anew."""
_SURPRISE_WINDOWS = 10
_LENGTH_REQUESTS = 20
"""Finished requests after which half a step of the mean output length is new."""


@dataclass(frozen=True, slots=True)
class Picture:
    """What this step saw."""

    ready: tuple[str, ...]
    windows: tuple[PodWindow, ...]
    """New ones, of ready pods that run the limits in force."""
    outdated: tuple[str, ...]
    """Ready pods that still run older limits."""
    silent: tuple[str, ...]
    """Ready pods without a new window, each as `name: why`."""
    blind: bool
    """No ready pod gave a usable window for longer than a scrape may be old."""
    observed: Observed | None

    @property
    def majority(self) -> bool:
        """At least half of the ready pods speak, with the limits in force."""
        return len(self.windows) > 0 and 2 * len(self.windows) >= len(self.ready)

    @property
    def complete(self) -> bool:
        return 0 < len(self.ready) == len(self.windows)


def observe(state: State, inputs: Inputs) -> tuple[State, Picture]:
    """Reads every ready pod once. Pods that are gone or not ready are forgotten."""
    old_bases = dict(state.bases)
    bases: list[tuple[str, Base]] = []
    new: list[PodWindow] = []
    silent: list[str] = []
    ready = sorted({sample.pod: sample for sample in inputs.pods if sample.ready}.items())
    for name, sample in ready:
        reading = read(old_bases.get(name), sample, inputs.now)
        if reading.base is not None:
            bases.append((name, reading.base))
        if reading.window is not None:
            new.append(reading.window)
        elif reading.problem is not None:
            silent.append(f"{name}: {reading.problem}")
    names = tuple(name for name, _ in ready)
    kept = tuple(w for w in state.windows if w.end > inputs.now - KEPT_SECONDS and w.pod in names) + tuple(new)
    state = _check_law(state, inputs.now, new)
    fit, length = state.fit, state.output_length
    if fit.samples == 0 and not state.windows:
        fit = _first_fit(ready)
    for window in new:
        fit = add(fit, window)
        length = _output_length(length, window.finished, window.output_tokens_sum)
    if length is None:
        length = _length_at_start(bases)
    state = _follow_starts(replace(state, windows=kept, fit=fit, output_length=length), inputs)
    state = replace(state, bases=tuple(bases), tail=learn_tail(state.tail, new))
    if 2 * len(new) >= len(ready) > 0:
        arrivals = count_arrivals(state.arrivals, new, len(ready))
        state = replace(state, arrivals=arrivals, lengths=learn_lengths(state.lengths, new))
    current = tuple(w for w in new if w.generation >= inputs.generation)
    blind = not any(w.end > inputs.now - MAX_SCRAPE_AGE for w in kept)
    picture = Picture(
        ready=names,
        windows=current,
        outdated=tuple(w.pod for w in new if w.generation < inputs.generation),
        silent=tuple(silent),
        blind=blind,
        observed=None if blind else _observed(state, inputs, tuple(silent)),
    )
    return state, picture


def _first_fit(ready: list[tuple[str, PodSample]]) -> Fit:
    """From what the first pod that tried steps says; empty when none did."""
    probed = next((sample.probed for _, sample in ready if sample.probed is not None), None)
    return Fit() if probed is None else from_probed(probed)


def _check_law(state: State, now: float, new: list[PodWindow]) -> State:
    """Compares the law with windows that it has not seen. One that has been wrong for minutes is learned anew: what it
    stands on was of another machine or model. One that rests on steps which a pod tried while nothing else ran is only
    a first guess: when it is wrong, what it says of one batch against another is kept and moved to the speed seen, or
    it goes at once where that does not fit either; it disarms nobody."""
    law, error = solve(state.fit), state.model_error
    missed = [] if law is None else [s for w in new if (s := surprise(law, w)) is not None]
    for share in missed:
        error += (min(share, 1.0) - error) / _SURPRISE_WINDOWS
    if error <= MAX_ERROR:
        return replace(state, model_error=error, disarmed_at=None)
    if law is not None and state.fit.probed:
        return replace(state, fit=_at_speed(state.fit, law, [*state.windows, *new]), model_error=0.0, disarmed_at=None)
    since = state.disarmed_at if state.disarmed_at is not None else now
    if now - since > RELEARN_SECONDS:
        return replace(state, fit=Fit(), model_error=0.0, disarmed_at=None)
    return replace(state, model_error=error, disarmed_at=since)


def _at_speed(fit: Fit, law: Law, windows: list[PodWindow]) -> Fit:
    """At the speed of the newest windows, if one speed explains most of them; else empty. A neighbour of seconds, or a
    pod that starts on the same cores, slows single windows."""
    factors = [f for w in windows if (f := misjudged(law, w)) is not None][-_SURPRISE_WINDOWS:]
    if not factors:
        return Fit()
    speed = median(factors)
    apart = median(abs(f / speed - 1) for f in factors)
    return slower(fit, speed) if apart <= MAX_ERROR else Fit()


def _follow_starts(state: State, inputs: Inputs) -> State:
    """How long pods take to become ready. Those that were ready before, or there before anything was seen, do not
    tell. `state.bases` are those of the step before."""
    seen_before = dict(state.starting)
    were_ready = {name for name, _ in state.bases}
    anything = bool(were_ready or seen_before)
    starting: list[tuple[str, float | None]] = []
    startup = state.startup_seconds
    for sample in inputs.pods:
        since = seen_before.get(sample.pod)
        if not sample.ready:
            fresh = anything and sample.pod not in were_ready and sample.pod not in seen_before
            starting.append((sample.pod, inputs.now if fresh else since))
        elif since is not None:
            startup = inputs.now - since
    return replace(state, starting=tuple(starting), startup_seconds=startup)


def _output_length(old: float | None, finished: float, tokens: float) -> float | None:
    if finished <= 0:
        return old
    mean = tokens / finished
    return mean if old is None else old + min(1.0, finished / _LENGTH_REQUESTS) * (mean - old)


def _length_at_start(bases: list[tuple[str, Base]]) -> float | None:
    finished = sum(base.counters.finished for _, base in bases)
    tokens = sum(base.counters.output_tokens_sum for _, base in bases)
    return tokens / finished if finished > 0 and tokens > 0 else None


def _observed(state: State, inputs: Inputs, silent: tuple[str, ...]) -> Observed | None:
    windows = tuple(w for w in state.windows if w.end > inputs.now - SHOWN_SECONDS)
    seen = view(windows)
    if seen is None:
        return None
    wait, lower_bound = wait_seconds(seen, windows, state.output_length)
    return Observed(
        batch=seen.batch,
        batch_limit=round(seen.batch_limit),
        queue_depth=seen.queue,
        wait=wait,
        wait_is_lower_bound=lower_bound,
        kv_cache_percent=100 * seen.kv_used,
        tokens_per_second=seen.tokens_per_second,
        time_to_first_token=seen.ttft,
        inter_token_latency=seen.itl,
        preemptions=round(seen.preemptions),
        pods=seen.pods,
        silent=silent,
    )


def wait_seconds(seen: View, windows: tuple[PodWindow, ...], output_length: float | None) -> tuple[float | None, bool]:
    """Queue depth / finish rate, and whether that is only a lower bound.

    The finish rate is tokens per busy second over the mean output length: finishes themselves come in bursts. Before
    any request finished, or while those that run are longer than the mean, another bound holds: places that have
    freed nobody for T seconds finish at most `running / T` requests per second.
    """
    if seen.queue < 0.05:
        return 0.0, False
    bound = seen.queue * _seconds_without_finish(windows) / max(seen.batch * seen.pods, 1.0)
    if output_length is not None and seen.busy_tokens_per_second > 0:
        wait = seen.queue * output_length / seen.busy_tokens_per_second
        return max(wait, bound), bound > wait
    return (bound, True) if bound > 0 else (None, False)


def _seconds_without_finish(windows: tuple[PodWindow, ...]) -> float:
    """For how long work waited (or every place was taken) and nothing finished, up to now; over pods the shortest."""
    seconds: dict[str, float] = {}
    ended: set[str] = set()
    for window in sorted(windows, key=lambda w: -w.end):
        if window.pod not in ended and window.loaded and window.finished == 0:
            seconds[window.pod] = seconds.get(window.pod, 0.0) + window.seconds
        else:
            ended.add(window.pod)
            seconds.setdefault(window.pod, 0.0)
    return min(seconds.values(), default=0.0)
