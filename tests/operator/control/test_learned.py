"""What was learned is stored now and then, read at the start, and never in the way of a service."""

import asyncio
import json
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from control_helpers import condition, quiet, roll_out, service, until
from fake_api import FakeApi
from test_control_status import OBSERVED

from busload_operator.control import learned as learneds
from busload_operator.control import tuner as tuners
from busload_operator.control.learned import Remembered, identity
from busload_operator.control.service import Service, read_service
from busload_operator.control.tuner import Tuner
from busload_operator.tuning.fit import BatchBin, Fit
from busload_operator.tuning.learned import Learned, Memory
from busload_operator.tuning.state import State, Usage
from busload_operator.tuning.types import Bottleneck, Inputs, Result

Running = Callable[..., Any]
GRAM = ((2.0, 0.0, 0.0, 0.0), (0.0, 2.0, 0.0, 0.0), (0.0, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0, 0.0))
FIT = Fit(GRAM, (1.0, 1.0, 0.0, 0.0), 2.0, 2, (BatchBin(2, 2, 2.0, 2.0),))
CALM = tuple(Usage(2.0 * n, 1.0, 1.0, 0.0, 1.0) for n in range(200))
NAME = "chat-learned"


def read(**spec: Any) -> Service:
    obj = service(**spec)
    obj["metadata"] |= {"uid": "u1", "generation": 1, "resourceVersion": "1"}
    return read_service(obj)


def size(memory: str) -> dict[str, Any]:
    return {"requests": {"cpu": "2", "memory": memory}, "limits": {"memory": memory}}


def test_progress_is_worth_a_write_every_five_minutes_and_news_at_once() -> None:
    now = 0.0
    kept = Remembered(Memory(), identity(read()), lambda: now)
    state = State(fit=FIT)

    def stored() -> int:
        return kept.learned.fit.samples

    kept.update(state, 90, news=False)
    assert kept.memory == Memory()
    now = 300.0
    kept.update(state, 90, news=False)
    assert stored() == 2
    now = 310.0
    kept.update(replace(state, fit=replace(FIT, samples=3)), 90, news=False)
    assert stored() == 2
    kept.update(replace(state, fit=replace(FIT, samples=3)), 90, news=True)
    assert stored() == 3
    kept.update(replace(state, fit=replace(FIT, samples=4), usage=CALM), 90, news=False)
    assert (stored(), kept.learned.kv_cache_percent) == (4, 90)
    now = 1000.0
    before = kept.memory
    kept.update(replace(state, fit=replace(FIT, samples=4), usage=CALM), 90, news=True)
    assert kept.memory is before, "nothing new is no reason to write"


def test_each_model_and_size_has_its_own_identity() -> None:
    claim = {"source": {"persistentVolumeClaim": {"claimName": "a", "path": "b.gguf"}}}
    every = {identity(read()), identity(read(model=claim)), identity(read(resources=size("1Gi")))}
    assert len(every) == 3
    assert identity(read(objectives={"interTokenLatency": "1s"})) == identity(read())


def tuner_of(found: Service, memory: Memory = Memory()) -> Tuner:
    made = Tuner.recover(found, None, None)
    made.remembered.memory = memory
    made.conform(found)
    return made


def test_another_size_of_pod_takes_its_own_kv_fraction_and_comes_back_to_the_old_one() -> None:
    big, small = read(resources=size("2Gi")), read(resources=size("1Gi"))
    tuner = tuner_of(big, Memory().with_(identity(small), Learned(FIT, kv_cache_percent=40)))
    assert tuner.in_force.limits.kv_cache_percent == 90
    tuner.conform(small)
    assert tuner.in_force.limits.kv_cache_percent == 40
    assert tuner._state.fit == FIT
    tuner.conform(big)
    assert tuner.in_force.limits.kv_cache_percent == 90
    assert tuner._state.fit == Fit()


def test_what_is_remembered_stays_inside_the_bounds_and_out_of_a_service_that_is_not_tuned() -> None:
    big, bounds = read(resources=size("2Gi")), {"kvCachePercent": {"min": 50, "max": 80}}
    low = {"kv_cache_percent": 40}
    inside = read(resources=size("1Gi"), bounds=bounds)
    tuner = tuner_of(big, Memory().with_(identity(inside), Learned(**low)))
    tuner.conform(inside)
    assert tuner.in_force.limits.kv_cache_percent == 50
    off = read(resources=size("1Gi"), tuning={"mode": "Off"})
    tuner = tuner_of(big, Memory().with_(identity(off), Learned(**low)))
    tuner.conform(off)
    assert tuner.in_force.limits.kv_cache_percent == 90


def test_without_the_limits_of_before_a_service_starts_with_the_safe_kv_fraction() -> None:
    found, other = read(), read(resources=size("1Gi"))
    for known, percent in ((found, 35), (other, 90)):
        memory = Memory().with_(identity(known), Learned(kv_cache_percent=35))
        remembered = Remembered(memory, identity(found), time.monotonic)
        assert tuners._in_force(found, None, None, {}, remembered).limits.kv_cache_percent == percent


def script(monkeypatch: pytest.MonkeyPatch, seen: State | None) -> list[State]:
    """A core that has seen this (None: adds nothing). Returns the states that it is given."""
    given: list[State] = []

    def step(state: State, inputs: Inputs) -> tuple[State, Result]:
        given.append(state)
        found = Result(OBSERVED, Bottleneck.IDLE, "", None, None, (), inputs.limits, inputs.replicas, None)
        return (state if seen is None else seen), found

    monkeypatch.setattr(tuners, "step", step)
    monkeypatch.setattr(learneds, "WRITE_SECONDS", 0.0)
    return given


async def settle(api: FakeApi) -> None:
    await api.put("inferenceservices", service())
    await until(lambda: api.get("deployments", "demo", "chat"))
    await roll_out(api)
    await until(lambda: condition(api, "Ready").get("status") == "True")
    await quiet(api)


def memory_of(api: FakeApi) -> Memory:
    found = api.get("configmaps", "demo", NAME)
    return Memory.from_json(found["data"]["learned.json"]) if found else Memory()


async def test_a_restart_goes_on_with_what_was_learned_and_writes_nothing(
    api: FakeApi, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, State(fit=FIT, output_length=64.0, usage=CALM))
    async with running():
        await settle(api)
        await until(lambda: memory_of(api).entries)
    assert memory_of(api).entries[0].learned == Learned(FIT, 64.0, None, 90)
    found = api.get("configmaps", "demo", NAME)
    assert found
    assert found["metadata"]["ownerReferences"][0]["name"] == "chat"
    given = script(monkeypatch, None)
    api.calls.clear()
    async with running():
        await until(lambda: len(given) > 3)
        await asyncio.sleep(0.5)
    assert (given[0].fit, given[0].output_length) == (FIT, 64.0)
    assert not [call for call in api.writes() if "configmaps" in call.path]


@pytest.mark.parametrize("text", ["{", '{"version":1,"entries":[{}]}', "edited"])
async def test_corrupt_or_foreign_content_is_told_once_and_learned_anew(
    api: FakeApi, running: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    script(monkeypatch, State(fit=FIT))
    async with running():
        await settle(api)
        await until(lambda: memory_of(api).entries)
    found = api.get("configmaps", "demo", NAME)
    assert found
    content = json.dumps({"version": 1, "entries": []}) if text == "edited" else text
    await api.put("configmaps", {**found, "data": {"learned.json": content}})  # by somebody else
    given = script(monkeypatch, None)
    with caplog.at_level(logging.WARNING):
        async with running():
            await until(lambda: len(given) > 2)
            assert given[0].fit == Fit()
            await asyncio.sleep(0.3)
            assert condition(api, "Ready")["status"] == "True"
    assert len([r for r in caplog.records if "what was learned is not usable" in r.getMessage()]) == 1


async def test_an_object_of_somebody_else_stalls_nothing(
    api: FakeApi, running: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    foreign = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": NAME, "namespace": "demo"},
        "data": {"a": "b"},
    }
    await api.put("configmaps", foreign)
    given = script(monkeypatch, State(fit=FIT))
    with caplog.at_level(logging.WARNING):
        async with running():
            await settle(api)
            await until(lambda: "what was learned is not stored" in caplog.text)
            count = len(given)
            await until(lambda: len(given) > count + 3)
            assert condition(api, "Ready")["status"] == "True"
            assert not condition(api, "Stalled")
    kept = api.get("configmaps", "demo", NAME)
    assert kept
    assert kept["data"] == {"a": "b"}
    assert len([r for r in caplog.records if "what was learned is not stored" in r.getMessage()]) == 1
