"""A keyed work queue: a key is never worked on twice at once, and never waits in it twice.

The rules are in plain methods over an injected clock, so they are tested without sleeping; only `get` waits.
"""

import asyncio
import heapq
import random
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class WorkQueue(Generic[K]):
    """Keys to work on, in order of arrival, with delays and a back-off per key.

    A key added while it is being worked on becomes ready again when `done` is called. Of several delays for one key the
    earliest counts.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
        first_delay: float = 0.5,
        last_delay: float = 120.0,
    ):
        self._clock, self._jitter = clock, jitter
        self._first, self._last = first_delay, last_delay
        self._ready: deque[K] = deque()
        self._queued: dict[K, float] = {}  # ready keys and since when
        self._working: set[K] = set()
        self._again: set[K] = set()
        self._due: dict[K, float] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._sequence = 0
        self._failures: dict[K, int] = {}
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        """Keys that are ready (not those delayed or being worked on)."""
        return len(self._ready)

    def add(self, key: K) -> None:
        """Makes a key ready now."""
        self._due.pop(key, None)
        if key in self._working:
            self._again.add(key)
        elif key not in self._queued:
            self._queued[key] = self._clock()
            self._ready.append(key)
        self._changed.set()

    def add_after(self, key: K, delay: float) -> None:
        """Makes a key ready after some seconds, unless it is ready earlier anyway."""
        if delay <= 0:
            self.add(key)
            return
        due = self._clock() + delay
        if key in self._queued or key in self._again or self._due.get(key, due + 1) <= due:
            return
        self._due[key] = due
        self._sequence += 1
        heapq.heappush(self._heap, (due, self._sequence, key))
        self._changed.set()

    def retry(self, key: K, at_least: float = 0.0) -> float:
        """Adds a key after its back-off (doubled per failure, 0.5 to 1 of it by chance). Returns the delay."""
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        backoff = min(self._last, self._first * 2.0 ** min(failures - 1, 30))
        delay = max(at_least, backoff * (0.5 + 0.5 * self._jitter()))
        self.add_after(key, delay)
        return delay

    def forgive(self, key: K) -> None:
        """Ends the back-off of a key that succeeded."""
        self._failures.pop(key, None)

    def pop(self) -> K | None:
        """The next ready key, now being worked on; None when there is none. Pair with `done`."""
        now = self._clock()
        while self._heap and self._heap[0][0] <= now:
            due, _, key = heapq.heappop(self._heap)
            if self._due.get(key) == due:  # else an earlier add has overtaken this delay
                self.add(key)
        if not self._ready:
            return None
        key = self._ready.popleft()
        del self._queued[key]
        self._working.add(key)
        return key

    def done(self, key: K) -> None:
        """Ends the work on a key; if it was added meanwhile it is ready again."""
        self._working.discard(key)
        if key in self._again:
            self._again.discard(key)
            self.add(key)

    def wait_seconds(self) -> float | None:
        """Seconds until the next delayed key is due; None when none is delayed."""
        return max(0.0, self._heap[0][0] - self._clock()) if self._heap else None

    def oldest_seconds(self) -> float:
        """How long the key at the head has been ready."""
        return self._clock() - self._queued[self._ready[0]] if self._ready else 0.0

    async def get(self) -> K:
        """Waits for the next ready key."""
        while (key := self.pop()) is None:
            self._changed.clear()
            try:
                async with asyncio.timeout(self.wait_seconds()):
                    await self._changed.wait()
            except TimeoutError:
                continue
        return key
