"""From a pod's counters to a child ConfigMap and back: the road of an observation, with a scripted tuning core."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from aiohttp import web
from control_helpers import condition, pod, quiet, roll_out, service, until
from fake_api import FakeApi
from test_control_status import OBSERVED, decision

from busload_operator.control import tuner as tuners
from busload_operator.control.deletion_cost import ANNOTATION
from busload_operator.tuning.counters import SAMPLES
from busload_operator.tuning.state import State
from busload_operator.tuning.types import Bottleneck, Inputs, Knob, Outcome, Result, Verdict

Running = Callable[..., Any]
OOM = {"terminated": {"reason": "OOMKilled", "exitCode": 137}}


@dataclass
class Runtime:
    """A pod's metrics page."""

    port: int = 0
    generation: int = 1
    clock: float = 0.0
    text: str | None = None
    scrapes: int = 0

    async def page(self, _: web.Request) -> web.Response:
        self.scrapes += 1
        self.clock += 0.2
        values = dict.fromkeys(SAMPLES.values(), 0.0)
        values[SAMPLES["generation"]], values[SAMPLES["clock"]] = self.generation, self.clock
        values |= {SAMPLES["max_sequence_length"]: 8192, SAMPLES["batch_size"]: 8}
        values |= {SAMPLES["kv_cache_percent"]: 90, SAMPLES["token_budget"]: 512}
        values |= {SAMPLES["kv_blocks"]: 100, SAMPLES["kv_blocks_free"]: 100, SAMPLES["kv_block_size"]: 16}
        lines = [f"{name} {value}\n" for name, value in values.items()]
        return web.Response(text="".join(lines) if self.text is None else self.text)


@pytest.fixture
async def runtime() -> AsyncIterator[Runtime]:
    found = Runtime()
    app = web.Application()
    app.router.add_get("/metrics", found.page)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    found.port = runner.addresses[0][1]
    yield found
    await runner.cleanup()


@dataclass
class Script:
    """Takes the place of the tuning core's step."""

    answer: Callable[[Inputs], Result]
    seen: list[Inputs] = field(default_factory=list)

    def __call__(self, state: State, inputs: Inputs) -> tuple[State, Result]:
        self.seen.append(inputs)
        return state, self.answer(inputs)


def idle(inputs: Inputs) -> Result:
    return Result(OBSERVED, Bottleneck.IDLE, "", None, None, (), inputs.limits, inputs.replicas, None)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    scripted = Script(idle)
    monkeypatch.setattr(tuners, "step", scripted)
    return scripted


async def start(api: FakeApi, script: Script | None = None) -> None:
    await api.put("inferenceservices", service())
    await until(lambda: api.get("deployments", "demo", "chat"))
    await roll_out(api)
    await until(lambda: condition(api, "Ready").get("status") == "True")
    if script:
        await until(lambda: any(sample.counters for inputs in script.seen for sample in inputs.pods))
    await quiet(api)


def status_of(api: FakeApi) -> dict[str, Any]:
    return (api.get("inferenceservices", "demo", "chat") or {}).get("status") or {}


def document(api: FakeApi) -> dict[str, Any]:
    return dict(json.loads(api.get("configmaps", "demo", "chat-limits")["data"]["limits.json"]))  # type: ignore[index]


def annotation(api: FakeApi) -> str | None:
    annotations = (api.get("pods", "demo", "chat-0") or {"metadata": {}})["metadata"].get("annotations") or {}
    return annotations.get("busload.dev/limits-generation")


def once_to_16(inputs: Inputs) -> Result:
    """Decides batch limit 8 -> 16, then keeps it."""
    if inputs.limits.batch_size == 16:
        return idle(inputs)
    wanted = replace(inputs.limits, batch_size=16)
    return replace(idle(inputs), limits=wanted, decision=decision(id=1, before=8, after=16))


async def test_a_decision_reaches_the_pods_and_the_status(
    api: FakeApi, running: Running, runtime: Runtime, script: Script
) -> None:
    async with running(port=runtime.port):
        await start(api, script)
        assert annotation(api) is None
        script.answer = once_to_16
        await until(lambda: document(api)["generation"] == 2)
        assert document(api)["default"]["batchSize"] == 16
        await until(lambda: annotation(api) == "2")
        await until(lambda: status_of(api).get("decisions"))
        runtime.generation = 2
        told = status_of(api)["decisions"][0]
        assert (told["id"], told["from"], told["to"], told["outcome"]["verdict"]) == (1, "8", "16", "Pending")
        assert status_of(api)["tuned"] | {"generation": 2, "batchSize": 16} == status_of(api)["tuned"]
        await until(lambda: script.seen[-1].generation == 2)
        outcome = Outcome(Verdict.CONFIRMED, 61.0, 102.0, "faster")
        script.answer = lambda i: replace(idle(i), closed=(decision(id=1, outcome=outcome),))
        await until(lambda: status_of(api)["decisions"][0]["outcome"]["verdict"] == "Confirmed")
        assert status_of(api)["decisions"][0]["outcome"]["tokensPerSecondAfter"] == "102"
    events = [obj["reason"] for (plural, _, _), obj in api.objects.items() if plural == "events"]
    assert "WaitFromBatchLimit" in events
    assert api.get("deployments", "demo", "chat")["metadata"]["generation"] == 1  # type: ignore[index]


async def test_more_replicas_change_the_deployment_only(
    api: FakeApi, running: Running, runtime: Runtime, script: Script
) -> None:
    async with running(port=runtime.port):
        await start(api, script)
        made = decision(id=1, knob=Knob.REPLICAS, before=1, after=2)
        script.answer = lambda i: replace(idle(i), replicas=2, decision=made if i.replicas == 1 else None)
        await until(lambda: api.get("deployments", "demo", "chat")["spec"]["replicas"] == 2)  # type: ignore[index]
        await until(lambda: condition(api, "Reconciling"))
        assert condition(api, "Ready")["status"] == "True"
        await roll_out(api, 2)
        await until(lambda: not condition(api, "Reconciling"))
    assert document(api)["generation"] == 1


async def test_a_pod_that_does_not_follow_is_touched_again_and_named(
    api: FakeApi, running: Running, runtime: Runtime, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("busload_operator.control.nudge.FIRST_WAIT_SECONDS", 0.4)
    async with running(port=runtime.port):
        await start(api, script)
        script.answer = once_to_16
        await until(lambda: annotation(api) == "2")
        await until(lambda: annotation(api) == "2.2")
        await until(lambda: condition(api, "Tuning").get("reason") == "LimitsNotApplied")
        assert condition(api, "Tuning")["message"] == "pod chat-0 runs limits of generation 1, 2 is in force"
        runtime.generation = 2
        await until(lambda: condition(api, "Tuning").get("reason") == "Observing")
        await quiet(api)
        api.calls.clear()
        await asyncio.sleep(1.5)
        assert api.writes() == []


async def test_nothing_is_decided_on_top_of_a_change_that_is_not_written(
    api: FakeApi, running: Running, runtime: Runtime, script: Script
) -> None:
    async with running(port=runtime.port):
        await start(api, script)
        api.fail("PATCH", "/configmaps/", 503, "no leader", times=3)
        script.answer = once_to_16
        await until(lambda: api.faults[0].times == 2)
        count = len(script.seen)
        await asyncio.sleep(0.5)
        assert len(script.seen) == count
        await until(lambda: document(api)["generation"] == 2)
        await until(lambda: len(script.seen) > count)
        assert script.seen[-1].limits.batch_size == 16


async def test_a_pending_decision_of_an_earlier_process_is_inconclusive(
    api: FakeApi, running: Running, runtime: Runtime, script: Script
) -> None:
    async with running(port=runtime.port):
        await start(api, script)
        script.answer = once_to_16
        await until(lambda: status_of(api).get("decisions"))
        runtime.generation = 2
        await quiet(api)
    script.answer, script.seen = idle, []
    async with running(port=runtime.port):
        await until(lambda: status_of(api)["decisions"][0]["outcome"]["verdict"] == "Inconclusive")
        assert "restarted" in status_of(api)["decisions"][0]["outcome"]["message"]
        await until(lambda: script.seen)
        assert script.seen[0].limits.batch_size == 16


async def test_only_ready_pods_are_scraped(api: FakeApi, running: Running, runtime: Runtime, script: Script) -> None:
    async with running(port=runtime.port):
        await start(api, script)
        await api.put("pods", pod("chat-0", ready=False))
        await until(lambda: script.seen[-1].pods and not script.seen[-1].pods[0].ready)
        count = runtime.scrapes
        await asyncio.sleep(0.6)
        assert runtime.scrapes == count
        assert script.seen[-1].pods[0].counters is None


@pytest.mark.parametrize("text", ["", "nonsense\n", "busload_engine_steps_total 1\n"])
async def test_a_lying_pod_is_a_failed_scrape(
    api: FakeApi, running: Running, runtime: Runtime, script: Script, text: str
) -> None:
    async with running(port=runtime.port):
        await start(api, script)
        runtime.text = text
        await until(lambda: script.seen[-1].pods[0].counters is None)
        assert script.seen[-1].pods[0].ready


async def test_readings_are_written_now_and_then_only(
    api: FakeApi, running: Running, runtime: Runtime, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("busload_operator.control.reconcile.STATUS_SECONDS", 1.0)
    async with running(port=runtime.port):
        await start(api, script)
        api.calls.clear()
        readings = iter(range(1000))
        script.answer = lambda i: replace(idle(i), observed=replace(OBSERVED, batch=float(next(readings))))
        began = time.monotonic()
        await asyncio.sleep(3.2)
        writes = [call.path for call in api.writes()]
        lasted = time.monotonic() - began
    assert 1 <= len(writes) <= lasted + 1
    assert all(path.endswith("/status") for path in writes)


async def test_an_idle_service_writes_nothing(
    api: FakeApi, running: Running, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuners, "_PATIENCE_SECONDS", 1.0)
    async with running(port=runtime.port):  # with the true tuning core
        await start(api)
        await until(lambda: status_of(api).get("bottleneck") == "Idle")
        await quiet(api, 1.5)
        api.calls.clear()
        await asyncio.sleep(3)
        assert api.writes() == []
    async with running(port=runtime.port):
        await asyncio.sleep(3)
        await until(lambda: runtime.scrapes > 20)
        assert api.writes() == []


async def test_a_broken_core_stops_neither_the_loop_nor_other_work(
    api: FakeApi, running: Running, runtime: Runtime, script: Script, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: Inputs) -> Result:
        raise ZeroDivisionError

    async with running(port=runtime.port):
        await start(api, script)
        script.answer = broken
        await until(lambda: "observation failed" in caplog.text)
        await until(lambda: condition(api, "Tuning").get("reason") == "ObservationFailed")
        assert status_of(api)["bottleneck"] == "Stale"
        assert "observed" not in status_of(api)
        script.answer = idle
        await until(lambda: condition(api, "Tuning").get("reason") == "Observing")
        count = len(script.seen)
        await until(lambda: len(script.seen) > count + 2)


async def test_a_kill_reaches_the_core(api: FakeApi, running: Running, runtime: Runtime, script: Script) -> None:
    async with running(port=runtime.port):
        await start(api, script)
        assert script.seen[-1].pods[0].memory_kills == 0
        await api.put("pods", pod("chat-0", ready=False, containerStatuses=[{"restartCount": 0, "state": OOM}]))
        await until(lambda: script.seen[-1].pods[0].memory_kills == 1)
        assert not script.seen[-1].pods[0].ready
        again = [{"restartCount": 1, "state": {"running": {}}, "lastState": OOM}]
        await api.put("pods", pod("chat-0", containerStatuses=again))
        await until(lambda: script.seen[-1].pods[0].ready)
        assert script.seen[-1].pods[0].memory_kills == 1


async def test_pods_have_their_work_as_cost_before_the_deployment_gets_smaller(
    api: FakeApi, running: Running, runtime: Runtime, script: Script
) -> None:
    def two(inputs: Inputs) -> Result:
        return replace(idle(inputs), replicas=2)

    def one(inputs: Inputs) -> Result:
        return replace(idle(inputs), replicas=1)

    def replicas() -> int:
        deployment = api.get("deployments", "demo", "chat")
        assert deployment
        return int(deployment["spec"]["replicas"])

    def costs() -> list[str | None]:
        return [
            ((api.get("pods", "demo", name) or {})["metadata"].get("annotations") or {}).get(ANNOTATION)
            for name in ("chat-0", "chat-1")
        ]

    async with running(port=runtime.port):
        await start(api, script)
        script.answer = two
        await until(lambda: replicas() == 2)
        await roll_out(api, replicas=2)
        await until(lambda: len([s for s in script.seen[-1].pods if s.counters]) == 2)
        assert costs() == [None, None], "not written while nothing goes"
        script.answer = one
        await until(lambda: replicas() == 1)
        assert costs() == ["0", "0"]
    written = [call.path.partition("?")[0].split("/")[-2] for call in api.writes()]
    smaller = max(i for i, kind in enumerate(written) if kind == "deployments")
    assert written[smaller - 2 : smaller] == ["pods", "pods"], "read when it gets smaller"
