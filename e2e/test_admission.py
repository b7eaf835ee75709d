"""A real API server judges the table of manifests as the pydantic models do, with the texts a user must see.

`kubectl create --dry-run=server` runs admission whole and stores nothing.
"""

import importlib.util
import json
import re
import subprocess
import sys
from typing import Any

import pytest
import yaml

from busload_operator.api.v1alpha1 import InferenceService
from e2e.access import ROOT, Cluster


def load_table() -> Any:
    """The table of the unit tests. Loaded by path: tests are no package."""
    spec = importlib.util.spec_from_file_location("manifest_cases", ROOT / "tests/operator/api/manifest_cases.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


TABLE = load_table()


def create(cluster: Cluster, manifest: dict[str, Any]) -> str:
    return cluster.kubectl(
        "create", "--dry-run=server", "-n", "default", "-o", "json", "-f", "-", stdin=json.dumps(manifest)
    )


@pytest.mark.parametrize("case", TABLE.good(), ids=lambda case: case.name)
def test_good(operator: Cluster, case: Any) -> None:
    stored = json.loads(create(operator, case.manifest))
    assert stored["spec"] == InferenceService.model_validate(case.manifest).spec.model_dump(
        by_alias=True, exclude_none=True
    )


@pytest.mark.parametrize("case", TABLE.bad(), ids=lambda case: case.name)
def test_bad(operator: Cluster, case: Any) -> None:
    with pytest.raises(subprocess.CalledProcessError) as refused:
        create(operator, case.manifest)
    text = refused.value.stderr
    assert case.field in text
    assert case.server in text


def test_columns_of_both_kinds_of_source(operator: Cluster, namespace: str) -> None:
    """The MODEL column has one path for two places; the API server must find whichever there is."""
    claim = {"persistentVolumeClaim": {"claimName": "models", "path": "llama/chat.gguf"}}
    for name, source in (("bundled", {"bundled": "smollm2-135m-instruct"}), ("claimed", claim)):
        manifest = {**TABLE.SMALLEST, "metadata": {"name": name}, "spec": {"model": {"source": source}}}
        operator.kubectl("create", "-n", namespace, "-f", "-", stdin=json.dumps(manifest))
    rows = operator.kubectl("get", "inferenceservices", "-n", namespace).splitlines()
    assert rows[0].split() == ["NAME", "READY", "MODEL", "REPLICAS", "BATCH", "KV", "WAIT", "BOTTLENECK", "AGE"]
    column = rows[0].index("MODEL")
    assert [row[column:].split()[0] for row in rows[1:]] == ["smollm2-135m-instruct", "llama/chat.gguf"]
    operator.kubectl("delete", "inferenceservices", "--all", "-n", namespace)


def test_scale_is_refused_outside_the_bounds(operator: Cluster, namespace: str) -> None:
    manifest = {**TABLE.SMALLEST, "spec": {**TABLE.SMALLEST["spec"], "scaling": {"mode": "External"}}}
    operator.kubectl("create", "-n", namespace, "-f", "-", stdin=json.dumps(manifest))
    operator.kubectl("scale", "inferenceservice/case", "-n", namespace, "--replicas=3")
    path = f"/apis/busload.dev/v1alpha1/namespaces/{namespace}/inferenceservices/case/scale"
    scale = json.loads(operator.kubectl("get", "--raw", path))
    assert scale["spec"]["replicas"] == 3
    with pytest.raises(subprocess.CalledProcessError) as refused:
        operator.kubectl("scale", "inferenceservice/case", "-n", namespace, "--replicas=5")
    assert "replicas 5 is outside bounds.replicas, 1 to 4" in refused.value.stderr
    operator.kubectl("delete", "inferenceservices", "--all", "-n", namespace)


def test_the_documented_status_is_stored_whole(operator: Cluster, namespace: str) -> None:
    """A field that the schema lacks would be dropped without a word."""
    found = re.search(r"```yaml\n(spec:.*?)```", (ROOT / "docs/architecture.md").read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    status = yaml.safe_load(found[1])["status"]
    times = {"lastTransitionTime": "2026-01-01T00:00:00Z", "reason": "ReplicasReady", "message": "", "status": "True"}
    status["conditions"] = [{"type": "Ready", "observedGeneration": 3, **times}]
    operator.kubectl("create", "-n", namespace, "-f", "-", stdin=json.dumps(TABLE.SMALLEST))
    patch = ("patch", "inferenceservice", "case", "-n", namespace, "--subresource=status", "--type=merge")
    stored = json.loads(
        operator.kubectl(*patch, "--dry-run=server", "-o", "json", "-p", json.dumps({"status": status}))
    )["status"]
    assert {name: stored[name] for name in status} == status
    operator.kubectl("delete", "inferenceservices", "--all", "-n", namespace)


@pytest.mark.parametrize("golden", ["smallest", "claim"])
def test_runtime_pods_meet_the_restricted_standard(operator: Cluster, namespace: str, golden: str) -> None:
    """Pod security admission judges the pod of the golden Deployment; the namespace enforces `restricted`."""
    operator.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    text = (ROOT / f"tests/operator/resources/golden/{golden}.yaml").read_text(encoding="utf-8")
    (deployment,) = [child for child in yaml.safe_load_all(text) if child["kind"] == "Deployment"]
    template = deployment["spec"]["template"]
    pod: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "pod", "namespace": namespace, "labels": template["metadata"]["labels"]},
        "spec": {**template["spec"], "serviceAccountName": "default"},
    }
    create_pod = ("create", "--dry-run=server", "--validate=strict", "-f", "-")
    operator.kubectl(*create_pod, stdin=json.dumps(pod))
    # The standard is in force: it refuses the same pod with one right too many.
    container = {**pod["spec"]["containers"][0], "securityContext": {"allowPrivilegeEscalation": True}}
    with pytest.raises(subprocess.CalledProcessError) as refused:
        operator.kubectl(*create_pod, stdin=json.dumps({**pod, "spec": {**pod["spec"], "containers": [container]}}))
    assert 'violates PodSecurity "restricted' in refused.value.stderr
