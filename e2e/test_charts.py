"""The charts with real Helm: lint, drift of install.yaml, install, upgrade, uninstall.

Installed into a namespace of their own with cluster-wide names, so the operator that the other tests use is removed
first and brought back at the end.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e import demo
from e2e.access import ROOT, Cluster, wait_for
from e2e.cluster import programs
from e2e.cluster.settings import Settings

CHARTS = ROOT / "charts"
NAMESPACE = "busload-helm"
DEFINITION = "inferenceservices.busload.dev"
SERVICE = {
    "apiVersion": "busload.dev/v1alpha1",
    "kind": "InferenceService",
    "metadata": {"name": "kept"},
    "spec": {"model": {"source": {"bundled": "smollm2-135m-instruct"}}},
}


@dataclass(frozen=True)
class Helm:
    """The Helm that the cluster's tool builds, on a cluster if one is given."""

    path: str
    environment: dict[str, str]

    def __call__(self, *args: str, timeout: float = 240) -> str:
        done = subprocess.run(
            [self.path, *args], env=self.environment, capture_output=True, text=True, timeout=timeout, cwd=CHARTS
        )
        if done.returncode != 0:
            raise AssertionError(f"helm {' '.join(args)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def manifests(self, *args: str) -> list[dict[str, Any]]:
        return [obj for obj in yaml.safe_load_all(self.template(*args)) if obj]

    def template(self, *args: str) -> str:
        # A Helm that is built from its module takes Kubernetes for 1.20 when it has no cluster to ask.
        return self("template", "busload", *args, "--kube-version", "1.34.0")


@pytest.fixture(scope="session")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    subprocess.run([sys.executable, "-m", "e2e.cluster", "build", "helm"], cwd=ROOT, check=True, timeout=600)
    home = str(tmp_path_factory.mktemp("helm"))
    path = programs.path(Settings.from_environment(), "helm")
    return Helm(str(path), {**os.environ, "HELM_CACHE_HOME": home, "HELM_CONFIG_HOME": home})


@pytest.mark.parametrize("chart", ["busload", "busload-crds"])
def test_lint(helm: Helm, chart: str) -> None:
    helm("lint", "--strict", chart)


def test_install_yaml_is_current(helm: Helm, tmp_path: Path) -> None:
    rendered = tmp_path / "install.yaml"
    subprocess.run(
        [CHARTS / "render.sh", rendered], env={**helm.environment, "HELM": helm.path}, check=True, timeout=60
    )
    assert rendered.read_text() == (CHARTS / "install.yaml").read_text(), "run charts/render.sh and commit its result"


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ("replica=3", "replica"),
        ("image.operator.tagg=1", "tagg"),
        ("image.pullPolicy=Sometimes", "pullPolicy"),
        ("logLevel=LOUD", "logLevel"),
        ("recording.maxMib=0", "recording/maxMib"),
        ("memoryBandwidth=fast", "memoryBandwidth"),
        ("image.runtime.tag=", "image.*.tag is empty"),
        ("watchNamespaces={UPPER}", "watchNamespaces"),
    ],
)
def test_wrong_values_are_refused_by_name(helm: Helm, values: str, text: str) -> None:
    with pytest.raises(AssertionError) as refused:
        helm.template("busload", "--set", values)
    assert text in str(refused.value)


def test_watch_namespaces_end_the_rights_there(helm: Helm) -> None:
    found = helm.manifests("busload", "-n", NAMESPACE, "--set", "watchNamespaces={a,b},userRoles=false")
    assert not [obj for obj in found if obj["kind"].startswith("ClusterRole")]
    roles = {(obj["metadata"]["namespace"], obj["metadata"]["name"]) for obj in found if obj["kind"] == "Role"}
    assert roles == {
        ("a", "busload-operator"),
        ("b", "busload-operator"),
        (NAMESPACE, "busload-operator-lease"),
    }
    (deployment,) = [obj for obj in found if obj["kind"] == "Deployment"]
    environment = {v["name"]: v.get("value") for v in deployment["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert environment["BUSLOAD_WATCH_NAMESPACES"] == "a,b"


def test_options(helm: Helm) -> None:
    digest = "sha256:" + "0" * 64
    found = helm.manifests(
        "busload",
        "--set",
        f"image.operator.digest={digest},metrics.service=true,podDisruptionBudget=false,podLabels.team=x",
    )
    kinds = [obj["kind"] for obj in found]
    assert "Service" in kinds
    assert "PodDisruptionBudget" not in kinds
    (deployment,) = [obj for obj in found if obj["kind"] == "Deployment"]
    template = deployment["spec"]["template"]
    assert template["spec"]["containers"][0]["image"] == f"localhost/busload-operator@{digest}"
    assert template["metadata"]["labels"]["team"] == "x"


def test_an_image_for_gpus(helm: Helm) -> None:
    values = "image.gpuRuntime.repository=example.org/busload-runtime-gpu,image.gpuRuntime.tag=1.0"
    (deployment,) = [obj for obj in helm.manifests("busload", "--set", values) if obj["kind"] == "Deployment"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    environment = {v["name"]: v.get("value") for v in container["env"]}
    assert environment["BUSLOAD_GPU_RUNTIME_IMAGE"] == "example.org/busload-runtime-gpu:1.0"


def test_recordings_and_bandwidth(helm: Helm) -> None:
    values = "recording.enabled=true,recording.maxMib=8,memoryBandwidth=20"
    found = helm.manifests("busload", "--set", values)
    (deployment,) = [obj for obj in found if obj["kind"] == "Deployment"]
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    environment = {v["name"]: v.get("value") for v in container["env"]}
    assert environment["BUSLOAD_MEMORY_BANDWIDTH"] == "20"
    assert "BUSLOAD_GPU_RUNTIME_IMAGE" not in environment
    assert environment["BUSLOAD_RECORD_MAX_MIB"] == "8"
    assert environment["BUSLOAD_RECORD_DIRECTORY"] in [mount["mountPath"] for mount in container["volumeMounts"]]
    assert {"name": "recordings", "emptyDir": {"sizeLimit": "1Gi"}} in pod["volumes"]


def test_keep_is_an_annotation_of_the_definition(helm: Helm) -> None:
    (kept,) = helm.manifests("busload-crds")
    (dropped,) = helm.manifests("busload-crds", "--set", "keep=false,annotations.a=b")
    assert kept["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert dropped["metadata"]["annotations"] == {"a": "b"}


@pytest.fixture
def bare(operator: Cluster) -> Iterator[Cluster]:
    """The cluster without busload. Afterwards it is as the other tests need it."""
    try:
        remove(operator)
        yield operator
    finally:
        remove(operator)
        demo.install(operator)


def remove(cluster: Cluster) -> None:
    """Everything of install.yaml and of a release, the definition with all services included."""
    cluster.kubectl("delete", "-f", str(CHARTS / "install.yaml"), "--ignore-not-found", "--timeout=240s", timeout=260)
    cluster.kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found", "--timeout=240s", timeout=260)


def test_install_upgrade_uninstall(bare: Cluster, helm: Helm) -> None:
    release = Helm(helm.path, {**helm.environment, **bare.environment})
    in_namespace = ("-n", NAMESPACE)
    release("install", "busload-crds", "busload-crds", *in_namespace, "--create-namespace", "--wait", "--timeout=120s")
    bare.kubectl("wait", "--for=condition=Established", f"crd/{DEFINITION}", "--timeout=110s")
    bare.kubectl("label", "namespace", NAMESPACE, "pod-security.kubernetes.io/enforce=restricted")
    release("install", "busload", "busload", *in_namespace, "--wait", "--timeout=220s")
    wait_for(lambda: lease_holder(bare), 300, "an operator that leads")
    bare.kubectl("create", "-n", "default", "-f", "-", stdin=json.dumps(SERVICE))
    wait_for(lambda: bare.get("deployment", "kept", "-n", "default"), 300, "the child Deployment")

    # One replica fewer, and another log level, which must roll the pods.
    release(
        "upgrade", "busload", "busload", *in_namespace, "--set", "replicas=1,logLevel=DEBUG", "--wait", "--timeout=220s"
    )
    assert bare.get("deployment", "busload-operator", *in_namespace)["spec"]["replicas"] == 1
    # Helm's --wait is content with no pod at all where one may be unavailable.
    bare.kubectl("rollout", "status", "deployment/busload-operator", *in_namespace, "--timeout=240s", timeout=260)

    # The definition outlives its release, and with it the service and its pods.
    release("uninstall", "busload", *in_namespace, "--wait")
    release("uninstall", "busload-crds", *in_namespace, "--wait")
    assert bare.get("inferenceservice", "kept", "-n", "default")["metadata"]["name"] == "kept"
    assert bare.get("deployment", "kept", "-n", "default")["metadata"]["name"] == "kept"
    assert leftovers(bare) == []
    # Without an operator deletion works as well, and takes the children along.
    bare.kubectl("delete", "inferenceservice", "kept", "-n", "default", "--timeout=110s")
    wait_for(lambda: "NotFound" in missing(bare), 300, "the child Deployment gone")
    # The definition that was kept is taken over again.
    release("install", "busload-crds", "busload-crds", *in_namespace, "--wait", "--timeout=120s")


def lease_holder(cluster: Cluster) -> str:
    return str(cluster.get("lease", "busload-operator", "-n", NAMESPACE)["spec"]["holderIdentity"])


def leftovers(cluster: Cluster) -> list[str]:
    kinds = "clusterrole,clusterrolebinding,role,rolebinding,deployment,serviceaccount,poddisruptionbudget"
    lines = cluster.kubectl("get", kinds, "-A", "-o", "name", "-l", "app.kubernetes.io/name=busload").splitlines()
    return sorted(lines)


def missing(cluster: Cluster) -> str:
    return cluster.kubectl("get", "deployment", "kept", "-n", "default", check=False)
