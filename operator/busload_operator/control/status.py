"""What the operator tells about a service: the whole `status`, from what was seen. Pure.

Ready is True when the replicas that the spec asks for are ready, run the current generation of the spec, and no pod
has failed. Replicas that the tuner adds on top do not make a serving service unready; Reconciling says that they come.
Reconciling and Stalled exist only while they are true (kstatus). Feasible says whether bounds and objectives can be met
at all by model and memory; it changes nothing about Ready.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from busload_operator.api.status import Status
from busload_operator.control import pods as pod_words
from busload_operator.control import report
from busload_operator.control.events import DISARMED
from busload_operator.control.kinds import SERVICES, Object
from busload_operator.control.service import Service
from busload_operator.control.stored import stored_status
from busload_operator.control.tuner import Tuner
from busload_operator.resources.labels import selector_text
from busload_operator.resources.service import PORT
from busload_operator.tuning.feasible import Feasibility
from busload_operator.tuning.types import Bottleneck, Mode

MANAGER = "busload-status"
CONDITION_TYPES = ("Ready", "Reconciling", "Stalled", "Feasible", "Tuning")
_FIELDS = frozenset(field.alias or name for name, field in Status.model_fields.items()) - {"conditions"}
# What a person waits for is written at once; the rest may lag a few seconds behind.
_SLOW_FIELDS = ("observed", "law", "bottleneck")
_MAX_CONDITION_MESSAGE = 4096


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a service is stalled: it stays as it is until a person changes something."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Seen:
    """What a status is made from. `lagging` names pods that do not run the limits in force although told twice."""

    service: Service
    tuner: Tuner
    deployment: Object | None
    pods: Sequence[Object]
    problem: Problem | None
    failure: str
    """Why the children could not be written this time, to be tried again; empty: they are as desired."""
    lagging: tuple[str, ...]
    feasibility: Feasibility
    now: str
    """Wall clock, RFC 3339."""


def build(seen: Seen) -> Object:
    """The status that should be stored."""
    service, tuner = seen.service, seen.tuner
    old = service.stored
    here = [pod for pod in seen.pods if not pod_words.is_leaving(pod)]
    # A stalled service is not on its way: whoever waits for it must learn that waiting is in vain.
    progress = _stalled(seen) or _reconciling(seen, here)
    conditions = [_ready(seen, here), progress, _feasible(seen), _tuning(seen)]
    body: Object = {
        "observedGeneration": service.generation,
        "replicas": len(here),
        "readyReplicas": sum(map(pod_words.is_ready, here)),
        "selector": selector_text(service.key.name),
        "endpoint": f"http://{service.key.name}.{service.key.namespace}.svc:{PORT}/v1",
        "conditions": merge_conditions(old, [item for item in conditions if item], service.generation, seen.now),
        "tuned": _tuned(tuner),
        "trial": _trial(tuner),
        "diagnosis": tuner.diagnosis,
        "decisions": tuner.decisions,
        **findings(tuner, old),
    }
    return {name: value for name, value in body.items() if value not in (None, [])}


def invalid(live: Object, message: str, now: str) -> Object:
    """The status of a service whose spec cannot be used: everything else stays as it was."""
    old = stored_status(live)
    conditions: list[Object] = [
        {"type": "Ready", "status": "False", "reason": "InvalidSpec", "message": message},
        {"type": "Stalled", "status": "True", "reason": "InvalidSpec", "message": message},
    ]
    generation = live["metadata"]["generation"]
    kept = {name: value for name, value in old.items() if name != "conditions"}
    return {
        **kept,
        "observedGeneration": generation,
        "conditions": merge_conditions(old, conditions, generation, now),
    }


def findings(tuner: Tuner, old: Object) -> Object:
    """`bottleneck`, `observed` and `law`. A tuner that has seen nothing yet (a restart) leaves what was told before."""
    result = tuner.result
    if tuner.failure:
        return {"bottleneck": Bottleneck.STALE.value} | ({"law": old["law"]} if "law" in old else {})
    if result is None or (result.observed is None and result.bottleneck is Bottleneck.STARTING and not tuner.overdue):
        kept = {name: old[name] for name in _SLOW_FIELDS if name in old}
        return {"bottleneck": Bottleneck.STARTING.value, **kept}
    found: Object = {"bottleneck": result.bottleneck.value}
    if result.observed is not None:
        found["observed"] = report.observed(result.observed)
    if result.law is not None:
        found["law"] = report.law(result.law)
    elif "law" in old:  # still the last one fitted
        found["law"] = old["law"]
    return found


def differs(old: Object, new: Object) -> bool:
    """Whether a stored status must be written: any field of ours, or any condition of ours, is not as it should be."""
    if any(old.get(name) != new.get(name) for name in _FIELDS):
        return True
    return _by_type(old) != _by_type(new)


def urgent(old: Object, new: Object) -> bool:
    """Whether the difference is more than a new reading of the instruments."""
    return differs(_without_readings(old), _without_readings(new))


def _without_readings(status: Object) -> Object:
    """What tuning waits for is told with numbers that move; that it waits, and why in one word, is no reading."""
    conditions = [
        {**item, "message": ""} if item.get("type") == "Tuning" else item for item in status.get("conditions") or []
    ]
    rest = {name: value for name, value in status.items() if name not in _SLOW_FIELDS}
    return {**rest, "conditions": conditions}


def body(live: Object, status: Object) -> Object:
    """The object to apply to the status subresource. The uid makes it an update of this very object."""
    metadata = live["metadata"]
    return {
        "apiVersion": SERVICES.api_version,
        "kind": SERVICES.name,
        "metadata": {"name": metadata["name"], "namespace": metadata["namespace"], "uid": metadata["uid"]},
        "status": status,
    }


def merge_conditions(old: Object, conditions: Sequence[Object], generation: int, now: str) -> list[Object]:
    """Conditions with a `lastTransitionTime` that moves only when `status` changes."""
    known = {item["type"]: item for item in old.get("conditions") or []}
    merged = []
    for item in conditions:
        before = known.get(item["type"], {})
        same = before.get("status") == item["status"] and before.get("lastTransitionTime")
        times = {"lastTransitionTime": before["lastTransitionTime"] if same else now, "observedGeneration": generation}
        merged.append({**item, "message": item["message"][:_MAX_CONDITION_MESSAGE], **times})
    return merged


def _by_type(status: Object) -> dict[str, Object]:
    conditions = status.get("conditions") or []
    return {item["type"]: item for item in conditions if item.get("type") in CONDITION_TYPES}


def _condition(kind: str, state: bool, reason: str, message: str) -> Object:
    return {"type": kind, "status": "True" if state else "False", "reason": reason, "message": message}


def _ready(seen: Seen, here: Sequence[Object]) -> Object:
    if seen.problem:
        return _condition("Ready", False, seen.problem.reason, seen.problem.message)
    for pod in here:
        failed = pod_words.trouble(pod)
        if failed and failed[0] != "Unschedulable":
            return _condition("Ready", False, *failed)
    wanted = seen.service.asked_replicas
    current, ready = _rollout(seen)
    if ready >= wanted and current:
        return _condition(
            "Ready", True, "ReplicasReady", f"{wanted} of {wanted} replicas that the spec asks for are ready"
        )
    reason, message = _why_waiting(seen, here)
    return _condition("Ready", False, reason, message)


def _reconciling(seen: Seen, here: Sequence[Object]) -> Object | None:
    current, ready = _rollout(seen)
    if current and ready == seen.tuner.in_force.replicas == len(here):
        return None
    return _condition("Reconciling", True, *_why_waiting(seen, here))


def _rollout(seen: Seen) -> tuple[bool, int]:
    """Whether the pods are those of the current generation of the spec, and how many of them are ready."""
    child = seen.deployment
    if child is None or seen.failure or not seen.tuner.written:
        return False, 0
    status = child.get("status") or {}
    updated, total = status.get("updatedReplicas", 0), status.get("replicas", 0)
    current = updated == total
    if status.get("observedGeneration", -1) < child["metadata"].get("generation", 0):
        # Its controller has not acted on our last write yet. A change of replicas alone leaves the pods as they were.
        current = _was_ready(seen.service)
    return current, min(status.get("readyReplicas", 0), updated)


def _was_ready(service: Service) -> bool:
    """Whether this very generation of the spec was told to be ready."""
    old = service.stored
    ready: Object = next((item for item in old.get("conditions") or [] if item["type"] == "Ready"), {})
    return (ready.get("status"), ready.get("observedGeneration")) == ("True", service.generation)


def _why_waiting(seen: Seen, here: Sequence[Object]) -> tuple[str, str]:
    if seen.failure:
        return "ApplyFailed", f"will be tried again: {seen.failure}"
    for pod in here:
        if found := pod_words.trouble(pod):
            return found
    if seen.deployment is not None and (found := pod_words.rollout_trouble(seen.deployment)):
        return found
    wanted, ready = seen.tuner.in_force.replicas, sum(map(pod_words.is_ready, here))
    if not _rollout(seen)[0] and ready:
        return "RollingOut", f"generation {seen.service.generation} is being rolled out; ready pods: {ready}"
    if len(here) > wanted:
        return "ScalingDown", f"{wanted} replicas are wanted, {len(here)} still run"
    return "Starting", f"{ready} of {wanted} replicas are ready"


def _stalled(seen: Seen) -> Object | None:
    if seen.problem:
        return _condition("Stalled", True, seen.problem.reason, seen.problem.message)
    found = pod_words.rollout_trouble(seen.deployment) if seen.deployment else None
    # Refused pods are tried again by Kubernetes itself; no progress for a quarter of an hour is not.
    return _condition("Stalled", True, *found) if found and found[0] != "ReplicaFailure" else None


def _feasible(seen: Seen) -> Object:
    found, tuner = seen.feasibility, seen.tuner
    if found.possible is None and tuner.reported is None and not tuner.overdue:
        # An operator that has just started waits for what the one before it had heard from the same pods.
        for old in seen.service.stored.get("conditions") or []:
            known = old["type"] == "Feasible" and old["status"] != "Unknown"
            if known and old.get("observedGeneration") == seen.service.generation:
                return {name: old[name] for name in ("type", "status", "reason", "message")}
    status = {True: "True", False: "False", None: "Unknown"}[found.possible]
    return {"type": "Feasible", "status": status, "reason": found.reason, "message": found.message}


def _tuning(seen: Seen) -> Object:
    old = {item["type"]: item for item in seen.service.stored.get("conditions") or []}
    result, mode = seen.tuner.result, seen.service.mode
    if mode is Mode.OFF:
        return _condition("Tuning", False, "Off", "spec.tuning.mode is Off: the service is observed and left as it is")
    if seen.tuner.failure:
        message = f"the operator cannot judge what it observes, so nothing is changed: {seen.tuner.failure}"
        return _condition("Tuning", False, "ObservationFailed", message)
    if seen.lagging:
        return _condition("Tuning", False, "LimitsNotApplied", "; ".join(seen.lagging))
    if result is None or (result.bottleneck is Bottleneck.STARTING and not seen.tuner.overdue):
        message = "waits for the first observations of a ready pod"
        return old.get("Tuning") or _condition("Tuning", False, "NoObservations", message)
    if result.disarmed is not None:
        return _condition("Tuning", False, DISARMED, result.disarmed)
    if mode is Mode.RECOMMEND:
        message = "spec.tuning.mode is Recommend: changes are only reported"
        return _condition("Tuning", True, "Recommending", result.hold or message)
    if result.hold is not None:
        return _condition("Tuning", False, "Holding", result.hold)
    return _condition("Tuning", True, "Observing", "settings follow the observed batch and queue")


def _trial(tuner: Tuner) -> Object | None:
    trial = tuner.in_force.trial
    if trial is None:
        return None
    pending = [entry["id"] for entry in tuner.decisions if (entry.get("outcome") or {}).get("verdict") == "Pending"]
    return {"pod": trial.pod, "decision": max(pending)} if pending else {"pod": trial.pod}


def _tuned(tuner: Tuner) -> Object:
    in_force = tuner.in_force
    return {"generation": in_force.generation, **in_force.limits.to_json(), "replicas": in_force.replicas}
