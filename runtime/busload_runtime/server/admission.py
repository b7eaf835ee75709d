"""Who may enter: queue bounds, counted here and not in the engine, so that a burst cannot slip past a stale number."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from busload_runtime.contract import Limits
from busload_runtime.engine.messages import Stats
from busload_runtime.server.errors import ApiError, invalid
from busload_runtime.server.service_rate import ServiceRate
from busload_runtime.server.tenants import ANYBODY, Tenant

# How long the engine must report a queue beside empty seats before those seats count as unusable (memory is short).
_SETTLED_SECONDS = 1.0
_RETRY_UNKNOWN_SECONDS = 5
_RETRY_MAX_SECONDS = 120
TENANT_SHARE = 0.5
"""Of the queue, in requests and in prompt tokens, which one of several tenants may fill."""


def shutting_down() -> ApiError:
    """The refusal of a server that drains."""
    return ApiError(
        503,
        "this replica is shutting down; send the request again, another replica takes it",
        code="draining",
        reason="draining",
        retry_after=1,
    )


@dataclass(slots=True)
class Held:
    """What a tenant, or all of them, hold now."""

    live: int = 0
    """Seats."""
    waiting: int = 0
    """Those of them that have no token yet."""
    tokens: int = 0
    """Prompt tokens of `waiting`, as far as they are known."""
    weight: float = 1.0
    """Of the tenant."""


class Admission:
    """Live sequences and their waiting prompt tokens, against the limits, the time they may wait, and tenants' shares.

    A sequence takes a seat from the moment its HTTP request was read until its last token. `batch_size` seats run,
    `max_queued_requests` more may wait; one more is refused with 429 before its body is read, or at the latest before
    its text is tokenised. While a body is on its way it takes no seat: a client may send it as slowly as it likes.
    """

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self.draining = False
        self.keeps_promises = False
        """Quiescing came before draining: a connection that a client was let keep still serves its next request."""
        self.rate = ServiceRate()
        self.all = Held()
        self._tenants: dict[str, Held] = {}
        """Of tenants that hold something: no more than there are requests."""
        self._clock = clock
        self._engine_running = 0
        self._short_since: float | None = None

    def observe(self, stats: Stats) -> None:
        """Notes what the engine runs: with memory short it seats fewer requests than the batch limit."""
        if stats.waiting == 0 or stats.running >= self.limits.batch_size:
            self._short_since = None
        elif self._short_since is None:
            self._short_since = self._clock()
        self._engine_running = stats.running
        self.rate.observe(stats)

    @property
    def live(self) -> int:
        """Seats taken."""
        return self.all.live

    @property
    def waiting_tokens(self) -> int:
        return self.all.tokens

    @property
    def seats(self) -> int:
        """Sequences that can run at once."""
        if self._short_since is not None and self._clock() - self._short_since >= _SETTLED_SECONDS:
            return self._engine_running
        return self.limits.batch_size

    def check(
        self, count: int = 1, promised: bool = False, tenant: Tenant = ANYBODY, patience: float = math.inf
    ) -> None:
        """Whether `count` sequences may enter now. `promised`: the request came on a kept connection; `patience`:
        seconds that it may wait, as far as it is known how long that is.

        Raises `ApiError`: 503 when draining, 429 when the queue or the tenant's share of it is full or longer than may
        be waited, 400 when the request could not fit even an empty queue.
        """
        if self.draining and not (promised and self.keeps_promises):
            raise shutting_down()
        queue = self.limits.max_queued_requests
        largest = self.limits.batch_size + (self._share if tenant.bounded else queue)
        if count > largest:
            raise invalid(
                f"the request asks for {count} sequences (prompts times n), batch and queue hold {largest}; split it",
                "n",
            )
        if self.live + count > self.seats + queue:
            raise self._full(f"{max(0, self.live - self.seats)} requests wait, the queue holds {queue}", tenant)
        self._check_share(count, tenant)
        self.check_tokens(count, tenant)  # each has one at least: a queue that is full costs no tokenising
        self._check_seconds(tenant, patience)

    def take(self, count: int, promised: bool = False, tenant: Tenant = ANYBODY, patience: float = math.inf) -> None:
        """Takes `count` seats. Raises what `check` does."""
        self.check(count, promised, tenant, patience)
        for holder in (self.all, self._held(tenant)):
            holder.live += count
            holder.waiting += count

    def check_tokens(self, tokens: int, tenant: Tenant = ANYBODY) -> None:
        """Whether so many prompt tokens may wait. Raises 429."""
        most, waiting = self.limits.max_queued_tokens, self.waiting_tokens
        if waiting and waiting + tokens > most:
            raise self._full(f"{waiting} prompt tokens wait, {tokens} more would exceed the queue's {most}", tenant)
        if not tenant.bounded or tenant.name not in self._tenants:
            return
        own, share = self._tenants[tenant.name].tokens, math.floor(TENANT_SHARE * most)
        if own and own + tokens > share:
            what = f"{own} prompt tokens of this tenant wait, {tokens} more would exceed its share of {share}"
            raise self._full(what, tenant, "tenant_limit")

    def queue_tokens(self, tokens: int, tenant: Tenant = ANYBODY) -> None:
        """Counts prompt tokens as waiting. Raises 429 when too many wait; alone in the queue any prompt may enter."""
        self.check_tokens(tokens, tenant)
        for holder in (self.all, self._held(tenant)):
            holder.tokens += tokens

    def unqueue(self, tokens: int, tenant: Tenant = ANYBODY) -> None:
        """A sequence of so many prompt tokens has its first token, or will never have one."""
        for held in (self.all, self._held(tenant)):
            held.waiting -= 1
            held.tokens -= tokens

    def leave(self, count: int = 1, tenant: Tenant = ANYBODY, waiting: int = 0) -> None:
        """Frees seats, `waiting` of which were never submitted."""
        for held in (self.all, self._held(tenant)):
            held.live -= count
            held.waiting -= waiting
        if not self._tenants[tenant.name].live:
            del self._tenants[tenant.name]

    @property
    def tenants(self) -> int:
        """Tenants that hold something."""
        return len(self._tenants)

    def queue_seconds(self, tenant: Tenant = ANYBODY) -> float | None:
        """How long it takes to serve what waits now of a tenant, whose turns come by weight beside those of others that
        wait; 0 while seats are free, None while it is not known."""
        queued = max(0, self.live - self.seats)
        if not queued:
            return 0.0
        tokens = self.waiting_tokens * min(1.0, queued / max(1, self.all.waiting))
        seconds = self.rate.seconds(queued, round(tokens), self.seats)
        held = self._tenants.get(tenant.name)
        if seconds is None:
            return None
        if held is None:
            return 0.0
        weights = sum(other.weight for other in self._tenants.values() if other.waiting)
        return seconds * min(1.0, held.waiting / max(1, self.all.waiting) * weights / held.weight)

    def retry_after(self, tenant: Tenant = ANYBODY) -> int:
        """Seconds in which what waits now of the tenant is served."""
        seconds = self.queue_seconds(tenant)
        return _RETRY_UNKNOWN_SECONDS if seconds is None else min(_RETRY_MAX_SECONDS, max(1, math.ceil(seconds)))

    def _check_share(self, count: int, tenant: Tenant) -> None:
        """A tenant's sequences without a token are those that free seats take at once, and its share of the queue."""
        if not tenant.bounded:
            return
        share = self._share
        free = max(0, self.seats - (self.live - self.all.waiting))
        waiting = self._tenants[tenant.name].waiting if tenant.name in self._tenants else 0
        if waiting + count > free + share:
            raise self._full(
                f"{max(0, waiting - free)} requests of this tenant wait, its share of the queue is {share}",
                tenant,
                "tenant_limit",
            )

    def _check_seconds(self, tenant: Tenant, patience: float) -> None:
        seconds = self.queue_seconds(tenant)
        if seconds is not None and seconds > patience:
            what = f"what waits takes about {seconds:.0f} s, and this request may wait {patience:g} s"
            raise self._full(what, tenant)

    @property
    def _share(self) -> int:
        """Requests of one tenant that may wait."""
        queue = self.limits.max_queued_requests
        return min(queue, max(1, math.floor(TENANT_SHARE * queue)))

    def _held(self, tenant: Tenant) -> Held:
        held = self._tenants.setdefault(tenant.name, Held())
        held.weight = tenant.weight
        return held

    def _full(
        self, what: str, tenant: Tenant, reason: Literal["queue_full", "tenant_limit"] = "queue_full"
    ) -> ApiError:
        return ApiError(429, f"queue full: {what}", code=reason, reason=reason, retry_after=self.retry_after(tenant))
