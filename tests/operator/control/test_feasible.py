"""The condition Feasible: known before pods where it can be, from pods where it cannot, told once."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiohttp import web
from control_helpers import condition, quiet, roll_out, service, until
from fake_api import FakeApi

from busload_operator.control.feasible import feasibility
from busload_operator.control.service import Service, read_service
from busload_operator.tuning.counters import SAMPLES
from busload_operator.tuning.feasible import FACT_SAMPLES, reported

Running = Callable[..., Any]
CLAIM = {"source": {"persistentVolumeClaim": {"claimName": "models", "path": "chat.gguf"}}}
# A pod of 2 GiB: 500 MB of weights and 40 KiB of KV a token, 1,000 blocks of 32 at 90%.
POD = {
    "busload_weight_bytes": 500e6,
    "busload_kv_bytes_per_token": 40_960,
    "busload_kv_block_size_tokens": 32,
    "busload_kv_blocks": 1000,
    "busload_limit_kv_cache_percent": 90,
    "busload_memory_budget_bytes": 2 * 2**30,
    "busload_copy_bandwidth_bytes_per_second": 10e9,
}


def read(**spec: Any) -> Service:
    obj = service(**spec)
    obj["metadata"] |= {"uid": "u1", "generation": 1, "resourceVersion": "1"}
    return read_service(obj)


def events_of(api: FakeApi) -> list[dict[str, Any]]:
    return [obj for (plural, _, _), obj in api.objects.items() if plural == "events"]


def memory(text: str) -> dict[str, Any]:
    return {"requests": {"cpu": "2", "memory": text}, "limits": {"memory": text}}


def judged(bandwidth: float | None = None, samples: dict[str, float] | None = None, **spec: Any) -> tuple[Any, ...]:
    found = feasibility(read(**spec), samples and reported("the model", samples), bandwidth)
    return found.possible, found.reason, found.message


def test_a_bundled_model_is_judged_without_pods() -> None:
    assert judged(10e9)[:2] == (True, "PlanFits")
    possible, reason, message = judged(10e9, resources=memory("310Mi"))
    assert (possible, reason) == (False, "SequenceDoesNotFit")
    assert "No request of maxSequenceLength 1024 fits" in message
    enough = message.partition("raise the memory limit to at least ")[2].partition(",")[0]
    assert judged(10e9, resources=memory(enough))[0] is True
    assert judged(10e9, resources=memory("200Mi"))[:2] == (False, "ModelDoesNotFit")


def test_a_gpu_is_judged_without_pods_where_its_memory_is_told() -> None:
    limits = {"memory": "8Gi", "nvidia.com/gpu": 1}
    possible, reason, message = judged(10e9, resources={"limits": limits})
    assert (possible, reason) == (None, "GpuMemoryUnknown")
    assert "give spec.resources.gpuMemory" in message
    assert judged(10e9, resources={"limits": limits, "gpuMemory": "4Gi"})[:2] == (True, "PlanFits")
    possible, reason, message = judged(10e9, resources={"limits": limits, "gpuMemory": "1200Mi"})
    assert (possible, reason) == (False, "ModelDoesNotFit")
    enough = message.partition("raise gpuMemory to at least ")[2].partition(".")[0]
    assert judged(10e9, resources={"limits": limits, "gpuMemory": enough})[0] is True


def test_a_gpu_is_judged_by_what_its_pods_say() -> None:
    gpu = {"limits": {"memory": "8Gi", "nvidia.com/gpu": 1}}
    assert judged(10e9, POD, model=CLAIM, resources=gpu)[:2] == (True, "PlanFits")


def test_the_floor_needs_a_bandwidth() -> None:
    tight = {"timeToFirstToken": "2s", "interTokenLatency": "9ms"}
    assert judged(None, objectives=tight)[:2] == (None, "BandwidthUnknown")
    possible, reason, message = judged(10e9, objectives=tight)
    assert (possible, reason) == (False, "ObjectiveBelowBandwidthFloor")
    assert "92.0 MiB of weights, which takes 9.6ms at 10 GB/s (BUSLOAD_MEMORY_BANDWIDTH)" in message
    # What pods measured counts more than what the operator was told.
    assert judged(10e9, {**POD, "busload_copy_bandwidth_bytes_per_second": 20e9}, objectives=tight)[0] is True


def test_memory_that_does_not_fit_is_told_even_without_a_bandwidth() -> None:
    assert judged(None, resources=memory("310Mi"))[:2] == (False, "SequenceDoesNotFit")


def test_a_model_on_a_claim_is_unknown_until_a_pod_reports() -> None:
    assert judged(10e9, model=CLAIM)[:2] == (None, "ModelUnknown")
    assert judged(None, POD, model=CLAIM)[:2] == (True, "PlanFits")
    # 35,555 tokens are left at 100%, 7,104 in whole blocks at 20%.
    short = {"kvCachePercent": {"max": 20}, "maxSequenceLength": {"min": 8000}}
    possible, reason, message = judged(None, POD, model=CLAIM, bounds=short)
    assert (possible, reason) == (False, "SequenceDoesNotFit")
    assert "at most 7104" in message
    slow = judged(None, POD, model=CLAIM, objectives={"interTokenLatency": "49ms"})
    assert slow[:2] == (False, "ObjectiveBelowBandwidthFloor")
    assert "477 MiB of weights, which takes 50ms at 10 GB/s (measured by its pods)" in slow[2]


@pytest.mark.parametrize("name", FACT_SAMPLES)
@pytest.mark.parametrize("value", [None, 0.0, -1.0, float("nan"), float("inf")])
def test_a_pod_that_loads_or_lies_reports_nothing(name: str, value: float | None) -> None:
    samples = dict(POD)
    del samples[name]
    assert reported("m", samples if value is None else samples | {name: value}) is None


def test_more_than_the_budget_is_no_report() -> None:
    assert reported("m", POD | {"busload_memory_budget_bytes": 600e6}) is None


async def test_told_before_there_are_pods_and_with_one_event(api: FakeApi, running: Running) -> None:
    async with running(BUSLOAD_MEMORY_BANDWIDTH="5"):
        await api.put("inferenceservices", service(objectives={"interTokenLatency": "15ms"}))
        found = await until(lambda: condition(api, "Feasible"))
        assert (found["status"], found["reason"]) == ("False", "ObjectiveBelowBandwidthFloor")
        assert condition(api, "Ready")["reason"] == "Starting"
        await roll_out(api)
        await until(lambda: condition(api, "Ready").get("status") == "True")
        await quiet(api)
        events = [e for e in events_of(api) if e["reason"] == "ObjectiveBelowBandwidthFloor"]
        assert [(e["type"], e["count"]) for e in events] == [("Warning", 1)]
        live = api.get("inferenceservices", "demo", "chat")
        assert live
        await api.put("inferenceservices", {**live, "spec": service()["spec"]})
        await until(lambda: condition(api, "Feasible").get("status") == "True")
        await until(lambda: [e for e in events_of(api) if e["reason"] == "PlanFits"])


@pytest.fixture
async def page() -> AsyncIterator[int]:
    values = dict.fromkeys(SAMPLES.values(), 0.0) | POD | {"busload_kv_blocks_free": 1000.0}
    values |= {SAMPLES["generation"]: 1, SAMPLES["batch_size"]: 8, SAMPLES["max_sequence_length"]: 8192}

    async def answer(_: web.Request) -> web.Response:
        values[SAMPLES["clock"]] += 0.2
        return web.Response(text="".join(f"{name} {value}\n" for name, value in values.items()))

    app = web.Application()
    app.router.add_get("/metrics", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield runner.addresses[0][1]
    await runner.cleanup()


async def test_pods_of_a_claim_tell_what_their_model_needs(api: FakeApi, running: Running, page: int) -> None:
    async with running(port=page):
        await api.put("inferenceservices", service(model=CLAIM, objectives={"interTokenLatency": "20ms"}))
        await until(lambda: condition(api, "Feasible").get("reason") == "ModelUnknown")
        assert condition(api, "Feasible")["status"] == "Unknown"
        await roll_out(api)
        await until(lambda: condition(api, "Feasible").get("reason") == "ObjectiveBelowBandwidthFloor")
        await quiet(api)
        count = len(api.writes())
        await asyncio.sleep(1)
        assert len(api.writes()) == count, "what pods report again is no news"
    # Another process has heard nothing yet: what the one before it told stands until the pods have answered.
    async with running(port=page):
        await asyncio.sleep(1.5)
        await quiet(api)
        assert condition(api, "Feasible")["reason"] == "ObjectiveBelowBandwidthFloor"
    assert len([e for e in events_of(api) if e["reason"] == "ObjectiveBelowBandwidthFloor"]) == 1
    reasons = [call.path for call in api.writes()[count:] if call.path.endswith("/status")]
    assert not reasons, "a restart on a settled service writes nothing"


async def test_an_operator_that_starts_does_not_take_back_what_another_has_told(api: FakeApi, running: Running) -> None:
    told = {"type": "Feasible", "status": "True", "reason": "PlanFits", "message": "m", "observedGeneration": 1}
    live = {**service(), "status": {"conditions": [{**told, "lastTransitionTime": "2026-01-01T00:00:00Z"}]}}
    async with running():
        await api.put("inferenceservices", live)
        await until(lambda: condition(api, "Ready"))
        assert condition(api, "Feasible")["reason"] == "PlanFits"
        changed = api.get("inferenceservices", "demo", "chat")
        assert changed
        spec = service(objectives={"interTokenLatency": "70ms"})["spec"]
        await api.put("inferenceservices", {**changed, "spec": spec})
        await until(lambda: condition(api, "Feasible")["reason"] == "BandwidthUnknown")
