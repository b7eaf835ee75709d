"""How many replicas there should be: offered work over learned capacity, in both directions, with hold times."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from busload_operator.tuning.demand import Arrivals, Cost, forecast
from busload_operator.tuning.headroom import (
    ALLOWED_MISSES,
    Errors,
    Jumps,
    Kappa,
    Outcomes,
    learn_errors,
    learn_jumps,
    learn_kappa,
    learn_quantile,
)
from busload_operator.tuning.types import Law

BACKLOG_SECONDS = 120.0
"""In which a backlog that a new replica can still help with should be gone."""
UP_WINDOWS = 3
"""Steps in a row that must ask for more, unless the shortage is plain."""
PLAIN = 1.25
"""So many times the replicas there are: no further step is waited for."""
STILL_THERE = 2.0
"""So many times what arrived in the last 15 s is bought for at most."""
DEAD_BAND = 0.03
"""Of a replica that may lack before one is bought."""
LACKED = 0.5
"""Share of the misses allowed beyond one of a hundred that a fleet may be short by."""
SALE_BAND = 0.05
"""Of a replica that must be left over when one is sold."""
YOUNG_SECONDS = 300.0
"""After the first plan, without a sale, and with half of the margins for purchases as long as they are assumed."""
HOLD_LEAST, HOLD_MOST = 60.0, 120.0
"""For how long two replicas less or more must have been enough: a learned time between these."""
ONE_LESS = 180.0
"""The same for one less, which saves less and is sooner a mistake: four times as long when the other is doubled."""
CALM_TO_FORGET = 600.0
"""Without a purchase after which the learned hold time is halved; twice the hold time for one less, if that is more."""
SAME_LOAD = 0.5
"""Of a replica's capacity: a load that rose by less since a sale is the one that the sale was made for."""
REMEMBERED_SECONDS = 3600.0
"""After a sale, in which a purchase for the same load says that it was a mistake."""
HOLE_SECONDS = 30.0
"""Without a plan, after which hold times begin anew."""
_LOAD_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Seen:
    """What one step knows for sizing. Seconds."""

    now: float
    arrivals: tuple[Arrivals, ...]
    cost: Cost
    law: Law
    batch: float
    """The largest batch of a replica that objectives, memory and bounds allow."""
    waiting: float
    """Requests, of all pods."""
    ready: int
    replicas: int
    """Asked for; those that start count as present."""
    lead: float
    """From asking for a replica to its being ready, and one scrape."""
    time_to_first_token: float
    outcomes: Outcomes | None
    """Since the last step; None: the pods do not count misses."""
    allowed_misses: float = ALLOWED_MISSES
    """Share of requests that may be outside the objectives."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The computed numbers of one step. Work is in replicas that would be busy all the time."""

    up: int
    """Replicas needed."""
    buy: bool
    """More are needed than were asked for, for long enough or plainly."""
    sell_to: int
    """Replicas that have been enough for as long as a sale needs; at least what is needed now."""
    offered: float
    expected: float
    """One lead time ahead."""
    rises: float
    """The same as load rises, where that is more than `expected` with its error would be; else 0."""
    error: float
    """Factor for the error of forecasts."""
    capacity: float
    """Work that one replica may be given."""
    kappa: float
    wait: float
    """Seconds of work that wait, over what the ready replicas do."""
    backlog: float
    """Replicas for the backlog."""
    batch: float
    lead: float
    load_after: float
    """Expected work of each replica after the sale."""


@dataclass(frozen=True, slots=True)
class Want:
    """What one step needed, in work: how many replicas that is, is asked anew with what is learned meanwhile.
    Otherwise learning that a replica may be fuller would have to wait as long as a load that fell."""

    at: float
    expected: float
    lasting: float
    """As far as it is bought for: no more than a small multiple of what arrived lately."""
    spread: float
    """Expected work with its scatter, which the replicas must be able to do at all."""
    replicas: float
    """Needed for backlog, or for bursts instead of all this."""

    def up(self, error: float, capacity: float) -> float:
        """Replicas to buy for, not rounded, with this factor for the error of forecasts."""
        return self.lasting * error / capacity + self.replicas

    def enough(self, error: float, error_down: float, capacity: float, most: float, allowed: float) -> int:
        """Replicas that may stay when some are sold."""
        stay = max(self.expected * error_down / capacity, self.spread / most, self.replicas)
        left = math.ceil(stay - _may_lack(stay, allowed) + SALE_BAND)
        return max(_whole(self.up(error, capacity), allowed), left)


def _whole(replicas: float, allowed: float) -> int:
    return max(1, math.ceil(replicas - DEAD_BAND - _may_lack(replicas, allowed)))


def _may_lack(replicas: float, allowed: float) -> float:
    """Of so many replicas, where more than one request of a hundred may miss: those who are late wait behind the
    others, so that a fleet that is short by a share misses that share and some more."""
    return LACKED * (allowed - ALLOWED_MISSES) * replicas


@dataclass(frozen=True, slots=True)
class Sizing:
    """What is remembered from step to step."""

    since: float | None = None
    errors: Errors = field(default_factory=Errors)
    jumps: Jumps = field(default_factory=Jumps)
    rises: Jumps = field(default_factory=Jumps)
    """What came of rises of the load, believed beyond its mean."""
    kappa: Kappa = field(default_factory=Kappa)
    wants: tuple[Want, ...] = ()
    """Without a hole."""
    short: int = 0
    """Steps in a row that ask for more."""
    hold: float = HOLD_LEAST
    bought_at: float = -math.inf
    sold_at: float = -math.inf
    sold_load: float = 0.0
    """Work that was expected then."""

    def assumes_margins(self, now: float) -> bool:
        """Whether nobody knows yet, neither this process nor one before it, how wrong forecasts are and how full a
        replica may be; misses that have been seen say at least that it may not be so full."""
        young = self.since is not None and now - self.since < YOUNG_SECONDS
        return young and self.errors.prior == Errors().prior and self.kappa.value >= Kappa().value

    @property
    def hold_one(self) -> float:
        return ONE_LESS * (max(self.hold, HOLD_LEAST) / HOLD_LEAST) ** 2


def plan(old: Sizing, seen: Seen) -> tuple[Sizing, Plan | None]:
    """One step further; no plan while too little has arrived to say anything."""
    offered = forecast(seen.arrivals, seen.cost, seen.lead)
    most = seen.batch * seen.cost.slope / (seen.law.a + seen.batch * seen.cost.slope)
    if offered is None or not most > 0:
        return unplanned(old, seen.now), None
    now, n = seen.now, seen.replicas
    queued = seen.waiting * seen.cost.work
    wait = queued / max(1e-9, seen.ready * most)
    late = wait > seen.time_to_first_token / 2
    sizing = replace(unplanned(old, now), since=now if old.since is None else old.since, short=old.short)
    sizing = _learn(sizing, seen, most, late)
    capacity = sizing.kappa.value * most
    untempered = offered.expected(n * capacity)
    expected = sizing.jumps.tempered(offered.steady, untempered)
    rises = 0.0
    if late and offered.short > seen.ready * capacity:
        # It may be one of the bursts that are over before a replica comes: what came of either says so. And it is what
        # makes forecasts wrong: their error does not come on top.
        risen = sizing.rises.tempered(offered.steady, sizing.jumps.tempered(offered.steady, offered.risen))
        if risen > expected * sizing.errors.up(seen.allowed_misses):
            rises, expected = risen, risen / sizing.errors.up(seen.allowed_misses)
    jumps = learn_jumps(sizing.jumps, now, offered.steady, untempered, offered.short, seen.lead)
    learned_rises = learn_jumps(sizing.rises, now, offered.steady, offered.risen, offered.short, seen.lead)
    errors = learn_errors(sizing.errors, now, expected, offered.short, seen.lead)
    # Those that start are here for half of the lead time, in the mean.
    present = seen.ready + max(0, n - seen.ready) / 2
    left = queued + (offered.short - present * most) * seen.lead
    bursty = offered.floor is not None
    backlog = max(0.0, left) / (BACKLOG_SECONDS * most) if late and not bursty else 0.0
    if offered.floor is not None:
        want = Want(now, 0.0, 0.0, 0.0, offered.floor / most)
    else:
        # A burst that is over is no reason to buy, though the mean of a minute still shows it.
        lasting = min(expected, STILL_THERE * offered.short)
        want = Want(now, expected, lasting, expected + offered.scatter, backlog)
    up_by, down_by = errors.up(seen.allowed_misses), errors.down(seen.allowed_misses)
    error, given = up_by, capacity
    if sizing.assumes_margins(now) and not late and offered.jump <= 1:
        # What somebody chose to begin with is not changed for much that nobody has measured.
        error, given = (1 + error) / 2, (capacity + most) / 2
    needed = want.up(error, given)
    up = _whole(needed, seen.allowed_misses)
    wants = (*(w for w in sizing.wants if w.at > now - sizing.hold_one - 60.0), want)
    short = sizing.short + 1 if up > n else 0
    sizing = replace(sizing, errors=errors, jumps=jumps, rises=learned_rises, wants=wants, short=short)
    sell_to = _sell_to(sizing, now, n, lambda w: w.enough(up_by, down_by, capacity, most, seen.allowed_misses))
    return sizing, Plan(
        up=up,
        buy=up > n and (short >= UP_WINDOWS or needed > PLAIN * n or wait > seen.time_to_first_token),
        sell_to=sell_to,
        offered=offered.short,
        expected=expected,
        rises=rises,
        error=error,
        capacity=given,
        kappa=given / most,
        wait=wait,
        backlog=backlog,
        batch=seen.batch,
        lead=seen.lead,
        load_after=expected * down_by / sell_to,
    )


def unplanned(old: Sizing, now: float) -> Sizing:
    """After a step without a plan. A few of them, as while pods take on new limits, leave what was needed before as it
    is; a longer hole may hide a load."""
    hole = bool(old.wants) and now - old.wants[-1].at > HOLE_SECONDS
    return replace(old, wants=() if hole else old.wants, short=0)


def _learn(sizing: Sizing, seen: Seen, most: float, late: bool) -> Sizing:
    """The learned share of a replica and quantile of errors, where the pods count missed objectives."""
    if seen.outcomes is None:
        return sizing
    recent = [a for a in seen.arrivals if a.end > seen.now - _LOAD_SECONDS]
    if not recent:
        return sizing
    load = seen.cost.rate(recent) / max(1, seen.ready) / most
    outcomes = replace(seen.outcomes, load=load)
    kappa = learn_kappa(sizing.kappa, outcomes, late, seen.replicas, seen.allowed_misses)
    errors = learn_quantile(sizing.errors, seen.outcomes, kappa.unavoidable, seen.allowed_misses)
    return replace(sizing, kappa=kappa, errors=errors)


def _sell_to(sizing: Sizing, now: float, replicas: int, enough_for: Callable[[Want], int]) -> int:
    """The replicas that may stay; `replicas` when nothing may be sold yet. N-1 is checked before: `enough_for` gives
    the number that holds a forecast with its error."""
    if sizing.since is None or now - sizing.since < YOUNG_SECONDS:
        return replicas
    hold = max(sizing.hold, HOLD_LEAST)
    if sizing.wants[0].at > now - hold:
        return replicas
    enough = max(enough_for(want) for want in sizing.wants if want.at >= now - hold)
    if enough == replicas - 1:
        hold = sizing.hold_one
        if sizing.wants[0].at > now - hold:
            return replicas
        enough = max(enough_for(want) for want in sizing.wants if want.at >= now - hold)
    return min(enough, replicas)


def changed(old: Sizing, now: float, before: int, after: int, made: Plan | None, lead: float) -> Sizing:
    """After a decision for so many replicas, with the plan of that step. A purchase soon after a sale says that the
    sale was a mistake: from then on what is not needed is held longer. Some time after it, it says so only if load did
    not jump; and for an hour, if the load is about what it was at the sale."""
    if after > before:
        since = now - old.sold_at
        soon, later = old.hold + lead, 2 * old.hold_one + lead
        same = made is not None and made.expected - old.sold_load < SAME_LOAD * made.capacity
        mistake = since < soon or (since < later and old.jumps.open is None) or (since < REMEMBERED_SECONDS and same)
        hold = min(HOLD_MOST, 2 * old.hold) if mistake else old.hold
        return replace(old, bought_at=now, hold=hold, wants=(), short=0)
    calm = now - old.bought_at > max(CALM_TO_FORGET, 2 * old.hold_one)
    hold = max(HOLD_LEAST, old.hold / 2) if calm else old.hold
    return replace(old, sold_at=now, hold=hold, sold_load=made.expected if made is not None else 0.0)
