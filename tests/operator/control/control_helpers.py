"""What the tests of the control loop share beside fixtures: objects, waiting, and the parts of other controllers."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from fake_api import FakeApi

from busload_operator.control.settings import Settings


def settings(**values: str) -> Settings:
    return Settings.from_environment({"BUSLOAD_RUNTIME_IMAGE": "example.org/runtime:1", "POD_NAME": "op", **values})


async def until(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Waits for something that must become true. Fails when it does not, after longer than a busy machine needs."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "it did not happen in time"
        await asyncio.sleep(0.02)
    return found


async def quiet(api: FakeApi, seconds: float = 0.6) -> None:
    """Waits until the operator has written nothing for a while."""
    count = -1
    while count != len(api.writes()):
        count = len(api.writes())
        await asyncio.sleep(seconds)


def service(name: str = "chat", **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "busload.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": name, "namespace": "demo"},
        "spec": {"model": {"source": {"bundled": "smollm2-135m-instruct"}}, **spec},
    }


def pod(name: str, ready: bool = True, of: str = "chat", ip: str = "127.0.0.1", **status: Any) -> dict[str, Any]:
    state = "True" if ready else "False"
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": "demo",
            "labels": {
                "app.kubernetes.io/managed-by": "busload",
                "busload.dev/inferenceservice": of,
                "pod-template-hash": "7c9f",
            },
            "ownerReferences": [{"kind": "ReplicaSet", "name": f"{of}-7c9f", "uid": "rs", "controller": True}],
        },
        "status": {"phase": "Running", "podIP": ip, "conditions": [{"type": "Ready", "status": state}], **status},
    }


async def roll_out(api: FakeApi, replicas: int = 1, of: str = "chat", ready: bool = True) -> None:
    """Plays the Deployment's controller and the kubelet."""
    deployment = api.get("deployments", "demo", of)
    assert deployment
    count = replicas if ready else 0
    status = {
        "observedGeneration": deployment["metadata"]["generation"],
        "replicas": replicas,
        "updatedReplicas": replicas,
        "readyReplicas": count,
        "availableReplicas": count,
    }
    await api.put("deployments", {**deployment, "status": status})
    for number in range(replicas):
        await api.put("pods", pod(f"{of}-{number}", ready, of))


def condition(api: FakeApi, kind: str, name: str = "chat") -> dict[str, Any]:
    live = api.get("inferenceservices", "demo", name) or {}
    found = (live.get("status") or {}).get("conditions") or []
    return next((item for item in found if item["type"] == kind), {})
