"""One service: read what lives, apply what should, tell how it is. Level-triggered: it never asks what changed."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from busload_operator.control import status as statuses
from busload_operator.control.apply import Applier, ForeignObjectError
from busload_operator.control.cache import Cache
from busload_operator.control.client import ApiError, Client
from busload_operator.control.deletion_cost import mark_deletion_cost
from busload_operator.control.events import Recorder, transitions
from busload_operator.control.feasible import feasibility
from busload_operator.control.kinds import CONFIG_MAPS, DEPLOYMENTS, PODS, SERVICES, Key, Object
from busload_operator.control.logs import about
from busload_operator.control.nudge import Nudger
from busload_operator.control.pods import is_made_for
from busload_operator.control.record import Recording
from busload_operator.control.service import InvalidSpecError, Service, read_service
from busload_operator.control.status import Problem, Seen
from busload_operator.control.stored import stored_status
from busload_operator.control.tuner import Tuner
from busload_operator.resources.build import children
from busload_operator.resources.gpu import NoGpuImageError
from busload_operator.resources.learned_config_map import learned_config_map, learned_config_map_name
from busload_operator.resources.limits_config_map import limits_config_map_name
from busload_operator.resources.settings import RuntimeSettings
from busload_runtime.contract import LimitsDocument

log = logging.getLogger(__name__)
STATUS_SECONDS = 3.0
"""Least time between two writes of mere readings (observed, law, bottleneck) of a service."""
RECHECK_SECONDS = 60.0
"""When to look again at what no watch will tell: an object of somebody else that stands in the way, or one that the
API server rejects until a person has changed it or the rules."""


@dataclass(frozen=True, slots=True)
class _Rejected:
    """Children of one generation of one service that the API server does not take."""

    uid: str
    generation: int
    at: float
    problem: Problem

    def stands(self, service: Service, now: float) -> bool:
        same = (self.uid, self.generation) == (service.uid, service.generation)
        return same and now - self.at < RECHECK_SECONDS


class Reconciler:
    """Call `reconcile` for one key after another; never for the same key twice at once."""

    def __init__(
        self,
        client: Client,
        cache: Cache,
        tuners: dict[Key, Tuner],
        runtime: RuntimeSettings,
        recorder: Recorder,
        nodes_bandwidth: float | None = None,
        recording: Callable[[Key], Recording] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`nodes_bandwidth`: memory bandwidth of the nodes, bytes per second, where whoever installed the operator
        has said so."""
        self._nodes_bandwidth, self._recording = nodes_bandwidth, recording
        self._client, self._cache, self._tuners = client, cache, tuners
        self._runtime, self._recorder, self._clock = runtime, recorder, clock
        self._applier = Applier(client, cache)
        self._nudger = Nudger(client, clock)
        self._told_at: dict[Key, float] = {}
        self._rejected: dict[Key, _Rejected] = {}
        self._unremembered: dict[Key, str] = {}
        """Why what was learned could not be stored: told once."""

    async def reconcile(self, key: Key) -> float | None:
        """Returns the seconds after which it must run again, or None. Raises `ApiError` for what to try again."""
        live = self._cache.service(key)
        if live is None or live["metadata"].get("deletionTimestamp"):
            self._forget(key)  # Kubernetes deletes the children by their ownerReferences
            return None
        try:
            service = read_service(live)
        except InvalidSpecError as error:
            return await self._tell(live, statuses.invalid(live, str(error), _now()))
        tuner = self._tuner(service)
        tuner.conform(service)
        problem, failure = await self._apply(service, tuner)
        pods = self._pods(key)
        again = await self._tell(live, statuses.build(self._seen(service, tuner, pods, problem, failure)))
        if failure:
            raise Retry(failure)
        if problem is not None and again is None:
            again = RECHECK_SECONDS
        return again

    def _tuner(self, service: Service) -> Tuner:
        tuner = self._tuners.get(service.key)
        if tuner is None or tuner.uid != service.uid:
            namespace, name = service.key
            config_map = self._cache.get(CONFIG_MAPS, namespace, limits_config_map_name(name))
            deployment = self._cache.get(DEPLOYMENTS, namespace, name)
            learned = self._cache.get(CONFIG_MAPS, namespace, learned_config_map_name(name))
            tuner = self._tuners[service.key] = Tuner.recover(service, config_map, deployment, learned)
            tuner.recording = self._recording and self._recording(service.key)
        return tuner

    async def _apply(self, service: Service, tuner: Tuner) -> tuple[Problem | None, str]:
        """Applies the children. Returns what only a person can solve, or what will be tried again in text."""
        rejected = self._rejected.get(service.key)
        if rejected and rejected.stands(service, self._clock()):
            return rejected.problem, ""
        self._rejected.pop(service.key, None)
        in_force, document = tuner.in_force, tuner.document(service)
        changed = not self._carries(service, document)
        try:
            desired = children(service.parsed, self._runtime, document, in_force.replicas)
        except NoGpuImageError as error:
            return Problem("NoGpuImage", str(error)), ""
        except ValueError as error:  # a model source that admission would have refused
            return Problem("InvalidSpec", str(error)), ""
        if in_force.replicas < self._asked_replicas(service.key):
            await mark_deletion_cost(self._client, self._pods(service.key), tuner.requests)
        try:
            await self._applier.apply(service.live, desired, spared=(learned_config_map_name(service.key.name),))
        except ForeignObjectError as error:
            return Problem("ForeignObject", str(error)), ""
        except ApiError as error:
            if error.namespace_terminating:
                raise
            if error.permanent:
                problem = Problem("ChildRejected", str(error))
                self._rejected[service.key] = _Rejected(service.uid, service.generation, self._clock(), problem)
                return problem, ""
            if error.status == 403:
                return None, str(error)
            raise
        await self._remember(service, tuner)
        if tuner.in_force == in_force:  # the observation loop may have moved on meanwhile
            tuner.written = True
        pods = self._pods(service.key)
        await self._nudger.nudge(pods, in_force.generation, tuner.runs, changed)
        return None, ""

    async def _remember(self, service: Service, tuner: Tuner) -> None:
        """Stores what was learned. Only the next process needs it: nothing waits for it, nothing fails with it."""
        if not tuner.remembered.memory.entries:
            return
        body = learned_config_map(service.parsed, tuner.remembered.memory.to_json())
        try:
            await self._applier.apply_one(service.live, body)
        except (ForeignObjectError, ApiError) as error:
            if isinstance(error, ApiError) and error.namespace_terminating:
                raise
            if self._unremembered.get(service.key) != str(error):
                log.warning("what was learned is not stored: %s", error, extra=about(*service.key))
            self._unremembered[service.key] = str(error)
        else:
            self._unremembered.pop(service.key, None)

    def _asked_replicas(self, key: Key) -> int:
        """What the Deployment asks for now."""
        deployment = self._cache.get(DEPLOYMENTS, *key)
        return int(((deployment or {}).get("spec") or {}).get("replicas") or 0)

    def _pods(self, key: Key) -> list[Object]:
        return [pod for pod in self._cache.of_service(PODS, key) if is_made_for(pod, key.name)]

    def _carries(self, service: Service, document: LimitsDocument) -> bool:
        namespace, name = service.key
        config_map = self._cache.get(CONFIG_MAPS, namespace, limits_config_map_name(name))
        return config_map is None or document.to_json() in (config_map.get("data") or {}).values()

    def _seen(self, service: Service, tuner: Tuner, pods: list[Object], problem: Problem | None, failure: str) -> Seen:
        return Seen(
            service=service,
            tuner=tuner,
            deployment=self._cache.get(DEPLOYMENTS, *service.key),
            pods=pods,
            problem=problem,
            failure=failure,
            lagging=self._nudger.lagging(pods, tuner.in_force.generation, tuner.runs),
            feasibility=feasibility(service, tuner.reported, self._nodes_bandwidth),
            now=_now(),
        )

    async def _tell(self, live: Object, new: Object) -> float | None:
        """Writes the status if it differs. Mere readings wait for their turn; returns the seconds until then."""
        key = Key(live["metadata"]["namespace"], live["metadata"]["name"])
        old = live.get("status") or {}
        if not statuses.differs(old, new):
            return None
        wait = self._told_at.get(key, -STATUS_SECONDS) + STATUS_SECONDS - self._clock()
        if wait > 0 and not statuses.urgent(old, new):
            return wait
        stored = await self._client.apply(SERVICES, statuses.body(live, new), statuses.MANAGER, "status")
        self._told_at[key] = self._clock()
        self._cache.put(SERVICES, stored)
        for kind, reason, message in transitions(stored_status(live), new):
            log.info("%s: %s", reason, message, extra=about(*key, live["metadata"]["generation"]))
            await self._recorder.emit(live, kind, reason, message)
        return None

    def _forget(self, key: Key) -> None:
        self._tuners.pop(key, None)
        self._told_at.pop(key, None)
        self._rejected.pop(key, None)
        self._unremembered.pop(key, None)

    def sweep(self) -> None:
        """Drops what is remembered of pods that are gone."""
        self._nudger.forget({pod["metadata"]["uid"] for pod in self._cache.all(PODS)})


class Retry(Exception):
    """The children could not be written, and the status says so; to be tried again with back-off."""


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
