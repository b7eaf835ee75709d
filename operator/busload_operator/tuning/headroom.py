"""What the operator learns about its own planning: how full a replica may be planned, and how wrong forecasts are.

Both are learned from outcomes instead of assumed: the usable share of a replica (kappa) from objectives missed while
the plan was kept, and the error of forecasts from what arrived one lead time after each.
"""

import math
from dataclasses import dataclass, replace

ALLOWED_MISSES = 0.01
"""Share of requests that may be outside the objectives, unless the spec says another."""
_TOO_MANY, _HARDLY_ANY = 0.7, 0.4
"""Shares of the misses that are allowed: from the first on a replica is planned less full, as misses in bursts,
which teach nothing, count against the target too; under the second fuller."""
_START = 0.85
_LOWEST = 0.70
"""Below it what is missed is hardly missed for want of replicas: very long prompts, say, miss on an idle pod too."""
_CLEAN_AFTER = 60.0
_YOUNG = 180.0
_CLEAN_KEPT = 300.0
_CLEAN_AT_LEAST = 6
_REQUESTS_AT_LEAST = 200
_PAUSE = 60.0
_FORGIVING = 1.003
"""Factor by which what was bad may be tried again, each good minute."""
_QUIET = 0.6
"""Share of kappa up to which misses are not for want of replicas."""
_QUIET_REQUESTS = 1000.0
"""After which what was learned of a quiet service counts a third (1/e)."""
_TESTED = 0.85
"""A share is tested by loads of at least so much of it. Kappa rises when it was, or when with one replica less it would
be nearly kept, so that the next sale tests it."""


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Requests whose first token came, and those of them that missed an objective."""

    at: float
    requests: float
    missed: float
    load: float = 0.0
    """Offered work per ready replica, as a share of its capacity within the objectives."""


@dataclass(frozen=True, slots=True)
class Kappa:
    """Share of a replica's capacity that offered work may use; the rest is for the variance of lengths and arrivals."""

    value: float = _START
    bad: float = 1.1
    """The lowest share at which objectives were missed, slowly forgotten."""
    since: float | None = None
    dirty_at: float = -math.inf
    """When load was last above what was planned."""
    changed_at: float = -math.inf
    clean: tuple[Outcomes, ...] = ()
    """Of the last five minutes, while the plan was kept."""
    loud_at: float = -math.inf
    """When load was last more than a quiet service has."""
    quiet_requests: float = 0.0
    quiet_missed: float = 0.0
    """Of a quiet service, forgetting."""

    @property
    def unavoidable(self) -> float:
        """Share of requests that miss however many replicas there are, as those do that come to a quiet service: a very
        long prompt takes longer than the objective by itself. 0 until enough of them were seen."""
        if self.quiet_requests <= _REQUESTS_AT_LEAST:
            return 0.0
        return self.quiet_missed / self.quiet_requests


def learn_kappa(old: Kappa, now: Outcomes, late: bool, replicas: int, allowed: float = ALLOWED_MISSES) -> Kappa:
    """One step further. `late`: the wait is over half its objective; `replicas` are those asked for; `allowed`: share
    of requests that may miss."""
    kappa = old if old.since is not None else replace(old, since=now.at)
    if now.load > 1.02 * kappa.value or (late and now.load > 0.9 * kappa.value):
        kappa = replace(kappa, dirty_at=now.at)
    clean = tuple(o for o in kappa.clean if o.at > now.at - _CLEAN_KEPT)
    if now.at - kappa.dirty_at > _CLEAN_AFTER and now.at - (kappa.since or 0.0) > _YOUNG:
        clean = (*clean, now)
    kappa = _learn_quiet(replace(kappa, clean=clean), now, late)
    requests = sum(o.requests for o in clean)
    if len(clean) < _CLEAN_AT_LEAST or requests <= _REQUESTS_AT_LEAST or now.at - kappa.changed_at < _PAUSE:
        return kappa
    missed = sum(o.missed for o in clean) / requests - kappa.unavoidable
    mean = sum(o.load for o in clean) / len(clean)
    if missed > _TOO_MANY * allowed and mean > _QUIET * kappa.value:
        lower = max(_LOWEST, 0.95 * kappa.value)
        return replace(kappa, bad=min(kappa.bad, kappa.value), value=lower, changed_at=now.at, clean=())
    tested = max(o.load for o in clean) > _TESTED * kappa.value
    one_less_may_do = replicas > 1 and now.load * replicas / (replicas - 1) < 1.15 * kappa.value
    if missed < _HARDLY_ANY * allowed and (tested or one_less_may_do):
        bad = min(1.1, _FORGIVING * kappa.bad)
        higher = max(kappa.value, min(1.0, 1.05 * kappa.value, 0.98 * bad))
        return replace(kappa, bad=bad, value=higher, changed_at=now.at)
    return kappa


def _learn_quiet(kappa: Kappa, now: Outcomes, late: bool) -> Kappa:
    if late or now.load > _QUIET * kappa.value:
        return replace(kappa, loud_at=now.at)
    if now.at - kappa.loud_at <= _CLEAN_AFTER or now.at - (kappa.since or 0.0) <= _YOUNG:
        return kappa
    kept = math.exp(-now.requests / _QUIET_REQUESTS)
    return replace(
        kappa,
        quiet_requests=kept * kappa.quiet_requests + now.requests,
        quiet_missed=kept * kappa.quiet_missed + now.missed,
    )


_PRIOR_SIGMA = 0.15
_PRIOR = tuple(
    math.exp(_PRIOR_SIGMA * z) for z in (-1.6, -1.2, -0.9, -0.7, -0.5, -0.3, -0.1, 0.1, 0.3, 0.5, 0.7, 0.9, 1.2, 1.6)
)
"""Errors believed before any was seen: of so many standard deviations."""
PRIOR_SIZE = len(_PRIOR)
_ERRORS_KEPT = 3600.0
_ERROR_EVERY = 15.0
_LEAST, _MOST = 1.05, 1.5
_QUANTILE, _QUANTILE_LEAST, _QUANTILE_MOST, _QUANTILE_DOWN = 0.80, 0.70, 0.93, 0.04
_MANY_MISSES = 0.10
"""Where so many may miss, the middle of what came is planned for at the least, with nothing on top of it."""
_MIDDLE = 0.5
_OUTCOMES_KEPT = 600.0


@dataclass(frozen=True, slots=True)
class Errors:
    """Forecasts made, and arrivals one lead time later as a multiple of them."""

    made: tuple[tuple[float, float], ...] = ()
    """(when, offered work expected)."""
    seen: tuple[tuple[float, float], ...] = ()
    """(when, ratio), of the last hour."""
    prior: tuple[float, ...] = _PRIOR
    """Ratios believed before any was seen: assumed, or those that an earlier process has learned."""
    quantile: float = _QUANTILE
    """Which of the ratios is planned for."""
    quantile_at: float = -math.inf
    outcomes: tuple[Outcomes, ...] = ()

    def up(self, allowed: float = ALLOWED_MISSES) -> float:
        """Factor on a forecast for buying. `allowed`: share of requests that may miss."""
        return self._at(self.quantile, allowed)

    def down(self, allowed: float = ALLOWED_MISSES) -> float:
        """Factor on a forecast for selling: a little more careful."""
        return self._at(min(0.98, self.quantile + _QUANTILE_DOWN), allowed)

    def sketch(self) -> tuple[float, ...]:
        """All that is believed, as `PRIOR_SIZE` quantiles: a prior for the next process."""
        ratios = self._ratios()
        return tuple(_between(ratios, (i + 0.5) / PRIOR_SIZE) for i in range(PRIOR_SIZE))

    def _ratios(self) -> list[float]:
        return sorted([*(ratio for _, ratio in self.seen), *self.prior])

    def _at(self, quantile: float, allowed: float) -> float:
        return min(_MOST, max(_between_bars(allowed, _LEAST, 1.0), _between(self._ratios(), quantile)))


def _between_bars(allowed: float, strict: float, loose: float) -> float:
    """From `strict` where one request of a hundred may miss to `loose` where one of ten may."""
    share = (_MANY_MISSES - allowed) / (_MANY_MISSES - ALLOWED_MISSES)
    return loose + min(1.0, max(0.0, share)) * (strict - loose)


def _between(ratios: list[float], quantile: float) -> float:
    """The quantile of sorted values, between two of them by their distance."""
    place = quantile * (len(ratios) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ratios) - 1)
    return ratios[low] + (place - low) * (ratios[high] - ratios[low])


def learn_errors(old: Errors, now: float, expected: float, arriving: float, lead: float) -> Errors:
    """Compares what arrives with what was expected for now, and remembers what is expected for one lead later."""
    made, seen = old.made, old.seen
    due = [forecast for forecast in made if forecast[0] <= now - lead]
    if due:
        made = made[len(due) :]
        if due[-1][1] > 0:
            seen = (*(s for s in seen if s[0] > now - _ERRORS_KEPT), (now, arriving / due[-1][1]))
    if not made or now - made[-1][0] >= _ERROR_EVERY - 1e-6:
        made = (*made, (now, expected))
    return replace(old, made=made, seen=seen)


def learn_quantile(old: Errors, now: Outcomes, unavoidable: float = 0.0, allowed: float = ALLOWED_MISSES) -> Errors:
    """Plans for rarer errors while too many requests miss, for more common ones while hardly any does; once a
    minute. Misses that are `unavoidable` do not count, and what is missed in the minute after an error that no quantile
    is planned for says nothing about it."""
    if any(ratio > _MOST for at, ratio in old.seen if at > now.at - _CLEAN_AFTER):
        return old
    outcomes = (*(o for o in old.outcomes if o.at > now.at - _OUTCOMES_KEPT), now)
    errors = replace(old, outcomes=outcomes)
    if now.at - old.quantile_at < _PAUSE or now.at - outcomes[0].at < _YOUNG:
        return errors
    missed = sum(o.missed for o in outcomes) / max(1.0, sum(o.requests for o in outcomes)) - unavoidable
    quantile = old.quantile
    if missed > _TOO_MANY * allowed:
        quantile = min(_QUANTILE_MOST, quantile + 0.01)
    elif missed < 0.3 * allowed:
        quantile = max(_between_bars(allowed, _QUANTILE_LEAST, _MIDDLE), quantile - 0.01)
    return replace(errors, quantile=quantile, quantile_at=now.at)


_JUMPS_KEPT = 8


@dataclass(frozen=True, slots=True)
class Jump:
    """Work offered when load jumped: before, and what was expected one lead time later."""

    due: float
    level: float
    expected: float


@dataclass(frozen=True, slots=True)
class Jumps:
    """What came of jumps of the load: those that are over before a replica could come are not worth one."""

    open: Jump | None = None
    stayed: tuple[float, ...] = ()
    """Of the last jumps: the share of what was expected beyond the level that was still there one lead time later."""

    @property
    def trust(self) -> float:
        """Share of a jump that is planned for; all of it before one was seen, which then counts as much as that."""
        return (1.0 + sum(self.stayed)) / (1.0 + len(self.stayed))

    def tempered(self, level: float, expected: float) -> float:
        """What is expected of a load that jumps from `level`."""
        return level + self.trust * (expected - level)


def learn_jumps(old: Jumps, now: float, level: float, expected: float, arriving: float, lead: float) -> Jumps:
    """One step further: `expected` is over `level` in a jump. The strongest moment of a jump is what is judged."""
    jump, stayed = old.open, old.stayed
    if jump is not None and now >= jump.due:
        share = (arriving - jump.level) / (jump.expected - jump.level)
        stayed = (*stayed[-_JUMPS_KEPT + 1 :], min(1.0, max(0.0, share)))
        # What is over the level still belongs to the jump that was judged.
        return Jumps(None, stayed)
    if jump is None and expected > level:
        jump = Jump(now + lead, level, expected)
    return Jumps(jump, stayed)
