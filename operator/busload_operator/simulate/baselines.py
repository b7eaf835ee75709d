"""Replica rules in use elsewhere, as baselines. They see what the tuner sees (scraped counters) and move replicas only.

Each follows its project's published defaults; what they cannot know here (Knative's concurrency target) is an argument.
Times in seconds. Where a rule runs by the Horizontal Pod Autoscaler, its rate limit (at most four pods or a doubling
per decision) and its stabilisation window hold too (Kubernetes documentation, "Horizontal Pod Autoscaling").
"""

import math
from collections import deque
from dataclasses import dataclass

from busload_operator.simulate.policy import Action
from busload_operator.tuning import Counters, Inputs

PERIOD = 15.0
"""The HPA's and KEDA's usual interval."""
_TOLERANCE = 0.1


class Hpa:
    """How often a rule decides, its rate limit, and that the highest number of the last `down` seconds holds."""

    def __init__(self, down: float, period: float = PERIOD) -> None:
        self._down, self._period = down, period
        self._due = 0.0
        self._wanted: deque[tuple[float, int]] = deque()

    def due(self, look: Inputs) -> bool:
        if look.now < self._due:
            return False
        self._due = look.now + self._period - 1e-6
        return True

    def settle(self, look: Inputs, wanted: int) -> Action:
        """Bounds, rate limit and stabilisation of the number wanted now."""
        n = look.replicas
        wanted = look.bounds.replicas.clamp(min(wanted, max(n + 4, 2 * n)))
        if not self._wanted:
            self._wanted.append((look.now, n))  # the HPA takes what it finds for an earlier recommendation
        self._wanted.append((look.now, wanted))
        while self._wanted[0][0] <= look.now - self._down:
            self._wanted.popleft()
        return Action(look.limits, max(number for _, number in self._wanted))


def speaking(look: Inputs) -> list[Counters]:
    """Counters of the ready pods that answered."""
    return [pod.counters for pod in look.pods if pod.ready and pod.counters is not None]


def _hold(look: Inputs) -> Action:
    return Action(look.limits, look.replicas)


class Waiting:
    """KEDA on the sum of waiting requests, so many per replica (vLLM production-stack: 5; down after 360 s)."""

    def __init__(self, per_replica: float = 5.0, down: float = 360.0) -> None:
        self._per_replica, self._hpa = per_replica, Hpa(down)

    def __call__(self, look: Inputs) -> Action:
        if not self._hpa.due(look):
            return _hold(look)
        waiting = sum(counters.waiting for counters in speaking(look))
        ratio = waiting / self._per_replica / look.replicas
        wanted = look.replicas if abs(ratio - 1) <= _TOLERANCE else math.ceil(waiting / self._per_replica)
        return self._hpa.settle(look, wanted)


class Busy:
    """The HPA on the share of time in which the engine computes, which is what GPU utilisation shows; target 80%.

    Pods that are not ready count as idle when it scales up (the HPA's rule for missing metrics).
    """

    def __init__(self, target: float = 0.80, down: float = 300.0) -> None:
        self._target, self._hpa = target, Hpa(down)
        self._before: dict[str, tuple[float, float]] = {}

    def __call__(self, look: Inputs) -> Action:
        if not self._hpa.due(look):
            return _hold(look)
        shares = []
        for pod in look.pods:
            if pod.counters is None:
                continue
            clock, busy = pod.counters.clock, pod.counters.busy_seconds
            old = self._before.get(pod.pod)
            self._before[pod.pod] = (clock, busy)
            if old is not None and clock > old[0] and busy >= old[1]:
                shares.append(min(1.0, (busy - old[1]) / (clock - old[0])))
        if not shares:
            return _hold(look)
        n, ready = look.replicas, len(shares)
        ratio = sum(shares) / ready / self._target
        wanted = n
        if ratio > 1 + _TOLERANCE:
            over_all = sum(shares) / n / self._target
            wanted = math.ceil(n * over_all) if over_all > 1 + _TOLERANCE else n
        elif ratio < 1 - _TOLERANCE:
            wanted = math.ceil(ready * ratio)
        return self._hpa.settle(look, wanted)


class Concurrency:
    """Requests in flight over a target per replica: Knative's autoscaler (stable 60 s, panic 6 s at twice, 70% of the
    limit; Knative documentation, "Autoscaling concepts")."""

    def __init__(self, limit: float, utilisation: float = 0.70, stable: float = 60.0) -> None:
        self._target, self._stable = utilisation * limit, stable
        self._seen: deque[tuple[float, float]] = deque()
        self._panic_until = -math.inf
        self._panic_replicas = 0

    def __call__(self, look: Inputs) -> Action:
        pods = speaking(look)
        self._seen.append((look.now, sum(counters.running + counters.waiting for counters in pods)))
        while self._seen[0][0] <= look.now - self._stable:
            self._seen.popleft()
        stable = self._replicas([load for _, load in self._seen])
        panic = self._replicas([load for at, load in self._seen if at > look.now - 6.0])
        ready = max(1, len(pods))
        if panic / ready >= 2:
            self._panic_until = look.now + 60.0
        if look.now < self._panic_until:
            self._panic_replicas = max(self._panic_replicas, panic, look.replicas)
            return Action(look.limits, look.bounds.replicas.clamp(self._panic_replicas))
        self._panic_replicas = 0
        # At most halved at once (max-scale-down-rate 2).
        return Action(look.limits, look.bounds.replicas.clamp(max(stable, math.ceil(ready / 2))))

    def _replicas(self, loads: list[float]) -> int:
        return max(1, math.ceil(sum(loads) / len(loads) / self._target - 1e-9))


@dataclass(frozen=True, slots=True)
class _Peak:
    """Highest figures of one pod in the last minute."""

    kv: float
    waiting: float


class Saturation:
    """The saturation rule of llm-d's Workload Variant Autoscaler.

    A pod is saturated at 80% KV or 5 waiting (peaks of a minute); one replica more when the mean spare of the others is
    below 10% KV or 3 waiting, one less when that spare would remain without it; nothing while pods are starting; down
    after 240 s.
    """

    def __init__(
        self, kv: float = 0.80, waiting: float = 5.0, spare_kv: float = 0.10, spare_waiting: float = 3.0
    ) -> None:
        self._kv, self._waiting, self._spare_kv, self._spare_waiting = kv, waiting, spare_kv, spare_waiting
        self._hpa = Hpa(240.0)
        self._seen: dict[str, deque[tuple[float, float, float]]] = {}

    def __call__(self, look: Inputs) -> Action:
        peaks = self._peaks(look)
        if not self._hpa.due(look):
            return _hold(look)
        if len(peaks) < look.replicas:
            return self._hpa.settle(look, look.replicas)
        return self._hpa.settle(look, self._wanted(peaks, look.replicas))

    def _peaks(self, look: Inputs) -> list[_Peak]:
        peaks = []
        for pod in look.pods:
            if pod.counters is None:
                continue
            counters = pod.counters
            seen = self._seen.setdefault(pod.pod, deque())
            seen.append((look.now, 1 - counters.kv_blocks_free / counters.kv_blocks, counters.waiting))
            while seen[0][0] <= look.now - 60.0:
                seen.popleft()
            peaks.append(_Peak(max(kv for _, kv, _ in seen), max(waiting for _, _, waiting in seen)))
        return peaks

    def _wanted(self, peaks: list[_Peak], n: int) -> int:
        free = [p for p in peaks if p.kv < self._kv and p.waiting < self._waiting]
        if not free:
            return n + 1
        kv = sum(p.kv for p in free) / len(free)
        waiting = sum(p.waiting for p in free) / len(free)
        if self._kv - kv < self._spare_kv or self._waiting - waiting < self._spare_waiting:
            return n + 1
        if len(free) < 2:
            return n
        grown = len(free) / (len(free) - 1)
        stays = self._kv - grown * kv >= self._spare_kv and self._waiting - grown * waiting >= self._spare_waiting
        return n - 1 if stays else n


class TokenCapacity:
    """The token rule of llm-d's Workload Variant Autoscaler.

    Demand is tokens in use and queued prompts; a replica's capacity is 80% of its KV cache or what it held while 5 or
    more waited, whichever is less; up over 85% of it, down under 70%.
    """

    def __init__(self, up: float = 0.85, down: float = 0.70) -> None:
        self._up, self._down = up, down
        self._hpa = Hpa(240.0)
        self._held: deque[float] = deque(maxlen=10)
        self._before: dict[str, tuple[float, float]] = {}
        self._prompt = 0.0

    def __call__(self, look: Inputs) -> Action:
        pods = speaking(look)
        self._learn(look)
        if not self._hpa.due(look) or not pods or self._prompt <= 0:
            return _hold(look)
        used = [(c.kv_blocks - c.kv_blocks_free) * c.kv_block_size for c in pods]
        self._held.extend(u for u, c in zip(used, pods, strict=True) if c.waiting >= 5)
        capacity = 0.80 * min(c.kv_blocks * c.kv_block_size for c in pods)
        if self._held:
            capacity = min(capacity, sum(self._held) / len(self._held))
        demand = sum(used) + self._prompt * sum(c.waiting for c in pods)
        missing = demand / self._up - look.replicas * capacity
        spare = len(pods) * capacity - demand / self._down
        wanted = look.replicas
        if missing > 0:
            wanted += math.ceil(missing / capacity)
        elif spare >= capacity:
            wanted -= int(spare // capacity)
        return self._hpa.settle(look, wanted)

    def _learn(self, look: Inputs) -> None:
        """Mean prompt length, from prompt tokens computed and first tokens."""
        tokens = first = 0.0
        for pod in look.pods:
            if pod.counters is None:
                continue
            now = (pod.counters.prefill_tokens, pod.counters.ttft_count)
            old = self._before.get(pod.pod, (0.0, 0.0))
            self._before[pod.pod] = now
            if now[0] >= old[0] and now[1] >= old[1]:
                tokens, first = tokens + now[0] - old[0], first + now[1] - old[1]
        if first > 0:
            mean = tokens / first
            self._prompt = mean if self._prompt <= 0 else 0.7 * self._prompt + 0.3 * mean
