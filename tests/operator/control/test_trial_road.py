"""A change that one pod tries first, on its way: document, status, events, and what a restart makes of it."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from control_helpers import condition, until
from fake_api import FakeApi
from test_control_status import OBSERVED, decision, deployment, live, result, seen
from test_tuning_road import Runtime, Script, document, idle, runtime, script, start, status_of

from busload_operator.control import status
from busload_operator.control import tuner as tuners
from busload_operator.control.events import transitions
from busload_operator.control.service import Service, read_service
from busload_operator.control.tuner import Tuner
from busload_operator.resources.initial_limits import longest_sequence
from busload_operator.tuning.learned import Learned
from busload_operator.tuning.state import State
from busload_operator.tuning.step import merge_patch
from busload_operator.tuning.types import Bottleneck, Inputs, Knob, Outcome, Reason, Result, Trial, Verdict
from busload_runtime.contract import parse_limits

__all__ = ["runtime", "script"]  # fixtures

Running = Callable[..., Any]
KV = {"knob": Knob.KV_CACHE_PERCENT, "before": 90, "after": 70, "reason": Reason.WAIT_FROM_KV_CACHE}


def tries_70(inputs: Inputs) -> Result:
    """chat-0 alone gets 70%."""
    trial = Trial("chat-0", replace(inputs.limits, kv_cache_percent=70))
    made = decision(id=1, message="first there", **KV) if inputs.trial is None else None
    return replace(idle(inputs), trial=trial, decision=made)


def passes(inputs: Inputs) -> Result:
    """All get it."""
    return replace(idle(inputs), limits=replace(inputs.limits, kv_cache_percent=70))


def ends_worse(inputs: Inputs) -> Result:
    outcome = Outcome(Verdict.ROLLED_BACK, message="-30% on chat-0 against the other pods; it was put back there.")
    closed = (decision(id=1, outcome=outcome, **KV),) if inputs.trial is not None else ()
    return replace(idle(inputs), closed=closed)


def reasons(api: FakeApi) -> list[str]:
    return [obj["reason"] for (plural, _, _), obj in api.objects.items() if plural == "events"]


async def test_one_pod_gets_it_then_all(api: FakeApi, running: Running, runtime: Runtime, script: Script) -> None:
    async with running(port=runtime.port):
        await start(api, script)
        script.answer = tries_70
        await until(lambda: document(api)["generation"] == 2)
        assert document(api)["trial"]["pod"] == "chat-0"
        assert document(api)["trial"]["limits"]["kvCachePercent"] == 70
        assert document(api)["default"]["kvCachePercent"] == 90
        await until(lambda: status_of(api).get("trial"))
        assert status_of(api)["trial"] == {"pod": "chat-0", "decision": 1}
        assert status_of(api)["tuned"]["kvCachePercent"] == 90
        runtime.generation = 2
        await until(lambda: script.seen[-1].trial is not None)
        script.answer = passes
        await until(lambda: document(api)["generation"] == 3)
        assert "trial" not in document(api)
        assert document(api)["default"]["kvCachePercent"] == 70
        await until(lambda: "trial" not in status_of(api))
        await until(lambda: "TrialPassed" in reasons(api))
    assert reasons(api).count("WaitFromKVCache") == 1


async def test_one_pod_gives_it_back(api: FakeApi, running: Running, runtime: Runtime, script: Script) -> None:
    async with running(port=runtime.port):
        await start(api, script)
        script.answer = tries_70
        await until(lambda: document(api).get("trial"))
        await until(lambda: status_of(api).get("trial"))
        script.answer = ends_worse
        await until(lambda: "trial" not in document(api))
        assert document(api)["default"]["kvCachePercent"] == 90
        assert document(api)["generation"] == 3
        await until(lambda: status_of(api)["decisions"][0]["outcome"]["verdict"] == "RolledBack")
        await until(lambda: "RolledBack" in reasons(api))
    assert "TrialPassed" not in reasons(api)


async def test_a_restart_ends_a_trial(api: FakeApi, running: Running, runtime: Runtime, script: Script) -> None:
    async with running(port=runtime.port):
        await start(api, script)
        script.answer = tries_70
        await until(lambda: document(api).get("trial"))
        await until(lambda: status_of(api).get("trial"))
    script.answer = idle
    async with running(port=runtime.port):
        await until(lambda: "trial" not in document(api))
        assert document(api)["generation"] == 3, "a pod that runs the old one is known by it"
        await until(lambda: "trial" not in status_of(api))
        assert status_of(api)["decisions"][0]["outcome"]["verdict"] == "Inconclusive"


async def test_a_bottleneck_that_lasts_is_told_once(
    api: FakeApi, running: Running, runtime: Runtime, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuners, "_DIAGNOSIS_SECONDS", 0.5)
    turn = iter(range(10_000))

    def slot_bound(inputs: Inputs) -> Result:
        text = f"28.0 requests wait (8.0s), 3.9 of 4 places are taken ({next(turn)})."
        return replace(idle(inputs), bottleneck=Bottleneck.SLOT_BOUND, evidence=text)

    def restless(inputs: Inputs) -> Result:
        names = (Bottleneck.IDLE, Bottleneck.UNDER_BATCHED)
        return replace(idle(inputs), bottleneck=names[next(turn) % 2], evidence="to and fro")

    async with running(port=runtime.port):
        await start(api, script)
        script.answer = slot_bound
        await until(lambda: (status_of(api).get("diagnosis") or {}).get("bottleneck") == "SlotBound")
        assert status_of(api)["diagnosis"]["evidence"].startswith("28.0 requests wait (8.0s), 3.9 of 4 places")
        at = len(script.seen)
        await until(lambda: len(script.seen) > at + 8)
        script.answer = restless
        at = len(script.seen)
        await until(lambda: len(script.seen) > at + 8)
        assert status_of(api)["diagnosis"]["bottleneck"] == "SlotBound", "what does not last is not told"
    assert reasons(api).count("SlotBound") == 1
    script.answer = slot_bound
    async with running(port=runtime.port):
        at = len(script.seen)
        await until(lambda: len(script.seen) > at + 8)
    assert reasons(api).count("SlotBound") == 1, "a new process does not tell it again"


async def test_a_wrong_law_is_a_condition_and_an_event(
    api: FakeApi, running: Running, runtime: Runtime, script: Script
) -> None:
    text = "The step law misses step times by 40% (15% are allowed)."
    async with running(port=runtime.port):
        await start(api, script)
        script.answer = lambda i: replace(idle(i), disarmed=text, hold=text)
        await until(lambda: condition(api, "Tuning").get("reason") == "Disarmed")
        assert condition(api, "Tuning")["message"] == text
        assert condition(api, "Tuning")["status"] == "False"
        await until(lambda: "Disarmed" in reasons(api))
        script.answer = idle
        await until(lambda: condition(api, "Tuning").get("reason") == "Observing")
        await until(lambda: "Rearmed" in reasons(api))


def read(**spec: Any) -> Service:
    return read_service(live(**spec))


def observed(tuner: Tuner, service: Service, monkeypatch: pytest.MonkeyPatch, limits: Any) -> None:
    found = replace(result(), limits=limits)
    monkeypatch.setattr(tuners, "step", lambda state, inputs: (State.initial(), found))
    tuner.written = True
    tuner.observe(service, (), 1.0)


def test_a_lowered_length_outlives_edits_and_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = {"maxSequenceLength": {"min": 1024, "max": 8192}}
    service = read(bounds=bounds)
    tuner = Tuner.recover(service, None, None)
    tuner.conform(service)
    longest = tuner.in_force.limits.max_sequence_length
    assert longest > 1024
    observed(tuner, service, monkeypatch, replace(tuner.in_force.limits, max_sequence_length=1024))
    tuner.conform(service)
    assert tuner.in_force.limits.max_sequence_length == 1024
    assert tuner.remembered.learned.max_sequence_length == 1024
    tuner.conform(read(bounds={"maxSequenceLength": {"min": 2048, "max": 8192}}))
    assert tuner.in_force.limits.max_sequence_length == 2048, "the floor is the user's"
    tuner.conform(service)
    again = Tuner.recover(service, None, None)
    again.remembered.memory = tuner.remembered.memory
    again.conform(service)
    assert again.in_force.limits.max_sequence_length == 1024
    observed(again, service, monkeypatch, replace(again.in_force.limits, max_sequence_length=longest))
    again.conform(service)
    assert again.remembered.learned == Learned()
    assert again.in_force.limits.max_sequence_length == longest


def test_a_service_starts_with_the_initial_length_and_is_raised_from_there(monkeypatch: pytest.MonkeyPatch) -> None:
    service = read(bounds={"maxSequenceLength": {"initial": 1024, "min": 512, "max": 8192}})
    tuner = Tuner.recover(service, None, None)
    tuner.conform(service)
    assert tuner.in_force.limits.max_sequence_length == 1024
    for length in (2048, service.bounds.max_sequence_length.max):
        observed(tuner, service, monkeypatch, replace(tuner.in_force.limits, max_sequence_length=length))
        tuner.conform(service)
        assert tuner.in_force.limits.max_sequence_length == length


def test_a_smaller_kv_cache_is_not_refused_for_a_sequence_it_cannot_hold() -> None:
    """A pod with little memory, whose cache was stepped down after a kill: the pod would refuse the limits."""
    service = read(
        resources={"requests": {"cpu": "2", "memory": "450Mi"}, "limits": {"memory": "450Mi"}},
        bounds={"batchSize": {"max": 4}, "maxSequenceLength": {"min": 64, "max": 8192}},
    )
    tuner = Tuner.recover(service, None, None)
    tuner.conform(service)
    lengths = []
    for percent in (90, 50, 30, 90):
        limits = replace(tuner.in_force.limits, kv_cache_percent=percent)
        tuner.in_force = replace(tuner.in_force, limits=limits)
        tuner.conform(service)
        lengths.append(tuner.in_force.limits.max_sequence_length)
        assert lengths[-1] == min(8192, longest_sequence(service.parsed.spec, percent))
    assert lengths[0] > lengths[1] > lengths[2] > 64
    assert lengths[3] == lengths[0], "and it comes back with the cache"


def test_an_edit_of_the_limits_ends_a_trial() -> None:
    service = read()
    tuner = Tuner.recover(service, None, None)
    tuner.conform(service)
    in_force = tuner.in_force
    trial = Trial("chat-0", replace(in_force.limits, kv_cache_percent=70))
    tuner.in_force = replace(in_force, trial=trial)
    tuner.conform(service)
    assert tuner.in_force == replace(in_force, trial=trial), "nothing was edited"
    assert parse_limits(tuner.document(service).to_json()).for_pod("chat-0").kv_cache_percent == 70
    tuner.conform(read(bounds={"kvCachePercent": {"min": 20, "max": 80}}))
    assert tuner.in_force.trial is None
    assert tuner.in_force.generation == in_force.generation + 1


def test_events_of_outcomes() -> None:
    def told(verdict: Verdict, trial: bool) -> dict[str, Any]:
        tuner = seen(live(), [], deployment()).tuner
        tuner.result = replace(result(), observed=OBSERVED)
        made = decision(id=1, outcome=Outcome(verdict, message="because"), **KV)
        tuner.decisions = [tuners.report.decision(made, tuner._wall)]
        if trial:
            tuner.in_force = replace(tuner.in_force, trial=Trial("chat-0", tuner.in_force.limits))
        return status.build(seen(live(), [], deployment(), tuner=tuner))

    trying, passed = told(Verdict.PENDING, True), told(Verdict.PENDING, False)
    assert [event[1] for event in transitions(trying, passed)] == ["TrialPassed"]
    assert transitions(passed, told(Verdict.CONFIRMED, False)) == []
    assert transitions(passed, told(Verdict.ROLLED_BACK, False)) == [
        ("Warning", "RolledBack", "kvCachePercent 90 -> 70: because")
    ]
    assert [event[1] for event in transitions(trying, told(Verdict.ROLLED_BACK, False))] == ["RolledBack"]
    assert transitions(trying, told(Verdict.INCONCLUSIVE, False)) == []


@pytest.mark.parametrize(
    ("knob", "before", "after", "field"),
    [
        (Knob.BATCH_SIZE, 4, 8, "batch_size"),
        (Knob.BATCH_SIZE, 32, 12, "batch_size"),
        (Knob.KV_CACHE_PERCENT, 50, 70, "kv_cache_percent"),
        (Knob.MAX_SEQUENCE_LENGTH, 4096, 2048, "max_sequence_length"),
        (Knob.MAX_SEQUENCE_LENGTH, 4096, 8192, "max_sequence_length"),
        (Knob.REPLICAS, 1, 3, "replicas"),
    ],
)
def test_the_patch_of_a_recommendation_makes_a_valid_spec_that_moves_it(
    knob: Knob, before: int, after: int, field: str
) -> None:
    """As somebody would merge it into the spec that it was recommended for, whose `initial` is the value before."""
    name = knob.value
    wide = {"batchSize": (1, 64), "kvCachePercent": (20, 90), "maxSequenceLength": (1024, 8192), "replicas": (1, 4)}
    bounds: dict[str, Any] = {"min": wide[name][0], "max": wide[name][1]}
    if knob is not Knob.REPLICAS:
        bounds["initial"] = before
    recommend = {"mode": "Recommend"}
    service = read(bounds={name: bounds}, tuning=recommend)
    tuner = Tuner.recover(service, None, None)
    tuner.conform(service)

    def now() -> int:
        return int(getattr(tuner.in_force if knob is Knob.REPLICAS else tuner.in_force.limits, field))

    assert now() == before
    patch = json.loads(merge_patch(decision(knob=knob, before=before, after=after)))["spec"]["bounds"]
    tuner.conform(read(bounds={name: bounds | patch[name]}, tuning=recommend))
    assert now() == after
