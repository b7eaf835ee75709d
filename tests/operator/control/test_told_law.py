"""Pods are told objectives and step law: seldom, without a new generation, and over restarts."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from control_helpers import quiet, service, until
from fake_api import FakeApi
from test_tuning_road import Runtime, Script, annotation, document, idle, runtime, script, start, status_of

from busload_operator.control import told_law
from busload_operator.control.told_law import ToldLaw
from busload_operator.tuning.types import Inputs, Law, Result
from busload_runtime.contract import StepLaw

__all__ = ["runtime", "script"]
Running = Callable[..., Any]
LAW = Law(0.01234, 0.00456, 1.234e-6, 0.000789, 0.05, 80, 1.0, 8.0, usable=True)


def test_two_digits_once_a_minute_and_for_more_than_noise() -> None:
    now = 0.0
    told = ToldLaw(None, lambda: now)
    told.follow(None)
    told.follow(replace(LAW, usable=False))
    assert told.law is None
    told.follow(LAW)
    first = StepLaw(0.012, 0.0046, 1.2e-6, 0.00079)
    assert told.law == first
    now = 59.0
    told.follow(replace(LAW, d=0.002))
    assert told.law == first, "not twice a minute"
    now = 61.0
    told.follow(replace(LAW, a=0.0131, d=0.00085))
    assert told.law == first, "less than a tenth is noise"
    told.follow(replace(LAW, usable=False, d=0.002))
    told.follow(None)
    assert told.law == first, "the last good one is kept"
    told.follow(replace(LAW, b=0.0))
    assert told.law == replace(first, b=0.0)
    now = 122.0
    told.follow(replace(LAW, b=1e-9))
    assert told.law == replace(first, b=1e-9)


async def test_a_law_reaches_the_config_map_without_a_generation_and_survives_a_restart(
    api: FakeApi, running: Running, runtime: Runtime, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    law = [replace(LAW, usable=False)]

    def answer(inputs: Inputs) -> Result:
        return replace(idle(inputs), law=law[0])

    script.answer = answer
    objectives = {"timeToFirstTokenMs": 2000, "interTokenLatencyMs": 100}
    async with running(port=runtime.port):
        await start(api, script)
        assert document(api)["objectives"] == objectives
        assert "stepLaw" not in document(api)
        law[0] = LAW
        await until(lambda: document(api).get("stepLaw") == {"a": 0.012, "b": 0.0046, "c": 1.2e-6, "d": 0.00079})
        written = api.get("configmaps", "demo", "chat-limits")
        law[0] = replace(LAW, a=0.5)
        await asyncio.sleep(1.0)
        assert api.get("configmaps", "demo", "chat-limits") == written, "within the same minute"
        assert document(api)["generation"] == 1 == status_of(api)["tuned"]["generation"]
        assert not status_of(api).get("decisions")
        assert annotation(api) is None, "no pod is touched for it"
    law[0] = None  # type: ignore[call-overload]
    count = len(api.writes())
    async with running(port=runtime.port):
        await until(lambda: len(script.seen) and script.seen[-1].generation == 1)
        await quiet(api)
        assert api.get("configmaps", "demo", "chat-limits") == written
        assert not [w for w in api.writes()[count:] if "configmaps" in w.path]
        monkeypatch.setattr(told_law, "CHANGE_SECONDS", 0.0)
        law[0] = replace(LAW, a=0.5)
        await until(lambda: document(api)["stepLaw"]["a"] == 0.5)
        await api.put("inferenceservices", service(objectives={"timeToFirstToken": "500ms"}, tuning={"mode": "Off"}))
        await until(lambda: document(api)["objectives"] == objectives | {"timeToFirstTokenMs": 500})
        law[0] = LAW
        await asyncio.sleep(1.0)
        assert document(api)["stepLaw"]["a"] == 0.5, "what is in force stays while tuning is off"
        assert document(api)["generation"] == 1
