"""What a leader does: list everything, then work on the queue, then watch; list everything again now and then.

The order matters. Workers start with a complete cache, so that a restart on a settled cluster writes nothing; kopf's
own first list then finds nothing new.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable

from busload_operator.control import metrics
from busload_operator.control.cache import Cache
from busload_operator.control.client import ApiError, Client
from busload_operator.control.events import Recorder
from busload_operator.control.kinds import SERVICES, WATCHED, Key, Kind, Object, service_key
from busload_operator.control.logs import about
from busload_operator.control.observe import Observer
from busload_operator.control.reconcile import Reconciler, Retry
from busload_operator.control.record import Recording
from busload_operator.control.scrape import Scraper
from busload_operator.control.settings import Settings
from busload_operator.control.tuner import Tuner
from busload_operator.control.watch import Watcher, wait_for_definition
from busload_operator.control.workqueue import WorkQueue
from busload_operator.resources.settings import RuntimeSettings

log = logging.getLogger(__name__)
_STUCK_SECONDS = 300.0


class WatchEndedError(Exception):
    """The watches ended by themselves: the process has to start again."""


class Controller:
    """Runs until cancelled, or raises when it cannot go on."""

    def __init__(self, client: Client, settings: Settings, scraper: Scraper):
        self._client, self._settings = client, settings
        self.cache = Cache()
        self.queue: WorkQueue[Key] = WorkQueue()
        self.tuners: dict[Key, Tuner] = {}
        runtime = RuntimeSettings(settings.runtime_image, settings.image_pull_policy, settings.gpu_runtime_image)
        recorder = Recorder(client, settings.identity)
        bandwidth = settings.memory_bandwidth and settings.memory_bandwidth * 1e9
        self.reconciler = Reconciler(client, self.cache, self.tuners, runtime, recorder, bandwidth, self._recordings())
        self.observer = Observer(self.cache, self.queue, self.tuners, scraper, settings.scrape_seconds)

    def _recordings(self) -> Callable[[Key], Recording] | None:
        directory, most = self._settings.record_directory, self._settings.record_max_mib * 2**20
        return None if directory is None else lambda key: Recording(directory, key, most)

    async def run(self) -> None:
        """Raises `WatchEndedError` when the watches failed; other errors are bugs."""
        await wait_for_definition(self._client)
        await self._first_list()
        watcher = Watcher(self._client.configuration, self._settings.watch_namespaces, self._deliver)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._settings.workers):
                    group.create_task(self._work())
                watcher.start()
                group.create_task(self._until_watch_ends(watcher))
                group.create_task(self.observer.run())
                group.create_task(self._resync_for_ever())
        finally:
            await watcher.stop()

    async def resync(self) -> None:
        """Lists all kinds anew and queues every service. Raises `ApiError`; what was listed until then counts."""
        for kind in WATCHED:
            for namespace in self._settings.watch_namespaces or ("",):
                items, at = await self._client.list(kind, namespace)
                for item in items:  # items of a list carry neither
                    item.setdefault("apiVersion", kind.api_version)
                    item.setdefault("kind", kind.name)
                for key in self.cache.replace(kind, items, at, namespace):
                    self.queue.add(key)
        for key in self.cache.services():
            self.queue.add(key)
        self.reconciler.sweep()
        metrics.LAST_RESYNC.set(time.time())

    async def _first_list(self) -> None:
        while True:
            try:
                return await self.resync()
            except ApiError as error:
                log.warning("first list failed, trying again: %s", error)
                await asyncio.sleep(max(1.0, error.retry_after))

    async def _resync_for_ever(self) -> None:
        while True:
            await asyncio.sleep(self._settings.resync_seconds * random.uniform(0.9, 1.1))
            try:
                await self.resync()
            except ApiError as error:
                log.warning("resync failed, the next one is due in its turn: %s", error)

    async def _until_watch_ends(self, watcher: Watcher) -> None:
        error = await asyncio.shield(watcher.ended)
        raise WatchEndedError(f"the watches ended: {error!r}")

    def _deliver(self, kind: Kind, deleted: bool, obj: Object) -> None:
        metrics.WATCH_EVENTS.labels(kind.plural).inc()
        changed = self.cache.remove(kind, obj) if deleted else self.cache.put(kind, obj)
        if changed and (key := service_key(kind, obj)):
            self.queue.add(key)

    def trouble(self) -> str:
        """Why this process cannot go on; empty while it can. An API server that is away is no reason to restart."""
        waiting = self.queue.oldest_seconds()
        return f"work has waited for {waiting:.0f} s: the workers are stuck" if waiting > _STUCK_SECONDS else ""

    def refresh_gauges(self) -> None:
        """Brings the gauges of the queue and the cache up to date."""
        metrics.DEPTH.labels(metrics.CONTROLLER).set(len(self.queue))
        metrics.OLDEST.labels(metrics.CONTROLLER).set(self.queue.oldest_seconds())
        metrics.SERVICES.set(self.cache.count(SERVICES))

    async def _work(self) -> None:
        while True:
            key = await self.queue.get()
            try:
                with metrics.ACTIVE_WORKERS.labels(metrics.CONTROLLER).track_inprogress():
                    await self._reconcile(key)
            finally:
                self.queue.done(key)

    async def _reconcile(self, key: Key) -> None:
        result = "error"
        try:
            with metrics.RECONCILE_SECONDS.labels(metrics.CONTROLLER).time():
                again = await self.reconciler.reconcile(key)
            self.queue.forgive(key)
            if again is not None:
                self.queue.add_after(key, again)
            result = "success" if again is None else "requeue_after"
        except ApiError as error:
            self._failed(key, error)
        except Retry as error:
            delay = self.queue.retry(key)
            log.warning("trying again in %.1f s: %s", delay, error, extra=about(*key))
        except Exception:
            delay = self.queue.retry(key)
            log.exception("reconcile failed; trying again in %.1f s", delay, extra=about(*key))
        finally:
            metrics.RECONCILES.labels(metrics.CONTROLLER, result).inc()
            if result == "error":
                metrics.RECONCILE_ERRORS.labels(metrics.CONTROLLER).inc()

    def _failed(self, key: Key, error: ApiError) -> None:
        if error.namespace_terminating:
            log.info("namespace is being deleted, so nothing more is done for this service", extra=about(*key))
            return
        if error.status == 404:
            log.info("gone while it was worked on: %s", error, extra=about(*key))
        delay = self.queue.retry(key, at_least=error.retry_after)
        level = logging.ERROR if error.permanent else logging.WARNING
        log.log(level, "trying again in %.1f s: %s", delay, error, extra=about(*key))
