"""Who may enter: queue bounds, counted here and not in the engine, so that a burst cannot slip past a stale number."""

import math
import time
from collections import deque
from collections.abc import Callable

from busload_runtime.contract import Limits
from busload_runtime.engine.messages import Stats
from busload_runtime.server.errors import ApiError, invalid

# How long the engine must report a queue beside empty seats before those seats count as unusable (memory is short).
_SETTLED_SECONDS = 1.0
_RATE_WINDOW_SECONDS = 30.0
_RETRY_UNKNOWN_SECONDS = 5
_RETRY_MAX_SECONDS = 120


class Admission:
    """Live sequences and their waiting prompt tokens, against `max_queued_requests` and `max_queued_tokens`.

    A sequence takes a seat from the moment its HTTP request is read until its last token. `batch_size` seats run,
    `max_queued_requests` more may wait; one more is refused with 429 before its text is tokenised.
    """

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self.draining = False
        self.keeps_promises = False
        """Quiescing came before draining: a connection that a client was let keep still serves its next request."""
        self.live = 0
        self.waiting_tokens = 0
        self._clock = clock
        self._finished: deque[float] = deque(maxlen=512)
        self._engine_running = 0
        self._short_since: float | None = None

    def observe(self, stats: Stats) -> None:
        """Notes what the engine runs: with memory short it seats fewer requests than the batch limit."""
        if stats.waiting == 0 or stats.running >= self.limits.batch_size:
            self._short_since = None
        elif self._short_since is None:
            self._short_since = self._clock()
        self._engine_running = stats.running

    @property
    def seats(self) -> int:
        """Sequences that can run at once."""
        if self._short_since is not None and self._clock() - self._short_since >= _SETTLED_SECONDS:
            return self._engine_running
        return self.limits.batch_size

    def take(self, count: int, held: int = 0, promised: bool = False) -> None:
        """Takes `count` seats for a request that holds `held` already. `promised`: it came on a kept connection.

        Raises `ApiError`: 503 when draining (for the first seat only), 429 when the queue is full, 400 when the
        request could not fit even an empty queue.
        """
        if self.draining and not held and not (promised and self.keeps_promises):
            raise ApiError(
                503,
                "this replica is shutting down; send the request again, another replica takes it",
                code="draining",
                reason="draining",
                retry_after=1,
            )
        largest = self.limits.batch_size + self.limits.max_queued_requests
        if held + count > largest:
            raise invalid(
                f"the request asks for {held + count} sequences (prompts times n), batch and queue hold {largest}; "
                "split it",
                "n",
            )
        if self.live + count > self.seats + self.limits.max_queued_requests:
            waiting = max(0, self.live - self.seats)
            raise self._full(f"{waiting} requests wait, the queue holds {self.limits.max_queued_requests}")
        self.live += count

    def queue_tokens(self, tokens: int) -> None:
        """Counts prompt tokens as waiting. Raises 429 when too many wait; alone in the queue any prompt may enter."""
        if self.waiting_tokens and self.waiting_tokens + tokens > self.limits.max_queued_tokens:
            raise self._full(
                f"{self.waiting_tokens} prompt tokens wait, {tokens} more would exceed the queue's "
                f"{self.limits.max_queued_tokens}"
            )
        self.waiting_tokens += tokens

    def unqueue_tokens(self, tokens: int) -> None:
        self.waiting_tokens -= tokens

    def leave(self, count: int = 1, finished: bool = False) -> None:
        """Frees seats. `finished` ones feed the finish rate behind Retry-After."""
        self.live -= count
        if finished:
            self._finished.append(self._clock())

    def retry_after(self) -> int:
        """Seconds in which what waits now is done: the number that wait over the recent finish rate (Little's law)."""
        since = self._clock() - _RATE_WINDOW_SECONDS
        recent = [at for at in self._finished if at >= since]
        if not recent:
            return _RETRY_UNKNOWN_SECONDS
        span = max(self._clock() - recent[0], 1.0)
        waiting = max(1, self.live - self.seats)
        return min(_RETRY_MAX_SECONDS, max(1, math.ceil(waiting * span / len(recent))))

    def _full(self, what: str) -> ApiError:
        return ApiError(
            429, f"queue full: {what}", code="queue_full", reason="queue_full", retry_after=self.retry_after()
        )
