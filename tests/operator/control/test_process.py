"""The operator as a process: exit codes, signals, two contenders."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator

import aiohttp
import pytest
from control_helpers import service, until
from fake_api import FakeApi

from busload_operator.control import main

Process = asyncio.subprocess.Process


@contextlib.asynccontextmanager
async def operator(api: FakeApi, **environment: str) -> AsyncIterator[Process]:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("BUSLOAD_")}
    variables |= {"KUBECONFIG": str(api.kubeconfig), "BUSLOAD_RUNTIME_IMAGE": "r:1", "BUSLOAD_HTTP_PORT": "0"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "from busload_operator.cli import main; main()", "operator",
        env=variables | environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def output(process: Process) -> str:
    assert process.stdout
    return (await process.stdout.read()).decode()


def holder(api: FakeApi) -> str:
    lease = api.get("leases", "busload-system", "busload-operator") or {"spec": {}}
    return str(lease["spec"].get("holderIdentity", "")).partition("_")[0]


async def test_sigterm_ends_it_at_once_and_hands_the_lease_over(api: FakeApi) -> None:
    async with operator(api, POD_NAME="a") as process:
        await until(lambda: any(call.verb == "WATCH" for call in api.calls))
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 60) == 0
        assert holder(api) == ""


async def test_a_second_one_waits_and_takes_over(api: FakeApi) -> None:
    async with operator(api, POD_NAME="a") as first:
        await until(lambda: holder(api) == "a")
        async with operator(api, POD_NAME="b") as second:
            await asyncio.sleep(3)
            assert holder(api) == "a"
            first.terminate()
            await until(lambda: holder(api) == "b")
            await api.put("inferenceservices", service())
            await until(lambda: api.get("deployments", "demo", "chat"))
            second.terminate()
            assert await second.wait() == 0


async def test_two_of_one_name_do_not_act_both(api: FakeApi) -> None:
    async with operator(api, POD_NAME="a") as first:
        await until(lambda: holder(api) == "a")
        lease = api.get("leases", "busload-system", "busload-operator")
        identity = lease["spec"]["holderIdentity"]  # type: ignore[index]
        async with operator(api, POD_NAME="a") as second:
            await until(lambda: len([c for c in api.calls if c.verb == "GET" and "/leases/" in c.path]) > 2)
            await asyncio.sleep(3)
            lease = api.get("leases", "busload-system", "busload-operator")
            assert lease["spec"]["holderIdentity"] == identity  # type: ignore[index]
            second.terminate()
            assert await second.wait() == 0
        assert first.returncode is None
        first.terminate()
        await first.wait()


async def test_one_that_waits_for_the_lease_ends_too(api: FakeApi) -> None:
    async with operator(api, POD_NAME="a") as first:
        await until(lambda: holder(api) == "a")
        async with operator(api, POD_NAME="b") as second:
            await until(lambda: len([c for c in api.calls if c.verb == "GET" and "/leases/" in c.path]) > 2)
            second.terminate()
            assert await second.wait() == 0
        assert holder(api) == "a"
        first.terminate()
        await first.wait()


async def test_a_lost_lease_ends_the_process(api: FakeApi) -> None:
    async with operator(api, POD_NAME="a") as process:
        await until(lambda: holder(api) == "a")
        live = api.get("leases", "busload-system", "busload-operator")
        assert live
        await api.put("leases", {**live, "spec": {**live["spec"], "holderIdentity": "thief"}})
        assert await asyncio.wait_for(process.wait(), 60) == 1
        assert "lease lost: thief holds the lease now" in await output(process)
        assert holder(api) == "thief"


async def test_watches_that_fail_for_good_end_the_process(api: FakeApi) -> None:
    async with operator(api) as process:
        await until(lambda: any(c.verb == "WATCH" and "inferenceservices" in c.path for c in api.calls))
        api.served["busload.dev"]["v1alpha1"] = []
        await api.restart()
        assert await asyncio.wait_for(process.wait(), 60) == 1
        assert "the watches ended" in await output(process)
        assert holder(api) == ""


async def test_probes_and_metrics(api: FakeApi, unused_tcp_port: int) -> None:
    base = f"http://127.0.0.1:{unused_tcp_port}"
    async with operator(api, BUSLOAD_HTTP_PORT=str(unused_tcp_port)) as process, aiohttp.ClientSession() as session:
        await until(lambda: any(call.verb == "WATCH" for call in api.calls))
        await api.put("inferenceservices", service())
        await until(lambda: api.get("deployments", "demo", "chat"))
        for path in ("/healthz", "/readyz"):
            assert (await session.get(base + path)).status == 200
        text = ""
        while 'workqueue_depth{name="inferenceservice"} 0.0' not in text:  # what the new Deployment made to do is done
            text = await (await session.get(f"{base}/metrics")).text()
        process.terminate()
        await process.wait()
    for line in (
        'leader_election_master_status{name="busload-operator"} 1.0',
        'workqueue_depth{name="inferenceservice"} 0.0',
        "busload_operator_services 1.0",
        'rest_client_requests_total{code="201",resource="deployments",verb="PATCH"} 1.0',
        'controller_runtime_reconcile_errors_total{controller="inferenceservice"} 0.0',
    ):
        assert line in text
    assert "busload_operator_build_info{version=" in text
    assert 'name="chat"' not in text  # no label that grows with the cluster


async def test_wrong_settings_end_it_with_one_clear_line(api: FakeApi) -> None:
    async with operator(api, BUSLOAD_RUNTIME_IMAGE="") as process:
        assert await asyncio.wait_for(process.wait(), 60) == 2
        assert (await output(process)).startswith("BUSLOAD_RUNTIME_IMAGE is not set: it must name the image")


def test_no_cluster_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("kubernetes.aio.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", "/nowhere/kubeconfig")
    monkeypatch.setattr("busload_operator.control.logs.configure", lambda level: None)
    monkeypatch.setenv("BUSLOAD_RUNTIME_IMAGE", "r:1")
    assert main.run() == 2
    assert capsys.readouterr().err.startswith("no cluster to talk to: ")


async def test_a_port_in_use(api: FakeApi) -> None:
    taken = api.url.rpartition(":")[2]
    async with operator(api, BUSLOAD_HTTP_PORT=taken) as process:
        assert await asyncio.wait_for(process.wait(), 60) == 2
        assert f"BUSLOAD_HTTP_PORT={taken} cannot be used" in await output(process)
