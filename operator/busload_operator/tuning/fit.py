"""The step law, fitted online: busy = a*steps + b*sum(batch) + c*sum(kv) + d*prefill tokens, all >= 0.

Each pod window is one equation, weighted 1/busy^2 (so errors are relative), with slow forgetting. Only sums are kept.
`busload_runtime.step_law` solves them.
"""

import math
from dataclasses import dataclass, replace

from busload_operator.tuning.counters import Probed
from busload_operator.tuning.types import Law
from busload_operator.tuning.window import PodWindow
from busload_runtime import step_law

FORGETTING = 0.9995
"""Weight of a window one window later: a half-life of 1,386 pod windows, 46 minutes of one pod at 2 s."""
MIN_SAMPLES = 20
MAX_ERROR = 0.15
MIN_SPREAD = 1.5
"""Largest over smallest batch seen: below this a and b cannot be told apart."""
TRUSTED_BEYOND = 1.3
"""Factor past the batches seen up to which a prediction is not called extrapolated."""
_BIN_WINDOWS = 3
_LENGTHS = (64, 512)


@dataclass(frozen=True, slots=True)
class BatchBin:
    """Windows with about this batch (half an octave wide)."""

    index: int
    count: int
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Fit:
    """Sufficient statistics of the weighted least squares problem."""

    gram: tuple[tuple[float, ...], ...] = ((0.0,) * 4,) * 4
    moment: tuple[float, ...] = (0.0,) * 4
    weight: float = 0.0
    samples: int = 0
    bins: tuple[BatchBin, ...] = ()
    probed: bool = False
    """It began with steps that a pod tried, and nobody has seen those wrong yet, but for the speed of the machine."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What one decoding request costs beside its place: the lengths seen."""

    kv_per_request: float
    prefill_per_token: float


def add(fit: Fit, window: PodWindow) -> Fit:
    """The fit with one more window; windows with too few steps to mean anything change nothing."""
    if window.steps < 3 or window.busy_seconds <= 0 or window.step_batch <= 0:
        return fit
    work = (window.steps, window.step_batch, window.step_kv_tokens, window.prefill_tokens)
    return _add(fit, work, window.busy_seconds, window.step_batch / window.steps)


def _add(fit: Fit, work: tuple[float, float, float, float], seconds: float, batch: float) -> Fit:
    row = [value / seconds for value in work]
    gram = tuple(
        tuple(FORGETTING * old + row[i] * row[j] for j, old in enumerate(line)) for i, line in enumerate(fit.gram)
    )
    moment = tuple(FORGETTING * old + row[i] for i, old in enumerate(fit.moment))
    bins = _count(fit.bins, batch)
    return Fit(gram, moment, FORGETTING * fit.weight + 1.0, fit.samples + 1, bins, fit.probed)


def from_probed(probed: Probed) -> Fit:
    """A first fit, from the steps that a pod tried before it served: batches in octaves up to its largest, of short
    and of longer sequences, with and without prompts in the step. As many windows as it takes to be used, and no more:
    what runs soon outweighs it."""
    fit = Fit(probed=True)
    batches = [2**k for k in range(probed.batch.bit_length())]
    shapes = [(batch, float(length), prompts) for batch in batches for length in _LENGTHS for prompts in (0, batch)]
    rounds = max(_BIN_WINDOWS, math.ceil(MIN_SAMPLES / len(shapes)))
    for batch, length, prompts in shapes * rounds:
        row = (1.0, float(batch), length * batch, float(prompts))
        seconds = sum(c * x for c, x in zip((probed.a, probed.b, probed.c, probed.d), row, strict=True))
        fit = _add(fit, row, seconds, float(batch))
    return fit


def _count(bins: tuple[BatchBin, ...], batch: float) -> tuple[BatchBin, ...]:
    index = math.floor(2 * math.log2(batch))
    old = next((b for b in bins if b.index == index), BatchBin(index, 0, batch, batch))
    new = BatchBin(index, old.count + 1, min(old.low, batch), max(old.high, batch))
    return tuple(sorted([b for b in bins if b.index != index] + [new], key=lambda b: b.index))


def misjudged(law: Law, window: PodWindow) -> float | None:
    """Busy time of a window over what a law says for its steps; None outside the batches for which it is trusted,
    where it is not meant to know, and for a law that is not usable."""
    if not law.usable or window.steps < 3 or window.busy_seconds <= 0 or window.step_batch <= 0:
        return None
    batch = window.step_batch / window.steps
    if not law.batch_min / TRUSTED_BEYOND <= batch <= TRUSTED_BEYOND * law.batch_max:
        return None
    predicted = law.a * window.steps + law.b * window.step_batch
    predicted += law.c * window.step_kv_tokens + law.d * window.prefill_tokens
    return window.busy_seconds / predicted if predicted > 0 else math.inf


def surprise(law: Law, window: PodWindow) -> float | None:
    """By what share a usable law misses the busy time of a window it has not seen; None where it is not trusted."""
    factor = misjudged(law, window)
    return None if factor is None else abs(1 / factor - 1)


def slower(fit: Fit, factor: float) -> Fit:
    """The fit as if every window in it had taken so many times as long: the same law on another speed."""
    gram = tuple(tuple(value / factor**2 for value in line) for line in fit.gram)
    moment = tuple(value / factor for value in fit.moment)
    return replace(fit, gram=gram, moment=moment)


def solve(fit: Fit) -> Law | None:
    """The law of the windows so far; None before the first."""
    if fit.samples == 0:
        return None
    best = step_law.least_squares(fit.gram, fit.moment, fit.weight)
    if best is None:
        return None
    error, (a, b, c, d) = best
    known = [b for b in fit.bins if b.count >= _BIN_WINDOWS] or list(fit.bins)
    low, high = known[0].low, known[-1].high
    usable = fit.samples >= MIN_SAMPLES and error <= MAX_ERROR and high >= MIN_SPREAD * low
    covariance = _covariance(fit, (a, b, c, d), error)
    return Law(a, b, c, d, error, fit.samples, low, high, usable, covariance)


def _covariance(fit: Fit, theta: tuple[float, ...], error: float) -> tuple[tuple[float, ...], ...]:
    """`s^2 * gram^-1` of the unknowns that are not zero, s^2 the mean square error with their number of degrees of
    freedom taken off (ordinary least squares, of equations divided by their busy time)."""
    active = tuple(i for i in range(4) if theta[i] > 0)
    free = max(1.0, fit.weight - len(active))
    variance = error**2 * fit.weight / free
    rows = [[0.0] * 4 for _ in range(4)]
    scale = step_law.scales(fit.gram)
    for k in active:
        unit = tuple(scale[i] if i == k else 0.0 for i in range(4))
        column = step_law.solve(fit.gram, unit, active, scale)
        if column is None:
            continue
        for i in active:
            rows[i][k] = variance * column[i] / scale[k]
    return tuple(tuple(row) for row in rows)


def slope(law: Law, work: Workload) -> float:
    """Seconds that one more request in the batch adds to a step: g = b + c*h + d*P/D."""
    return law.b + law.c * work.kv_per_request + law.d * work.prefill_per_token


def step_seconds(law: Law, work: Workload, batch: float) -> float:
    """t(B) = a + B*g in steady state, where each step also computes B*P/D prompt tokens."""
    return law.a + batch * slope(law, work)


def step_error(law: Law, work: Workload, batch: float) -> float:
    """Standard error of `step_seconds` as a share of it: how well the windows seen tie down the law at this batch. It
    grows with the distance from the batches seen."""
    one = (1.0, batch, batch * work.kv_per_request, batch * work.prefill_per_token)
    variance = sum(one[i] * law.covariance[i][j] * one[j] for i in range(4) for j in range(4))
    seconds = step_seconds(law, work, batch)
    return math.sqrt(max(0.0, variance)) / seconds if seconds > 0 else math.inf


def tokens_per_second(law: Law, work: Workload, batch: float) -> float:
    """B / t(B) of one pod."""
    seconds = step_seconds(law, work, batch)
    return batch / seconds if seconds > 0 else 0.0


def batch_within(law: Law, work: Workload, seconds: float) -> float:
    """The largest batch whose step stays within so many seconds (0 when none does)."""
    g = slope(law, work)
    return max(0.0, (seconds - law.a) / g) if g > 0 else math.inf
