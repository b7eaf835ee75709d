import copy
import itertools
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from control_helpers import pod, service
from hypothesis import given
from hypothesis import strategies as st

from busload_operator.api.v1alpha1 import InferenceService
from busload_operator.control import report, status
from busload_operator.control.events import transitions
from busload_operator.control.service import InvalidSpecError, read_service
from busload_operator.control.status import Problem, Seen
from busload_operator.control.tuner import Tuner
from busload_operator.tuning.feasible import Feasibility
from busload_operator.tuning.types import (
    Bottleneck,
    Decision,
    Knob,
    Law,
    Observed,
    Outcome,
    Prediction,
    Reason,
    Result,
    Verdict,
)

CLOCK = itertools.count()


def live(old: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    obj = service(**spec)
    obj["metadata"] |= {"uid": "u1", "generation": 3, "resourceVersion": "7"}
    return obj | ({"status": old} if old else {})


def deployment(replicas: int = 1, ready: int = 1, **changes: Any) -> dict[str, Any]:
    state = {"observedGeneration": 5, "replicas": replicas, "updatedReplicas": replicas, "readyReplicas": ready}
    owner = {"kind": "InferenceService", "name": "chat", "uid": "u1", "controller": True}
    return {
        "metadata": {"generation": 5, "ownerReferences": [owner]},
        "spec": {"replicas": replicas},
        "status": {**state, **changes},
    }


def seen(obj: dict[str, Any], pods: list[dict[str, Any]], child: dict[str, Any] | None, **changes: Any) -> Seen:
    read = read_service(obj)
    tuner = changes.pop("tuner", None)
    if tuner is None:
        tuner = Tuner.recover(read, None, child)
        tuner.in_force = replace(tuner.in_force, generation=1)
        tuner.conform(read)
    tuner.written = True
    values: dict[str, Any] = {"problem": None, "failure": "", "lagging": (), "now": f"t{next(CLOCK)}", **changes}
    values.setdefault("feasibility", Feasibility(True, "PlanFits", "one request fits"))
    return Seen(service=read, tuner=tuner, deployment=child, pods=pods, **values)


def by_type(built: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {item["type"]: item for item in built["conditions"]}


def container(**state: Any) -> dict[str, Any]:
    return {"containerStatuses": [{"name": "runtime", "image": "example.org/r:1", "ready": False, **state}]}


OBSERVED = Observed(3.94, 4, 27.6, 8.21, False, 6.2, 61.04, 7.9, 0.0642, 0, 1, ())
LAW = Law(0.021, 0.0042, 1.23e-7, 0.00031, 0.0613, 84, 1.0, 4.0, True)


def result(**changes: Any) -> Result:
    read = read_service(live())
    in_force = Tuner.recover(read, None, None).in_force
    values: dict[str, Any] = {
        "observed": OBSERVED, "bottleneck": Bottleneck.SLOT_BOUND, "evidence": "", "law": LAW, "decision": None,
        "closed": (), "limits": in_force.limits, "replicas": 1, "hold": None, **changes,
    }  # fmt: skip
    return Result(**values)


def decision(**changes: Any) -> Decision:
    values: dict[str, Any] = {
        "id": 4, "at": 1.0, "knob": Knob.BATCH_SIZE, "before": 4, "after": 8, "reason": Reason.WAIT_FROM_BATCH_LIMIT,
        "message": "m" * 3000, "inputs": (("batch", "3.9"),), "prediction": Prediction(102.3, 3.91, None, "law"),
        "outcome": Outcome(Verdict.PENDING, 61.0, span_before=(0.5, 6.25)), "applied": True, **changes,
    }  # fmt: skip
    return Decision(**values)


def wall(at: float) -> datetime:
    return datetime.fromtimestamp(1_800_000_000 + at, UTC)


def test_a_settled_service_is_ready_and_nothing_else() -> None:
    built = status.build(seen(live(), [pod("a")], deployment()))
    assert by_type(built).keys() == {"Ready", "Feasible", "Tuning"}
    assert by_type(built)["Ready"]["status"] == "True"
    assert built["observedGeneration"] == 3
    assert (built["replicas"], built["readyReplicas"]) == (1, 1)


def test_the_same_sight_again_is_no_write_whatever_the_time() -> None:
    first = status.build(seen(live(), [pod("a")], deployment()))
    again = status.build(seen(live(first), [pod("a")], deployment()))
    assert not status.differs(first, again)


def test_transition_times_move_with_the_status_only() -> None:
    first = status.build(seen(live(), [pod("a")], deployment()))
    down = status.build(seen(live(first), [pod("a", ready=False)], deployment(ready=0)))
    still = status.build(
        seen(live(down), [pod("a", False, **container(state={"terminated": {"exitCode": 1}}))], deployment(ready=0))
    )
    assert by_type(down)["Ready"]["lastTransitionTime"] != by_type(first)["Ready"]["lastTransitionTime"]
    assert by_type(still)["Ready"]["lastTransitionTime"] == by_type(down)["Ready"]["lastTransitionTime"]
    assert by_type(still)["Ready"]["reason"] == "ContainerExited"


OOM = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
NO_MODEL = {"terminated": {"exitCode": 2, "message": "loading\nno such model: x\n"}}
NO_NODE = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes: cpu"}
NO_QUOTA = {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota"}


def waiting(reason: str, message: str = "", **more: Any) -> dict[str, Any]:
    return container(state={"waiting": {"reason": reason, "message": message}}, **more)


def restarted(times: int, last: dict[str, Any]) -> dict[str, Any]:
    return container(state={"running": {}}, restartCount=times, lastState=last)


@pytest.mark.parametrize(
    ("pods", "child", "reason", "text"),
    [
        ([], None, "Starting", "0 of 1 replicas are ready"),
        ([pod("a", False)], deployment(ready=0), "Starting", "0 of 1"),
        (
            [pod("a"), pod("b", False)],
            deployment(2, 1, updatedReplicas=1),
            "RollingOut",
            "generation 3 is being rolled",
        ),
        ([pod("a")], deployment(observedGeneration=4), "RollingOut", "generation 3"),
        (
            [pod("a", False, **waiting("CrashLoopBackOff", lastState=OOM))],
            deployment(ready=0),
            "CrashLoopBackOff",
            "pod a: the container ends again and again, last with exit code 137 (OOMKilled)",
        ),
        (
            [pod("a", False, **restarted(1, NO_MODEL))],
            deployment(ready=0),
            "ContainerExited",
            "exit code 2: no such model: x; it is being restarted",
        ),
        (
            [pod("a", False, **waiting("ErrImagePull", "refused"))],
            deployment(ready=0),
            "ImagePullBackOff",
            "image example.org/r:1 cannot be pulled: refused",
        ),
        (
            [pod("a", False, phase="Pending", conditions=[NO_NODE])],
            deployment(ready=0),
            "Unschedulable",
            "pod a fits no node: 0/1 nodes: cpu",
        ),
        (
            [],
            deployment(0, 0, conditions=[NO_QUOTA]),
            "ReplicaFailure",
            "pods cannot be created: exceeded quota",
        ),
    ],
)
def test_not_ready_says_why(pods: list[Any], child: Any, reason: str, text: str) -> None:
    built = status.build(seen(live(), pods, child))
    ready = by_type(built)["Ready"]
    assert (ready["status"], ready["reason"]) == ("False", reason)
    assert text in ready["message"]
    assert by_type(built)["Reconciling"]["reason"] == reason


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (
            waiting("ErrImagePull", "refused"),
            waiting("ImagePullBackOff", 'Back-off pulling image "x": ErrImagePull: refused'),
        ),
        (waiting("CrashLoopBackOff", restartCount=3, lastState=OOM), restarted(4, OOM)),
    ],
)
def test_states_that_take_turns_are_told_once(one: Any, other: Any) -> None:
    first = status.build(seen(live(), [pod("a", False, **one)], deployment(ready=0)))
    turn = status.build(seen(live(first), [pod("a", False, **other)], deployment(ready=0)))
    assert not status.differs(first, turn)


def test_a_replica_that_the_tuner_adds_does_not_make_a_serving_service_unready() -> None:
    built = status.build(seen(live(), [pod("a"), pod("b", False)], deployment(2, 1)))
    assert by_type(built)["Ready"]["status"] == "True"
    assert by_type(built)["Reconciling"]["message"] == "1 of 2 replicas are ready"


def test_replicas_that_the_spec_asks_for_must_be_ready() -> None:
    bounds = {"replicas": {"min": 2, "max": 4}}
    built = status.build(seen(live(bounds=bounds), [pod("a"), pod("b", False)], deployment(2, 1)))
    assert by_type(built)["Ready"]["status"] == "False"
    external = {"scaling": {"mode": "External"}, "replicas": 2}
    built = status.build(seen(live(**external), [pod("a"), pod("b")], deployment(2, 2)))
    assert by_type(built)["Ready"]["message"] == "2 of 2 replicas that the spec asks for are ready"


def test_pods_that_leave_do_not_count() -> None:
    leaving = pod("b")
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    evicted = pod("c", phase="Failed")
    built = status.build(seen(live(), [pod("a"), leaving, evicted], deployment()))
    assert built["replicas"] == 1
    assert "Reconciling" not in by_type(built)


def test_what_only_a_person_can_solve_is_stalled() -> None:
    built = status.build(seen(live(), [], None, problem=Problem("ForeignObject", "Service demo/chat exists already")))
    conditions = by_type(built)
    assert (conditions["Stalled"]["status"], conditions["Stalled"]["reason"]) == ("True", "ForeignObject")
    assert conditions["Ready"]["status"] == "False"
    assert "Reconciling" not in conditions
    late = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded", "message": "m"}
    built = status.build(seen(live(), [pod("a", False)], deployment(ready=0, conditions=[late])))
    assert by_type(built)["Stalled"]["reason"] == "ProgressDeadlineExceeded"


def test_an_invalid_spec_keeps_the_rest_of_the_status() -> None:
    first = status.build(seen(live(), [pod("a")], deployment()))
    bad = live(first, bounds={"replicas": {"min": 5, "max": 2}})
    with pytest.raises(InvalidSpecError, match=r"spec.bounds.replicas.min: min 5 is above max 2") as error:
        read_service(bad)
    built = status.invalid(bad, str(error.value), "now")
    assert by_type(built)["Stalled"]["reason"] == "InvalidSpec"
    assert by_type(built)["Ready"]["status"] == "False"
    assert built["tuned"] == first["tuned"]


def test_findings_are_coarse_and_readable() -> None:
    tuner = Tuner.recover(read_service(live()), None, None)
    tuner.result = result()
    built = status.build(seen(live(), [pod("a")], deployment(), tuner=tuner))
    assert built["bottleneck"] == "SlotBound"
    assert built["observed"]["summary"] == {"batch": "3.9/4", "kv": "6%", "wait": "8.2s"}
    assert built["observed"]["interTokenLatency"] == "64ms"
    assert built["law"]["c"] == "0.00000012"
    first = built
    tuner.result = result(observed=OBSERVED.__class__(3.92, 4, 27.9, 8.24, False, 5.8, 61.4, 7.93, 0.0639, 0, 1, ()))
    again = status.build(seen(live(first), [pod("a")], deployment(), tuner=tuner))
    assert not status.differs(first, again)


def test_readings_may_wait_and_conditions_may_not() -> None:
    first = status.build(seen(live(), [pod("a")], deployment()))
    busy = copy.deepcopy(first)
    busy["observed"] = {"batch": "9"}
    assert status.differs(first, busy)
    assert not status.urgent(first, busy)
    ticking = copy.deepcopy(first)
    by_type(ticking)["Tuning"]["message"] = "27.1 requests wait"
    assert status.differs(first, ticking)
    assert not status.urgent(first, ticking)
    down = status.build(seen(live(first), [pod("a", False)], deployment(ready=0)))
    assert status.urgent(first, down)


def test_conditions_and_fields_of_others_are_not_ours_to_compare() -> None:
    first = status.build(seen(live(), [pod("a")], deployment()))
    stored = copy.deepcopy(first)
    stored["conditions"].append({"type": "Audited", "status": "True"})
    stored["someones"] = 1
    assert not status.differs(stored, first)


def test_a_restarted_operator_leaves_what_was_told_until_it_has_seen_for_itself() -> None:
    tuner = Tuner.recover(read_service(live()), None, None)
    tuner.result = result(decision=None)
    told = status.build(seen(live(), [pod("a")], deployment(), tuner=tuner))
    obj = live(told)
    fresh = Tuner.recover(read_service(obj), None, deployment())
    fresh.in_force = tuner.in_force
    assert not status.differs(told, status.build(seen(obj, [pod("a")], deployment(), tuner=fresh)))
    fresh.result = result(observed=None, bottleneck=Bottleneck.STARTING, law=None, hold="no window yet")
    assert not status.differs(told, status.build(seen(obj, [pod("a")], deployment(), tuner=fresh)))
    fresh.result = result(observed=None, bottleneck=Bottleneck.STALE, law=None, hold="pod a: no answer")
    built = status.build(seen(obj, [pod("a")], deployment(), tuner=fresh))
    assert built["bottleneck"] == "Stale"
    assert "observed" not in built  # no data: nothing claimed
    assert by_type(built)["Tuning"] | {"lastTransitionTime": ""} == {
        "type": "Tuning", "status": "False", "reason": "Holding", "message": "pod a: no answer",
        "lastTransitionTime": "", "observedGeneration": 3,
    }  # fmt: skip


def test_every_status_is_one_the_api_accepts() -> None:
    tuner = Tuner.recover(read_service(live()), None, None)
    tuner.result = result(decision=decision())
    tuner.decisions = [report.decision(decision(id=n), wall) for n in range(1, 14)]
    tuner.decisions = report.newest(tuner.decisions)
    built = status.build(seen(live(), [pod("a")], deployment(), tuner=tuner, now="2026-01-01T00:00:00Z"))
    stored = InferenceService.model_validate(live(built)).status
    dumped = stored.model_dump(by_alias=True, exclude_none=True)
    assert [entry["id"] for entry in dumped["decisions"]] == list(range(13, 3, -1))
    assert (dumped["decisions"][0]["from"], dumped["decisions"][0]["time"]) == ("4", "2027-01-15T08:00:01Z")
    assert dumped["decisions"][0]["outcome"]["beforeWindow"]["to"] == "2027-01-15T08:00:06.250Z"
    for name in built:
        assert name in dumped, f"the API drops {name}"
    assert set(built["observed"]) == set(dumped["observed"])
    assert set(built["law"]) == set(dumped["law"])
    assert set(built["tuned"]) == set(dumped["tuned"])
    assert set(built["decisions"][0]["outcome"]) <= set(dumped["decisions"][0]["outcome"])
    assert set(built["decisions"][0]["prediction"]) <= set(dumped["decisions"][0]["prediction"])


def test_events_tell_transitions_once() -> None:
    starting = status.build(seen(live(), [pod("a", False)], deployment(ready=0)))
    ready = status.build(seen(live(starting), [pod("a")], deployment()))
    assert transitions({}, starting) == []  # starting is no news
    assert [found[:2] for found in transitions(starting, ready)] == [("Normal", "ReplicasReady")]
    assert transitions(ready, ready) == []
    crash = pod("a", False, **container(state={"waiting": {"reason": "CrashLoopBackOff"}}))
    down = status.build(seen(live(ready), [crash], deployment(ready=0)))
    assert [found[:2] for found in transitions(ready, down)] == [("Warning", "CrashLoopBackOff")]
    stalled = status.build(seen(live(ready), [], None, problem=Problem("ForeignObject", "m")))
    assert transitions(ready, stalled) == [("Warning", "ForeignObject", "m")]
    decided = {**ready, "decisions": [report.decision(decision(), wall)]}
    assert [found[:2] for found in transitions(ready, decided)] == [("Normal", "WaitFromBatchLimit")]


ANY = st.floats()


@given(ANY, ANY, ANY, ANY, st.integers(0, 10_000), ANY)
def test_no_number_of_the_core_breaks_the_report(
    a: float, b: float, wait: float, rate: float, samples: int, at: float
) -> None:
    law = report.law(Law(a, b, a, b, b, samples, a, b, False))
    observed = report.observed(
        replace(OBSERVED, batch=a, queue_depth=b, wait=wait, kv_cache_percent=at, tokens_per_second=rate)
    )
    for value in (*law.values(), *observed.values(), *observed["summary"].values()):
        assert isinstance(value, int | dict) or len(value) <= 512
    assert abs(law["samples"] - samples) <= 0.051 * samples


@given(st.floats(1e-9, 1e9))
def test_numbers_keep_two_digits(value: float) -> None:
    text = report.number(value)
    assert "e" not in text
    assert abs(float(text) - value) <= 0.051 * value
    assert report.number(float(text)) == text  # rounding again changes nothing


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (0.00004, "1ms"), (0.0642, "64ms"), (0.9996, "1.0s"), (8.24, "8.2s"), (95.2, "95s"), (754, "750s")],
)
def test_durations(seconds: float, text: str) -> None:
    assert report.duration(seconds) == text
