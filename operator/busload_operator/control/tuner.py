"""One service's tuner: what is in force, what the tuning core remembers, and what is told about it.

Lives in memory. After a restart what is in force comes from the children and from `status`, never from defaults.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from busload_operator.control import metrics, report
from busload_operator.control.apply import wrote
from busload_operator.control.kinds import Key, Object, controller_of
from busload_operator.control.learned import Remembered, identity, stored
from busload_operator.control.logs import about
from busload_operator.control.record import Recording
from busload_operator.control.service import Service
from busload_operator.control.told_law import ToldLaw
from busload_operator.resources.initial_limits import initial_limits, longest_sequence
from busload_operator.tuning.feasible import Reported
from busload_operator.tuning.learned import recall
from busload_operator.tuning.lengths import with_length
from busload_operator.tuning.step import step
from busload_operator.tuning.types import (
    Bottleneck,
    Bounds,
    Decision,
    Inputs,
    Mode,
    PodSample,
    Result,
    Scaling,
    Trial,
    Verdict,
)
from busload_runtime.contract import LIMITS_KEY, Limits, LimitsDocument, LimitsError, Pace, StepLaw, parse_limits

log = logging.getLogger(__name__)
_PATIENCE_SECONDS = 30.0
_DIAGNOSIS_SECONDS = 10.0
"""For how long a bottleneck must last to be told: each one is an event, and load near an edge goes to and fro."""
_RESTARTED = "the operator restarted before the outcome was measured"
_REPLACED = "the model or the size of its pods was changed before the outcome was measured"


@dataclass(frozen=True, slots=True)
class InForce:
    """What the children say: the limits, their generation, the replicas, and what one pod tries."""

    limits: Limits
    generation: int
    replicas: int
    trial: Trial | None = None


class Tuner:
    """Call `conform` before children are applied, `observe` with each round of scrapes."""

    def __init__(
        self,
        key: Key,
        uid: str,
        in_force: InForce,
        decisions: list[Object],
        remembered: Remembered,
        clock: Callable[[], float] = time.monotonic,
        law: StepLaw | None = None,
        diagnosis: Object | None = None,
    ):
        self.key, self.uid = key, uid
        self._clock, self._born = clock, clock()
        self.in_force = in_force
        self.decisions = decisions
        self.remembered = remembered
        self._told_law = ToldLaw(law, clock)
        self.written = False
        """Whether the children carry `in_force`. Nothing is decided on top of a change that is not written yet."""
        self.runs: dict[str, int] = {}
        """Generation of the limits that each pod reported in the last round of scrapes."""
        self.requests: dict[str, int] = {}
        """Requests that each pod had under way in the last round of scrapes."""
        self.reported: Reported | None = None
        """What the newest ready pod said about its model and machine."""
        self.recording: Recording | None = None
        """Where each step is recorded."""
        self.result: Result | None = None
        self.failure = ""
        """Why the last round of observation broke off (a bug); what was found before it is stale then."""
        self._state = recall(remembered.learned, self._next_id)
        self.diagnosis = diagnosis
        """`status.diagnosis`: the newest bottleneck that lasted."""
        self._seen_bottleneck: tuple[Bottleneck, float] | None = None
        """That of the last step, and since when."""

    @classmethod
    def recover(
        cls,
        service: Service,
        config_map: Object | None,
        deployment: Object | None,
        learned: Object | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> "Tuner":
        """The tuner of a service that this process has not seen before."""
        status = service.stored
        children = (child if _is_of(child, service) else None for child in (config_map, deployment, learned))
        config_map, deployment, learned = children
        remembered = Remembered(stored(service, learned), identity(service), clock)
        document = _document(service, config_map)
        in_force = _in_force(service, document, deployment, status.get("tuned") or {}, remembered)
        decisions = [_abandoned(entry, _RESTARTED) for entry in status.get("decisions") or []]
        law = document.pace.law if document else None
        return cls(service.key, service.uid, in_force, decisions, remembered, clock, law, status.get("diagnosis"))

    @property
    def overdue(self) -> bool:
        """Whether observations should have come by now, so that what an earlier process told is out of date."""
        return self._clock() - self._born > _PATIENCE_SECONDS

    def document(self, service: Service) -> LimitsDocument:
        """What the pods are told. Its generation counts changes of limits alone: a new law or objective waits for the
        kubelet's next sync of the ConfigMap, about a minute."""
        objectives = service.objectives
        pace = Pace(objectives.time_to_first_token, objectives.inter_token_latency, self.told_law)
        trial = self.in_force.trial
        return LimitsDocument(
            self.in_force.generation,
            self.in_force.limits,
            trial_pod=None if trial is None else trial.pod,
            trial=None if trial is None else trial.limits,
            pace=pace,
        )

    @property
    def told_law(self) -> StepLaw | None:
        """The step law in the children."""
        return self._told_law.law

    def conform(self, service: Service) -> None:
        """Brings what is in force inside the spec's bounds; in External scaling the spec gives the replicas.

        The longest sequence is what a decision has made it, else the spec's initial one, else what bounds and memory
        allow, now and after each edit of the spec: one that was only ever clamped must not stay low when the spec
        allows more again. Pods refuse limits whose KV cache holds no such sequence, so a smaller cache shortens it.

        For another model, or pods of another size, nothing that was learned of the earlier ones holds.
        """
        limits = self.in_force.limits
        if self.remembered.identity != identity(service):
            self._begin_anew(service)
            if service.mode is Mode.AUTO:
                limits = replace(limits, kv_cache_percent=_first_kv_cache_percent(service, self.remembered))
        limits = clamp(limits, service.bounds)
        bounds, decided = service.bounds.max_sequence_length, self.remembered.learned.max_sequence_length
        length = decided if decided is not None else service.initial_sequence_length
        fitting = longest_sequence(service.parsed.spec, limits.kv_cache_percent)
        limits = with_length(limits, min(fitting, bounds.max if length is None else bounds.clamp(length)))
        replicas = service.asked_replicas
        if service.scaling is Scaling.OBSERVED:
            replicas = service.bounds.replicas.clamp(self.in_force.replicas)
        # Limits that follow the spec are no longer those that the trial was compared with.
        self._change(limits, replicas, self.in_force.trial if limits == self.in_force.limits else None)

    def observe(self, service: Service, samples: Sequence[PodSample], now: float) -> None:
        """One step of the tuning core. Without effect while an earlier change is not written yet."""
        if not self.written:
            return
        inputs = Inputs(
            now=now,
            pods=tuple(samples),
            limits=self.in_force.limits,
            generation=self.in_force.generation,
            replicas=self.in_force.replicas,
            bounds=service.bounds,
            objectives=service.objectives,
            mode=service.mode,
            scaling=service.scaling,
            trial=self.in_force.trial,
        )
        before = self._state
        self._state, self.result = step(before, inputs)
        limits, after = self.in_force.limits, self.result.limits
        if after.max_sequence_length != limits.max_sequence_length:
            at_bound = after.max_sequence_length >= service.bounds.max_sequence_length.max
            follows_bound = at_bound and service.initial_sequence_length is None
            self.remembered.keep_length(None if follows_bound else after.max_sequence_length)
        self.remembered.update(self._state, limits.kv_cache_percent, news=bool(self.result.closed))
        if self.recording is not None and service.is_recorded:
            self.recording.add(before, inputs, self.result, self._state)
        self._tell(self.result)
        self._diagnose(self.result, now)
        if service.mode is Mode.AUTO:
            self._told_law.follow(self.result.law)
        replicas = self.result.replicas if service.scaling is Scaling.OBSERVED else self.in_force.replicas
        self._change(self.result.limits, replicas, self.result.trial)

    @property
    def _next_id(self) -> int:
        return max((int(entry["id"]) for entry in self.decisions), default=0) + 1

    def _begin_anew(self, service: Service) -> None:
        self.remembered.identity = identity(service)
        self.decisions = [_abandoned(entry, _REPLACED) for entry in self.decisions]
        self._state = recall(self.remembered.learned, self._next_id)
        self._told_law = ToldLaw(None, self._clock)
        self.reported = None

    def _change(self, limits: Limits, replicas: int, trial: Trial | None) -> None:
        old = self.in_force
        generation = old.generation + ((limits, trial) != (old.limits, old.trial))
        self.in_force = InForce(limits, generation, replicas, trial)
        if self.in_force != old:
            self.written = False

    def _tell(self, result: Result) -> None:
        for closed in result.closed:
            self._close(closed)
        if made := result.decision:
            self.decisions = report.newest([*self.decisions, report.decision(made, self._wall)])
            metrics.DECISIONS.labels(made.knob.value).inc()
            log.info("decision %d: %s", made.id, made.message, extra=about(*self.key))

    def _diagnose(self, result: Result, now: float) -> None:
        """Takes a bottleneck that lasted as the diagnosis. What a process says that has just started and has not seen
        anything yet is none."""
        bottleneck = result.bottleneck
        if bottleneck is Bottleneck.STARTING and result.observed is None and not self.overdue:
            return
        if self._seen_bottleneck is None or self._seen_bottleneck[0] is not bottleneck:
            self._seen_bottleneck = (bottleneck, now)
        since = self._seen_bottleneck[1]
        told = (self.diagnosis or {}).get("bottleneck")
        if told != bottleneck.value and now - since >= _DIAGNOSIS_SECONDS:
            self.diagnosis = report.diagnosis(bottleneck, result.evidence, since, self._wall)

    def _wall(self, at: float) -> datetime:
        """The wall clock time of a moment of the clock that samples and steps are timed by."""
        return datetime.fromtimestamp(time.time() - (self._clock() - at), UTC)

    def _close(self, closed: Decision) -> None:
        self.decisions = [
            {**entry, "outcome": report.outcome(closed, self._wall)} if entry["id"] == closed.id else entry
            for entry in self.decisions
        ]
        outcome = closed.outcome
        log.info("decision %d: %s: %s", closed.id, outcome.verdict.value, outcome.message, extra=about(*self.key))


def clamp(limits: Limits, bounds: Bounds) -> Limits:
    """The limits moved inside the bounds; the token budget keeps room for one token per running request."""
    batch_size = bounds.batch_size.clamp(limits.batch_size)
    return replace(
        limits,
        max_sequence_length=bounds.max_sequence_length.clamp(limits.max_sequence_length),
        kv_cache_percent=bounds.kv_cache_percent.clamp(limits.kv_cache_percent),
        batch_size=batch_size,
        token_budget=max(limits.token_budget, batch_size),
    )


def _document(service: Service, config_map: Object | None) -> LimitsDocument | None:
    """What an earlier process has told the pods, if nobody else has changed it."""
    text = ((config_map or {}).get("data") or {}).get(LIMITS_KEY)
    if config_map is None or text is None:
        return None
    try:
        if not wrote(config_map, {"data": {LIMITS_KEY: text}}):
            raise LimitsError("somebody else has changed them")
        return parse_limits(text)
    except LimitsError as error:
        log.warning("limits of the ConfigMap are not usable (%s); taken from status", error, extra=about(*service.key))
        return None


def _in_force(
    service: Service, document: LimitsDocument | None, deployment: Object | None, tuned: Object, remembered: Remembered
) -> InForce:
    replicas = int(tuned.get("replicas") or service.bounds.replicas.min)
    if deployment is not None:
        replicas = int((deployment.get("spec") or {}).get("replicas", replicas))
    known_generation = int(tuned.get("generation") or 0)
    if document is not None:
        # Nobody judges any more what one pod was trying: it ends, which is a change of limits.
        return InForce(document.default, document.generation + (document.trial is not None), replicas)
    if limits := _limits_of_status(tuned):
        return InForce(limits, known_generation + 1, replicas)
    percent = _first_kv_cache_percent(service, remembered)
    limits = replace(initial_limits(service.parsed.spec), kv_cache_percent=percent)
    return InForce(limits, known_generation + 1, replicas)


def _first_kv_cache_percent(service: Service, remembered: Remembered) -> int:
    """The last safe one of this model on pods of this size, else what every service starts with."""
    learned = remembered.learned.kv_cache_percent
    if learned is None:
        return initial_limits(service.parsed.spec).kv_cache_percent
    return service.bounds.kv_cache_percent.clamp(learned)


def _is_of(child: Object | None, service: Service) -> bool:
    """Whether it is a child of this very service, not of an earlier one of the same name or of somebody else."""
    return child is not None and (controller_of(child) or {}).get("uid") == service.uid


def _limits_of_status(tuned: Object) -> Limits | None:
    try:
        return Limits(
            max_sequence_length=int(tuned["maxSequenceLength"]),
            batch_size=int(tuned["batchSize"]),
            kv_cache_percent=int(tuned["kvCachePercent"]),
            token_budget=int(tuned["tokenBudget"]),
            max_queued_requests=int(tuned["maxQueuedRequests"]),
            max_queued_tokens=int(tuned["maxQueuedTokens"]),
        )
    except (KeyError, ValueError):
        return None


def _abandoned(entry: Object, message: str) -> Object:
    """A decision whose outcome nobody measures any more."""
    if (entry.get("outcome") or {}).get("verdict") != Verdict.PENDING:
        return entry
    return {**entry, "outcome": {**entry["outcome"], "verdict": Verdict.INCONCLUSIVE.value, "message": message}}
