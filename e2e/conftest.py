"""Fixtures of the end-to-end tests: the embedded cluster with the operator installed, and a namespace per test.

Nothing here skips: where the cluster cannot come up, the tests fail and say why.
"""

import subprocess
import sys
import uuid
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from e2e import access, demo
from e2e.access import Cluster, wait_for
from e2e.steps import OUT, Steps


@pytest.fixture(scope="session")
def cluster(capfd_disabled: None) -> Cluster:
    """The embedded cluster, up, with the images of this tree loaded."""
    return demo.prepare_embedded(Steps("e2e"))


@pytest.fixture(scope="session")
def capfd_disabled(request: pytest.FixtureRequest) -> Iterator[None]:
    """Shows the progress of the long set-up steps while they run."""
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        yield


@pytest.fixture(scope="session")
def operator(cluster: Cluster) -> Cluster:
    """The cluster with CRD, RBAC and operator of this tree installed and rolled out."""
    demo.install(cluster)
    return cluster


@pytest.fixture
def namespace(operator: Cluster) -> Iterator[str]:
    """A namespace of the test's own, removed with all in it afterwards."""
    access.require_willing_nodes(operator)
    name = f"t-{uuid.uuid4().hex[:8]}"
    operator.kubectl("create", "namespace", name)
    wait_for(lambda: operator.get("serviceaccount", "default", "-n", name), 120, f"namespace {name} usable")
    yield name
    operator.kubectl("delete", "namespace", name, "--wait=false")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test also waits for the cluster, whose programs take eight minutes to build where none are cached."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.timeout(1800))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Keeps what the cluster looked like when a test failed, under e2e/out."""
    report = yield
    names = getattr(item, "funcargs", {})
    if report.when == "call" and report.failed and "cluster" in {*names, *getattr(item, "fixturenames", ())}:
        keep_evidence(item.name, names.get("namespace"))
    return report


def keep_evidence(test: str, namespace: str | None) -> None:
    OUT.mkdir(exist_ok=True)
    try:
        cluster = access.embedded()
        scope = ["-n", namespace] if namespace else ["-A"]
        parts = [
            "\n".join(access.unwilling(cluster.get("nodes")["items"])),
            cluster.kubectl("get", "all,configmap,inferenceservice", *scope, "-o", "wide", check=False),
            cluster.kubectl("get", "inferenceservice", *scope, "-o", "yaml", check=False),
            cluster.kubectl("get", "events", *scope, "--sort-by=.lastTimestamp", check=False),
            cluster.kubectl("describe", "pods", *scope, check=False),
            cluster.kubectl(
                "logs", "-n", "busload-system", "-l", "app.kubernetes.io/name=busload", "--tail=200", check=False
            ),
        ]
        if namespace:
            selector = "app.kubernetes.io/managed-by=busload"
            parts.append(cluster.kubectl("logs", "-n", namespace, "-l", selector, "--tail=200", check=False))
    except (access.NotReached, subprocess.TimeoutExpired) as error:
        parts = [f"no evidence: {error}"]
    file = Path(OUT / f"failed-{test}.txt")
    file.write_text("\n\n".join(parts))
    print(f"evidence of the failure: {file}", file=sys.stderr)
