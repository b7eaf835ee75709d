"""The pods of one service, what routes requests to them, and what happens to them: start, drain, faults."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from busload_operator.simulate.hardware import Hardware, SetupError
from busload_operator.simulate.replica import Job, Replica
from busload_operator.tuning import Counters, PodSample, Trial
from busload_operator.tuning.counters import CUMULATIVE, OPTIONAL_SAMPLES
from busload_runtime.contract import Limits, Pace


class Router(StrEnum):
    LEAST_REQUESTS = "least-requests"
    ROUND_ROBIN = "round-robin"
    LEAST_TOKENS = "least-tokens"


class FaultKind(StrEnum):
    SILENT = "silent"
    """Scrapes fail; the pod works on."""
    FROZEN = "frozen"
    """Scrapes keep showing the numbers of the beginning; the pod works on."""
    RESET = "reset"
    """Its counters start again at zero; the pod works on."""
    RESTART = "restart"
    """The process ends: its requests are lost, and it is ready again after the start-up time."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One disturbance: of the pod at this place among the ready ones (in order of age), from `at` for `seconds`."""

    kind: FaultKind
    pod: int
    at: float
    seconds: float

    @classmethod
    def parse(cls, text: str) -> "Fault":
        """`KIND:POD@AT+SECONDS`, as in `silent:0@600+120`. Raises `SetupError`."""
        kinds = ", ".join(FaultKind)
        try:
            kind, rest = text.split(":", 1)
            pod, when = rest.split("@", 1)
            at, _, seconds = when.partition("+")
            fault = cls(FaultKind(kind), int(pod), float(at), float(seconds or 0))
        except ValueError:
            raise SetupError(
                f"fault {text!r}: expected KIND:POD@AT+SECONDS, as silent:0@600+120; KIND: {kinds}"
            ) from None
        if fault.pod < 0 or fault.at < 0 or fault.seconds < 0:
            raise SetupError(f"fault {text!r}: pod, time and seconds must not be negative")
        return fault


class Fleet:
    """Time only moves forward: call with rising `now`. `lost` gathers jobs that ended without a pod to finish them."""

    def __init__(
        self,
        hardware: Hardware,
        limits: Limits,
        replicas: int,
        router: Router,
        startup: float,
        seed: int,
        pace: Pace = Pace(),
    ) -> None:
        self.limits, self.generation, self._pace = limits, 1, pace
        self._hardware, self._startup, self._seed = hardware, startup, seed
        self._pick = _ROUTERS[router]
        self._made = 0
        self._turn = 0
        self.pods: list[Replica] = []
        """All that exist, oldest first; draining ones too."""
        self._retired_seconds = 0.0
        self._retired: list[Job] = []
        self._disturbed: dict[str, _Disturbance] = {}
        for _ in range(replicas):
            self._start(0.0, 0.0)

    # Requests.

    def ready(self, now: float) -> list[Replica]:
        return [pod for pod in self.pods if pod.draining_since is None and pod.ready_at <= now]

    def submit(self, job: Job, now: float) -> None:
        """Routes one request; without a ready pod it fails with `no_pod`."""
        ready = self.ready(now)
        for pod in ready:
            if pod.next_event <= now:
                pod.advance(now)
        if not ready:
            job.failed = "no_pod"
            return
        self._turn += 1
        self._pick(ready, self._turn, now).submit(job, now)

    def advance(self, now: float) -> None:
        """Brings all pods to `now`; drained ones that are empty are gone."""
        for pod in self.pods:
            pod.advance(now)
        for pod in [p for p in self.pods if p.draining_since is not None and p.requests == 0]:
            self._retire(pod, now)

    def take_finished(self) -> list[Job]:
        """Jobs that ended since the last call."""
        done, self._retired = self._retired, []
        for pod in self.pods:
            done += pod.finished
            pod.finished = []
        return done

    @property
    def next_event(self) -> float:
        return min((pod.next_event for pod in self.pods), default=float("inf"))

    # Changes.

    @property
    def asked(self) -> int:
        """Pods that exist and are not leaving."""
        return sum(pod.draining_since is None for pod in self.pods)

    def scale(self, replicas: int, now: float) -> None:
        """Starts pods, or lets some go: first those that are not ready yet, then those with the fewest requests. What
        runs on a leaving pod is finished."""
        for _ in range(replicas - self.asked):
            self._start(now, self._startup)
        staying = [pod for pod in self.pods if pod.draining_since is None]
        staying.sort(key=lambda pod: (pod.ready_at <= now, pod.requests if pod.ready_at <= now else -pod.ready_at))
        for pod in staying[: max(0, len(staying) - replicas)]:
            pod.draining_since = now
            if pod.requests == 0:
                self._retire(pod, now)

    def apply(self, limits: Limits, generation: int, now: float, trial: Trial | None = None) -> None:
        """The limits document changed; pods that start later begin with it."""
        self.limits, self.generation = limits, generation
        for pod in self.pods:
            alone = trial is not None and trial.pod == pod.name
            pod.apply(trial.limits if trial is not None and alone else limits, generation, now)

    def disturb(self, fault: Fault, now: float) -> None:
        """Begins a fault; without a ready pod at its place nothing happens."""
        ready = self.ready(now)
        if fault.pod >= len(ready):
            return
        pod = ready[fault.pod]
        if fault.kind is FaultKind.RESTART:
            self._retired += pod.restart(now, now + self._startup)
            self._disturbed.pop(pod.name, None)
        else:
            self._disturbed[pod.name] = _Disturbance(fault.kind, now, now + fault.seconds, pod.counters(now))

    # What the operator sees.

    def scrape(self, now: float) -> tuple[PodSample, ...]:
        """One sample of each pod that is not leaving, as the operator's scrape makes them."""
        return tuple(self._sample(pod, now) for pod in self.pods if pod.draining_since is None)

    def _sample(self, pod: Replica, now: float) -> PodSample:
        if pod.ready_at > now:
            return PodSample(pod.name, now, None, ready=False)
        counters = pod.counters(now)
        disturbed = self._disturbed.get(pod.name)
        if disturbed is None:
            return PodSample(pod.name, now, counters, ready=True)
        if disturbed.kind is FaultKind.SILENT and now < disturbed.until:
            return PodSample(pod.name, now, None, ready=True, problem="no answer in time")
        if disturbed.kind is FaultKind.FROZEN and now < disturbed.until:
            return PodSample(pod.name, now, disturbed.counters, ready=True)
        if disturbed.kind is FaultKind.RESET:
            counters = _since(disturbed.counters, counters)
        return PodSample(pod.name, now, counters, ready=True)

    def replica_seconds(self, now: float) -> float:
        """Seconds that pods existed up to `now`, starting and draining included."""
        return self._retired_seconds + sum(now - pod.created for pod in self.pods)

    def _start(self, now: float, startup: float) -> None:
        self._made += 1
        name = f"pod-{self._made}"
        ready_at = now + startup
        pod = Replica(name, self._hardware, self.limits, self.generation, now, ready_at, self._seed, self._pace)
        self.pods.append(pod)

    def _retire(self, pod: Replica, now: float) -> None:
        assert pod.draining_since is not None
        self._retired_seconds += max(pod.draining_since, min(now, pod.idle_since)) - pod.created
        self._retired += pod.finished
        self._disturbed.pop(pod.name, None)
        self.pods.remove(pod)


@dataclass(frozen=True, slots=True)
class _Disturbance:
    kind: FaultKind
    since: float
    until: float
    counters: Counters


def _since(base: Counters, counters: Counters) -> Counters:
    """The counters as if they had started at `base`; levels and the clock stay."""
    counted = [name for name in (*CUMULATIVE, *OPTIONAL_SAMPLES) if name != "clock"]
    return replace(counters, **{name: getattr(counters, name) - getattr(base, name) for name in counted})


def _least_requests(ready: Sequence[Replica], turn: int, now: float) -> Replica:
    return min(ready, key=lambda pod: (pod.requests, pod.assigned))


def _round_robin(ready: Sequence[Replica], turn: int, now: float) -> Replica:
    return ready[turn % len(ready)]


def _least_tokens(ready: Sequence[Replica], turn: int, now: float) -> Replica:
    return min(ready, key=lambda pod: (pod.outstanding_tokens(now), pod.assigned))


_ROUTERS: dict[Router, Callable[[Sequence[Replica], int, float], Replica]] = {
    Router.LEAST_REQUESTS: _least_requests,
    Router.ROUND_ROBIN: _round_robin,
    Router.LEAST_TOKENS: _least_tokens,
}
