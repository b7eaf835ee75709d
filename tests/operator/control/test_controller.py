"""The leader's whole loop against an API server in memory: what it writes, what not, how it takes faults."""

import asyncio
import contextlib
import copy
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
from control_helpers import condition, pod, quiet, roll_out, service, until
from fake_api import FakeApi

from busload_operator.api.v1alpha1 import InferenceService
from busload_operator.control import controller as controllers
from busload_operator.control import reconcile
from busload_operator.control.controller import WatchEndedError
from busload_operator.resources.initial_limits import longest_sequence

Running = Callable[..., Any]


def status_of(api: FakeApi, name: str = "chat") -> dict[str, Any]:
    return (api.get("inferenceservices", "demo", name) or {}).get("status") or {}


def limits_of(api: FakeApi) -> dict[str, Any]:
    config_map = api.get("configmaps", "demo", "chat-limits")
    assert config_map
    return dict(json.loads(config_map["data"]["limits.json"]))


async def settled(api: FakeApi) -> None:
    """A service whose one replica is ready, as far as the API server knows."""
    await until(lambda: api.get("deployments", "demo", "chat"))
    await roll_out(api)
    await until(lambda: condition(api, "Ready").get("status") == "True")
    await quiet(api)


async def test_a_service_gets_its_children_and_becomes_ready(api: FakeApi, running: Running) -> None:
    async with running():
        await api.put("inferenceservices", service())
        await until(lambda: condition(api, "Ready").get("reason") == "Starting")
        await settled(api)
    assert {plural for plural, _, _ in api.objects} >= {"serviceaccounts", "configmaps", "services", "deployments"}
    assert status_of(api)["endpoint"] == "http://chat.demo.svc:8000/v1"
    live = api.get("inferenceservices", "demo", "chat")
    assert live
    assert live["spec"] == service()["spec"]
    assert not live["metadata"].keys() & {"finalizers", "annotations", "labels"}


async def test_a_restart_on_settled_services_writes_nothing(api: FakeApi, running: Running) -> None:
    async with running():
        await api.put("inferenceservices", service())
        await settled(api)
    api.calls.clear()
    async with running():
        await until(lambda: any(call.verb == "WATCH" for call in api.calls))
        await quiet(api, 1.5)
    assert api.writes() == []


async def test_a_restart_keeps_tuned_values(api: FakeApi, running: Running) -> None:
    async with running():
        await api.put("inferenceservices", service())
        await settled(api)
    config_map = copy.deepcopy(api.get("configmaps", "demo", "chat-limits"))
    document = limits_of(api)
    document["generation"], document["default"]["batchSize"] = 7, 32
    config_map["data"]["limits.json"] = json.dumps(document, sort_keys=True)  # type: ignore[index]
    await api.put("configmaps", config_map, manager="busload")  # type: ignore[arg-type]
    deployment = copy.deepcopy(api.get("deployments", "demo", "chat"))
    deployment["spec"]["replicas"] = 3  # type: ignore[index]
    await api.put("deployments", deployment, manager="busload")  # type: ignore[arg-type]
    async with running():
        await until(lambda: status_of(api)["tuned"]["batchSize"] == 32)
        await quiet(api)
    assert (limits_of(api)["generation"], limits_of(api)["default"]["batchSize"]) == (7, 32)
    assert api.get("deployments", "demo", "chat")["spec"]["replicas"] == 3  # type: ignore[index]
    assert status_of(api)["tuned"]["replicas"] == 3


async def test_narrower_bounds_clamp_at_once_and_without_a_decision(api: FakeApi, running: Running) -> None:
    async with running():
        await api.put("inferenceservices", service())
        await settled(api)
        bounds = {"batchSize": {"max": 4}, "replicas": {"min": 2, "max": 3}, "kvCachePercent": {"max": 50}}
        live = copy.deepcopy(api.get("inferenceservices", "demo", "chat"))
        live["spec"]["bounds"] = bounds  # type: ignore[index]
        await api.put("inferenceservices", live)  # type: ignore[arg-type]
        await until(lambda: status_of(api).get("observedGeneration") == 2)
        await until(lambda: limits_of(api)["default"]["batchSize"] == 4)
    assert limits_of(api)["default"]["kvCachePercent"] == 50
    assert limits_of(api)["generation"] == 2
    assert api.get("deployments", "demo", "chat")["spec"]["replicas"] == 2  # type: ignore[index]
    assert "decisions" not in status_of(api)


async def test_the_longest_sequence_follows_bounds_and_memory_both_ways(api: FakeApi, running: Running) -> None:
    async def edit(**spec: Any) -> None:
        live = copy.deepcopy(api.get("inferenceservices", "demo", "chat"))
        assert live
        live["spec"] |= spec
        await api.put("inferenceservices", live)

    def longest() -> int:
        return int(limits_of(api)["default"]["maxSequenceLength"])

    async with running():
        await api.put("inferenceservices", service())
        await settled(api)
        assert longest() == 8192
        await edit(bounds={"maxSequenceLength": {"max": 2048}})
        await until(lambda: longest() == 2048)
        await edit(bounds={"maxSequenceLength": {"max": 4096}})
        await until(lambda: longest() == 4096)
        await edit(resources={"requests": {"cpu": "2", "memory": "352Mi"}, "limits": {"memory": "352Mi"}})
        small = InferenceService.model_validate(api.get("inferenceservices", "demo", "chat"))
        fitting = longest_sequence(small.spec)  # what 352 MiB hold beside weights, a step and the processes
        assert 1024 < fitting < 4096
        await until(lambda: longest() == fitting)
        await edit(resources={"requests": {"cpu": "1", "memory": "2Gi"}, "limits": {"memory": "2Gi"}})
        await until(lambda: longest() == 4096)
        await quiet(api)
        assert limits_of(api)["generation"] == 5


async def test_in_external_scaling_the_spec_gives_the_replicas(api: FakeApi, running: Running) -> None:
    async with running():
        await api.put("inferenceservices", service(scaling={"mode": "External"}, replicas=3))
        await until(lambda: api.get("deployments", "demo", "chat"))
        assert api.get("deployments", "demo", "chat")["spec"]["replicas"] == 3  # type: ignore[index]
        live = copy.deepcopy(api.get("inferenceservices", "demo", "chat"))
        live["spec"]["replicas"] = 1  # type: ignore[index]
        await api.put("inferenceservices", live)  # type: ignore[arg-type]
        await until(lambda: api.get("deployments", "demo", "chat")["spec"]["replicas"] == 1)  # type: ignore[index]


async def test_a_bad_spec_that_got_past_admission_stalls_and_leaves_the_children(
    api: FakeApi, running: Running
) -> None:
    async with running():
        await api.put("inferenceservices", service())
        await settled(api)
        before = copy.deepcopy(api.get("deployments", "demo", "chat"))
        live = copy.deepcopy(api.get("inferenceservices", "demo", "chat"))
        live["spec"]["bounds"] = {"replicas": {"min": 5, "max": 2}}  # type: ignore[index]
        await api.put("inferenceservices", live)  # type: ignore[arg-type]
        await until(lambda: condition(api, "Stalled").get("reason") == "InvalidSpec")
        assert "spec.bounds.replicas.min" in condition(api, "Stalled")["message"]
        await quiet(api)
        api.calls.clear()
        await asyncio.sleep(1)
        assert api.writes() == []  # no retry until the spec changes
        assert api.get("deployments", "demo", "chat") == before
        live = copy.deepcopy(api.get("inferenceservices", "demo", "chat"))
        del live["spec"]["bounds"]  # type: ignore[index]
        await api.put("inferenceservices", live)  # type: ignore[arg-type]
        await until(lambda: not condition(api, "Stalled"))
        await until(lambda: condition(api, "Ready").get("status") == "True")


async def test_an_object_that_stands_in_the_way_stalls_until_it_is_gone(
    api: FakeApi, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("busload_operator.control.reconcile.RECHECK_SECONDS", 0.3)
    theirs = await api.put("services", {"metadata": {"namespace": "demo", "name": "chat"}, "spec": {"a": 1}})
    async with running():
        await api.put("inferenceservices", service())
        await until(lambda: condition(api, "Stalled").get("reason") == "ForeignObject")
        assert api.get("services", "demo", "chat") == theirs
        assert not api.get("deployments", "demo", "chat")
        await api.remove("services", "demo", "chat")
        await until(lambda: not condition(api, "Stalled"))
        assert api.get("deployments", "demo", "chat")


async def test_a_crash_is_told_and_so_is_the_recovery(api: FakeApi, running: Running) -> None:
    async with running():
        await api.put("inferenceservices", service())
        await settled(api)
        ended = {"terminated": {"exitCode": 1, "reason": "Error", "message": "engine died: boom\n"}}
        down = pod("chat-0", ready=False, containerStatuses=[{"name": "runtime", "ready": False, "state": ended}])
        await api.put("pods", down)
        await until(lambda: condition(api, "Ready").get("reason") == "ContainerExited")
        assert "exit code 1: engine died: boom" in condition(api, "Ready")["message"]
        await api.put("pods", pod("chat-0"))
        await until(lambda: condition(api, "Ready").get("status") == "True")
    events = [obj for (plural, _, _), obj in api.objects.items() if plural == "events"]
    assert {(event["type"], event["reason"]) for event in events} >= {("Warning", "ContainerExited")}
    assert [event["count"] for event in events if event["reason"] == "ReplicasReady"] == [2]


@pytest.mark.parametrize("plural", ["deployments", "configmaps", "services", "serviceaccounts"])
async def test_a_deleted_child_comes_back(api: FakeApi, running: Running, plural: str) -> None:
    name = "chat-limits" if plural == "configmaps" else "chat"
    async with running():
        await api.put("inferenceservices", service())
        await settled(api)
        await api.remove(plural, "demo", name)
        await until(lambda: api.get(plural, "demo", name))


async def test_what_vanished_in_a_gap_is_noticed_by_the_next_complete_list(api: FakeApi, running: Running) -> None:
    async with running() as controller:
        await api.put("inferenceservices", service())
        await settled(api)
        await api.remove("deployments", "demo", "chat", silently=True)
        await api.restart()  # the watches get 410 and list again; kopf does not tell what is gone
        await asyncio.sleep(1)
        assert not api.get("deployments", "demo", "chat")
        await controller.resync()
        await until(lambda: api.get("deployments", "demo", "chat"))


async def test_a_service_deleted_in_a_gap_is_forgotten(api: FakeApi, running: Running) -> None:
    async with running() as controller:
        await api.put("inferenceservices", service())
        await settled(api)
        await api.remove("inferenceservices", "demo", "chat", silently=True)
        await api.restart()
        await controller.resync()
        await until(lambda: not controller.tuners)


async def test_events_go_on_after_a_restart_of_the_api_server(api: FakeApi, running: Running) -> None:
    async with running():
        await api.put("inferenceservices", service())
        await settled(api)
        await api.restart()
        await api.put("inferenceservices", service("second"))
        await until(lambda: api.get("deployments", "demo", "second"))


@pytest.mark.parametrize(
    ("status", "body", "headers"),
    [
        (429, "Too many requests, please try again later.", {"Retry_After": "1"}),
        (500, {"message": "etcdserver: request timed out", "reason": "InternalError"}, {}),
        (409, {"message": "uid mismatch", "reason": "Conflict"}, {}),
        (503, "apiserver is shutting down", {}),
    ],
)
async def test_passing_faults_are_tried_again(
    api: FakeApi, running: Running, status: int, body: Any, headers: dict[str, str]
) -> None:
    api.fail("PATCH", "/deployments/", status, body, times=2, **headers)
    async with running():
        await api.put("inferenceservices", service())
        await settled(api)
    tries = [call.status for call in api.calls if call.verb == "PATCH" and "/deployments/" in call.path]
    assert tries == [status, status, 201]


async def test_a_rejected_child_stalls_and_is_not_tried_again(api: FakeApi, running: Running) -> None:
    text = "failed to create typed patch object (demo/chat; apps/v1, Kind=Deployment): .spec.x: field not declared"
    api.fail("PATCH", "/deployments/", 500, {"message": text}, times=100)
    async with running():
        await api.put("inferenceservices", service())
        await until(lambda: condition(api, "Stalled").get("reason") == "ChildRejected")
        assert ".spec.x: field not declared" in condition(api, "Stalled")["message"]
        await asyncio.sleep(1.5)
        assert len([call for call in api.calls if "/deployments/" in call.path and call.verb == "PATCH"]) == 1
        api.faults.clear()
        live = copy.deepcopy(api.get("inferenceservices", "demo", "chat"))
        live["spec"]["replicas"] = 2  # type: ignore[index]
        await api.put("inferenceservices", live)  # type: ignore[arg-type]
        await until(lambda: api.get("deployments", "demo", "chat"))


async def test_a_rejection_ends_when_the_cause_is_gone(
    api: FakeApi, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reconcile, "RECHECK_SECONDS", 1.0)
    api.fail("PATCH", "/configmaps/", 422, {"message": "data: Forbidden: immutable"}, times=100)
    async with running():
        await api.put("inferenceservices", service())
        await until(lambda: condition(api, "Stalled").get("reason") == "ChildRejected")
        api.faults.clear()  # a person deleted the immutable object, or changed the policy
        await settled(api)
        assert not condition(api, "Stalled")


@pytest.mark.parametrize("answer", ["<html>proxy</html>", "[]", "{}", '{"metadata": {}}', '{"items": [', "[" * 100_000])
async def test_an_answer_that_is_none_is_a_fault_like_others(api: FakeApi, running: Running, answer: str) -> None:
    await api.put("inferenceservices", service())
    for verb, part in (("GET", "/apis/busload.dev/v1alpha1"), ("GET", "/pods"), ("PATCH", "/deployments/")):
        api.fail(verb, part, 200, answer)
    async with running():
        await settled(api)


async def test_a_pod_with_copied_labels_is_not_counted(api: FakeApi, running: Running) -> None:
    async with running():
        await api.put("inferenceservices", service())
        await settled(api)
        stranger = pod("stranger")
        stranger["metadata"]["ownerReferences"] = []
        await api.put("pods", stranger)
        await quiet(api)
    assert status_of(api)["replicas"] == 1
    assert not condition(api, "Reconciling")
    assert "annotations" not in (api.get("pods", "demo", "stranger") or {})["metadata"]


async def test_missing_rights_are_told_and_tried_again(api: FakeApi, running: Running) -> None:
    api.fail("PATCH", "/deployments/", 403, {"message": "exceeded quota: compute", "reason": "Forbidden"}, times=1)
    async with running():
        await api.put("inferenceservices", service())
        await until(lambda: condition(api, "Reconciling").get("reason") == "ApplyFailed")
        assert "exceeded quota" in condition(api, "Reconciling")["message"]
        await settled(api)


async def test_a_namespace_that_is_being_deleted_is_left_alone(api: FakeApi, running: Running) -> None:
    api.terminating.add("demo")
    async with running():
        await api.put("inferenceservices", service())
        await until(lambda: any(call.status == 403 for call in api.calls))
        await asyncio.sleep(1.5)
    assert [call.status for call in api.calls if call.verb == "PATCH"] == [403]


async def test_a_service_that_is_being_deleted_is_left_alone(api: FakeApi, running: Running) -> None:
    leaving = service()
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    async with running():
        await api.put("inferenceservices", leaving)
        await asyncio.sleep(1)
    assert api.writes() == []


async def test_one_hanging_call_does_not_stop_the_other_services(api: FakeApi, running: Running) -> None:
    api.hanging.add("/namespaces/demo/deployments/stuck")
    async with running():
        await api.put("inferenceservices", service("stuck"))
        await api.put("inferenceservices", service())
        await settled(api)
    assert not api.get("deployments", "demo", "stuck")


async def test_a_hanging_call_ends_by_its_deadline_and_is_tried_again(
    api: FakeApi, running: Running, client: Any
) -> None:
    client.timeout = 2.0
    api.hanging.add("/deployments/chat")
    async with running():
        await api.put("inferenceservices", service())
        await asyncio.sleep(3)
        assert not api.get("deployments", "demo", "chat")
        api.hanging.clear()
        await settled(api)


async def test_first_it_waits_until_the_kind_is_served(
    api: FakeApi, running: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wait = controllers.wait_for_definition
    monkeypatch.setattr(controllers, "wait_for_definition", lambda client: wait(client, 0.1))
    api.served["busload.dev"]["v1alpha1"] = []
    async with running():
        await until(lambda: "waiting for the CustomResourceDefinition" in caplog.text)
        assert not any(call.verb == "WATCH" for call in api.calls)
        api.served["busload.dev"]["v1alpha1"] = ["inferenceservices"]
        await api.put("inferenceservices", service())
        await until(lambda: api.get("deployments", "demo", "chat"))


async def test_a_watch_that_fails_for_good_ends_the_controller(api: FakeApi, running: Running) -> None:
    async def run_until_it_ends() -> None:
        async with running(end=True):
            await until(lambda: any(c.verb == "WATCH" and "deployments" in c.path for c in api.calls))
            api.served["apps"]["v1"] = []  # 404 for the watch, as after the removal of a definition
            await api.restart()

    with pytest.raises(ExceptionGroup) as caught:
        await asyncio.wait_for(run_until_it_ends(), 90)
    assert isinstance(caught.value.exceptions[0], WatchEndedError)


async def test_watches_that_fail_end_the_controller_even_if_kopf_does_not_end(
    api: FakeApi, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when one of its tasks waits for credentials that nobody brings any more, whatever cancels it."""
    over = threading.Event()

    async def never_ends(roots: list[asyncio.Task[None]], **_: Any) -> None:
        while not over.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.05)

    monkeypatch.setattr("kopf.run_tasks", never_ends)
    monkeypatch.setattr("busload_operator.control.watch.ENDING_SECONDS", 0.5)

    async def run_until_it_ends() -> None:
        async with running(end=True):
            await until(lambda: any(c.verb == "WATCH" and "deployments" in c.path for c in api.calls))
            api.served["apps"]["v1"] = []
            await api.restart()

    try:
        with pytest.raises(ExceptionGroup) as caught:
            await asyncio.wait_for(run_until_it_ends(), 60)
    finally:
        over.set()
    assert isinstance(caught.value.exceptions[0], WatchEndedError)
    assert "404" in str(caught.value.exceptions[0])


async def test_named_namespaces_only(api: FakeApi, running: Running) -> None:
    elsewhere = service("other")
    elsewhere["metadata"]["namespace"] = "elsewhere"
    await api.put("inferenceservices", elsewhere)
    async with running(BUSLOAD_WATCH_NAMESPACES="demo"):
        await api.put("inferenceservices", service())
        await until(lambda: api.get("deployments", "demo", "chat"))
    assert not api.get("deployments", "elsewhere", "other")
    lists = [call.path for call in api.calls if call.verb in ("GET", "WATCH") and "inferenceservices" in call.path]
    assert lists
    assert all(path.startswith("/apis/busload.dev/v1alpha1/namespaces/demo/") for path in lists)


async def test_many_services_page_by_page(api: FakeApi, running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("busload_operator.control.client._PAGE", 7)
    for number in range(40):
        await api.put("inferenceservices", service(f"s{number}"))
    async with running() as controller:
        await until(lambda: all(status_of(api, f"s{number}") for number in range(40)))
        assert len(controller.tuners) == 40
