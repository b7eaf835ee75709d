"""How near to the memory's limit the engine runs: bytes its steps moved against what a copy moves in the same time."""

from collections import deque

from busload_runtime.engine.messages import Stats

WINDOW_SECONDS = 10.0
"""Long enough to be read by a scrape every few seconds, short enough to show what load does."""
_SPACING_SECONDS = 0.5


class BandwidthUse:
    """Keeps a few past snapshots, so that any number of scrapers see the same window."""

    def __init__(self) -> None:
        self._past: deque[Stats] = deque()

    def add(self, stats: Stats) -> None:
        """Takes the engine's newest snapshot in."""
        past = self._past
        if past and stats.clock - past[-1].clock < _SPACING_SECONDS:
            return
        past.append(stats)
        while len(past) > 1 and stats.clock - past[1].clock >= WINDOW_SECONDS:
            past.popleft()

    def share(self, newest: Stats | None, copy_bandwidth: float) -> float:
        """Weight and KV bytes per second of step time over the last `WINDOW_SECONDS`, divided by the copy bandwidth.

        0 when no step ended in that time, or the bandwidth is not known. The time between steps does not count: an
        idle engine is not a slow one.
        """
        if newest is None or not self._past or copy_bandwidth <= 0:
            return 0.0
        first = next((s for s in self._past if newest.clock - s.clock <= WINDOW_SECONDS), newest)
        busy = newest.busy_seconds - first.busy_seconds
        return (newest.bytes_moved - first.bytes_moved) / busy / copy_bandwidth if busy > 0 else 0.0
