"""A service that asks for a GPU, from its object to its Deployment."""

from collections.abc import Callable
from typing import Any

from control_helpers import condition, service, until
from fake_api import FakeApi

Running = Callable[..., Any]
GPU = {"limits": {"memory": "8Gi", "nvidia.com/gpu": 1}}


async def test_without_an_image_for_gpus_the_service_says_so(api: FakeApi, running: Running) -> None:
    async with running():
        await api.put("inferenceservices", service(resources=GPU))
        stalled = await until(lambda: condition(api, "Stalled"))
        assert (stalled["status"], stalled["reason"]) == ("True", "NoGpuImage")
        assert "set BUSLOAD_GPU_RUNTIME_IMAGE of the operator" in stalled["message"]
        assert api.get("deployments", "demo", "chat") is None


async def test_its_pods_run_the_image_for_gpus(api: FakeApi, running: Running) -> None:
    async with running(BUSLOAD_GPU_RUNTIME_IMAGE="example.org/runtime-gpu:1"):
        await api.put("inferenceservices", service(resources=GPU))
        deployment = await until(lambda: api.get("deployments", "demo", "chat"))
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        assert container["image"] == "example.org/runtime-gpu:1"
        assert container["resources"]["limits"] == {"memory": "8Gi", "nvidia.com/gpu": "1"}
        feasible = await until(lambda: condition(api, "Feasible"))
        assert (feasible["status"], feasible["reason"]) == ("Unknown", "GpuMemoryUnknown")
