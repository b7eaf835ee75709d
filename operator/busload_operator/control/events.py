"""Kubernetes Events for what a person may want to know later: Normal or Warning, on transitions only.

The name of an event comes from its content, so that a repetition bumps a count instead of making a new object.
"""

import hashlib
import logging
from collections import OrderedDict
from datetime import UTC, datetime
from typing import Literal

from busload_operator.control.client import ApiError, Client
from busload_operator.control.kinds import EVENTS, Object
from busload_operator.control.logs import about

log = logging.getLogger(__name__)
_COMPONENT = "busload-operator"
_REMEMBERED = 2000
DISARMED = "Disarmed"
"""Reason of the condition Tuning while the step law is wrong."""


class Recorder:
    """Writes events. A failure to write one is logged and changes nothing else."""

    def __init__(self, client: Client, identity: str):
        self._client, self._identity = client, identity
        self._known: OrderedDict[str, tuple[int, str]] = OrderedDict()  # name -> (count, first time)

    async def emit(self, regarding: Object, kind: Literal["Normal", "Warning"], reason: str, message: str) -> None:
        metadata = regarding["metadata"]
        content = "\n".join((metadata["uid"], kind, reason, message))
        name = f"{metadata['name']}.{hashlib.sha256(content.encode()).hexdigest()[:16]}"
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        count, first = self._known.pop(name, (0, now))
        self._known[name] = (count + 1, first)
        while len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        body = {
            "apiVersion": EVENTS.api_version,
            "kind": EVENTS.name,
            "metadata": {"name": name, "namespace": metadata["namespace"]},
            "involvedObject": {
                "apiVersion": regarding["apiVersion"],
                "kind": regarding["kind"],
                "name": metadata["name"],
                "namespace": metadata["namespace"],
                "uid": metadata["uid"],
            },
            "type": kind,
            "reason": reason,
            "message": message[:1024],
            "count": count + 1,
            "firstTimestamp": first,
            "lastTimestamp": now,
            "source": {"component": _COMPONENT},
            "reportingComponent": _COMPONENT,
            "reportingInstance": self._identity[:128],
        }
        try:
            await self._client.apply(EVENTS, body, _COMPONENT)
        except ApiError as error:
            log.warning("event %s not written: %s", reason, error, extra=about(metadata["namespace"], metadata["name"]))


Event = tuple[Literal["Normal", "Warning"], str, str]


def transitions(old: Object, new: Object) -> list[Event]:
    """(type, reason, message) of what changed from one status to the next: conditions that flipped, the bottleneck,
    new decisions, and what became of those on trial."""
    found: list[Event] = []
    before = {item["type"]: item for item in old.get("conditions") or []}
    for item in new.get("conditions") or []:
        if item["type"] not in ("Ready", "Stalled", "Feasible"):
            continue
        known = before.get(item["type"], {})
        if item["type"] == "Feasible" and "False" not in (item["status"], known.get("status")):
            continue  # that it is possible, or not known yet, is no news
        if (known.get("status"), known.get("reason")) == (item["status"], item["reason"]):
            continue
        good = item["type"] in ("Ready", "Feasible") and item["status"] != "False"
        expected = item["type"] == "Ready" and item["reason"] in ("Starting", "RollingOut", "ScalingDown")
        told_by_stalled = item["type"] == "Ready" and _stalled(new)
        if not expected and not told_by_stalled:
            found.append(("Normal" if good else "Warning", item["reason"], item["message"]))
    found += _armed(before.get("Tuning", {}), {item["type"]: item for item in new.get("conditions") or []})
    limit = new.get("diagnosis") or {}
    if limit and limit["bottleneck"] != (old.get("diagnosis") or {}).get("bottleneck"):
        found.append(
            ("Warning" if limit["bottleneck"] == "Stale" else "Normal", limit["bottleneck"], limit["evidence"])
        )
    return found + _decided(old, new)


def _armed(before: Object, conditions: Object) -> list[Event]:
    """Whether the step law has become unusable, or is used again."""
    now = conditions.get("Tuning", {})
    was, is_ = before.get("reason") == DISARMED, now.get("reason") == DISARMED
    if is_ and not was:
        return [("Warning", DISARMED, now["message"])]
    if was and now.get("reason") in ("Observing", "Holding", "Recommending"):
        return [("Normal", "Rearmed", "The step law fits again, or is being learned anew; the tuner acts again.")]
    return []


def _decided(old: Object, new: Object) -> list[Event]:
    """New decisions, those that passed their trial in one pod, and those that were put back."""
    found: list[Event] = []
    known = {entry["id"]: _verdict(entry) for entry in old.get("decisions") or []}
    tried = (old.get("trial") or {}).get("decision") if not new.get("trial") else None
    for entry in reversed(new.get("decisions") or []):
        verdict, what = _verdict(entry), f"{entry['knob']} {entry['from']} -> {entry['to']}"
        if entry["id"] not in known:
            found.append(("Normal", entry["reason"], entry["message"]))
        elif known[entry["id"]] != verdict == "RolledBack":
            found.append(("Warning", verdict, f"{what}: {entry['outcome'].get('message', '')}"))
        elif entry["id"] == tried and verdict == "Pending":
            pod = old["trial"]["pod"]
            found.append(("Normal", "TrialPassed", f"{what} did no worse on pod {pod} alone: all pods get it."))
    return found


def _verdict(entry: Object) -> str:
    return str((entry.get("outcome") or {}).get("verdict", ""))


def _stalled(status: Object) -> bool:
    return any(item["type"] == "Stalled" for item in status.get("conditions") or [])
