"""The observation loop: every few seconds, scrape the ready pods of each service and let its tuner take a step."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from busload_operator.control import pods as pod_words
from busload_operator.control import status
from busload_operator.control.cache import Cache
from busload_operator.control.kinds import PODS, Key, Object
from busload_operator.control.logs import about
from busload_operator.control.scrape import Scraper
from busload_operator.control.service import InvalidSpecError, read_service
from busload_operator.control.tuner import Tuner
from busload_operator.control.workqueue import WorkQueue
from busload_operator.tuning.counters import CountersError, counters_from_samples, probed_from_samples
from busload_operator.tuning.feasible import Reported, reported
from busload_operator.tuning.types import PodSample

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Look:
    """What one pod answered."""

    sample: PodSample
    reported: Reported | None = None


class Observer:
    """Feeds the tuners and queues a service when what should be told or in force has changed."""

    def __init__(
        self,
        cache: Cache,
        queue: WorkQueue[Key],
        tuners: dict[Key, Tuner],
        scraper: Scraper,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._cache, self._queue, self._tuners, self._scraper = cache, queue, tuners, scraper
        self._seconds, self._clock = seconds, clock
        self._running: dict[Key, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """For ever. A service whose round takes longer than the interval misses rounds; the others do not wait."""
        try:
            while True:
                for key in list(self._tuners):
                    if key not in self._running:
                        self._running[key] = asyncio.create_task(self._guarded(key))
                await asyncio.sleep(self._seconds)
        finally:
            for task in list(self._running.values()):
                task.cancel()

    async def _guarded(self, key: Key) -> None:
        try:
            await self.observe(key)
        except Exception as error:
            log.exception("observation failed", extra=about(*key))
            self._fail(key, f"{type(error).__name__}: {error}")
        finally:
            del self._running[key]

    async def observe(self, key: Key) -> None:
        """One round of one service."""
        labelled = self._cache.of_service(PODS, key)
        pods = [pod for pod in labelled if pod_words.is_made_for(pod, key.name) and not pod_words.is_leaving(pod)]
        looks = await asyncio.gather(*map(self._look, pods))
        samples = [look.sample for look in looks]
        live, tuner = self._cache.service(key), self._tuners.get(key)
        if live is None or tuner is None:
            return
        try:
            service = read_service(live)
        except InvalidSpecError:
            return  # told by the reconcile; the children stay as they are
        told = self._told(tuner)
        tuner.runs = _generations(samples)
        tuner.requests = {s.pod: int(s.counters.running + s.counters.waiting) for s in samples if s.counters}
        tuner.reported = _newest_report(pods, looks) or tuner.reported
        tuner.observe(service, samples, self._clock())
        tuner.failure = ""
        if told != self._told(tuner) or self._lags(tuner):
            self._queue.add(key)

    def _fail(self, key: Key, text: str) -> None:
        tuner = self._tuners.get(key)
        if tuner is not None and tuner.failure != text:
            tuner.failure = text
            self._queue.add(key)

    async def _look(self, pod: Object) -> "_Look":
        name, address = pod["metadata"]["name"], pod_words.address(pod)
        kills = pod_words.memory_kills(pod)
        if not address or not pod_words.is_ready(pod):
            return _Look(PodSample(name, self._clock(), None, ready=False, memory_kills=kills))
        scrape = await self._scraper.scrape(address)
        at = self._clock()
        if scrape.values is None:
            return _Look(PodSample(name, at, None, ready=True, problem=scrape.error, memory_kills=kills))
        try:
            counters, probed = counters_from_samples(scrape.values), probed_from_samples(scrape.values)
            sample = PodSample(name, at, counters, ready=True, memory_kills=kills, probed=probed)
        except CountersError as error:
            sample = PodSample(name, at, None, ready=True, problem=str(error), memory_kills=kills)
        return _Look(sample, reported("the model", scrape.values))

    def _told(self, tuner: Tuner) -> Object:
        """What people and children learn from a tuner; a change of it is worth a reconcile."""
        hold = tuner.result.hold if tuner.result else None
        return {
            "findings": status.findings(tuner, {}),
            "diagnosis": tuner.diagnosis,
            "disarmed": tuner.result is not None and tuner.result.disarmed is not None,
            "failure": tuner.failure,
            "hold": hold,
            "decisions": tuner.decisions,
            "in_force": tuner.in_force,
            "told_law": tuner.told_law,
            "overdue": tuner.overdue,
            "lags": self._lags(tuner),
            "reported": tuner.reported,
            "remembered": tuner.remembered.memory,
        }

    @staticmethod
    def _lags(tuner: Tuner) -> bool:
        return any(generation != tuner.in_force.generation for generation in tuner.runs.values())


def _newest_report(pods: Sequence[Object], looks: Sequence[_Look]) -> Reported | None:
    """Of the newest pod, because older ones may still run the model of an earlier spec; with the fastest memory of
    all, because other work on a node only lowers what is measured there."""
    found = [
        (pod["metadata"].get("creationTimestamp", ""), look.reported) for pod, look in zip(pods, looks, strict=True)
    ]
    reports = [report for _, report in sorted(found, key=lambda pair: pair[0]) if report is not None]
    if not reports:
        return None
    return replace(reports[-1], copy_bandwidth=max(report.copy_bandwidth for report in reports))


def _generations(samples: Sequence[PodSample]) -> dict[str, int]:
    return {sample.pod: int(sample.counters.generation) for sample in samples if sample.counters}
