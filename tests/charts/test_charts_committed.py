"""What can be said about the charts without Helm. e2e/test_charts.py renders and installs them with it."""

import json
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
CHARTS = ROOT / "charts"
INSTALL: list[dict[str, Any]] = list(yaml.safe_load_all((CHARTS / "install.yaml").read_text(encoding="utf-8")))


def found(kind: str, name: str) -> dict[str, Any]:
    (only,) = [obj for obj in INSTALL if obj["kind"] == kind and obj["metadata"]["name"] == name]
    return only


def test_the_chart_and_install_yaml_carry_the_generated_definition():
    generated = (ROOT / "crds" / "inferenceservices.busload.dev.yaml").read_text(encoding="utf-8")
    files = CHARTS / "busload-crds" / "files"
    hint = "run charts/render.sh and commit its result"
    assert (files / "inferenceservices.busload.dev.yaml").read_text(encoding="utf-8") == generated, hint
    definition = found("CustomResourceDefinition", "inferenceservices.busload.dev")
    assert definition["spec"] == yaml.safe_load(generated)["spec"], hint


def test_install_yaml_starts_with_what_the_rest_needs():
    assert [obj["kind"] for obj in INSTALL[:2]] == ["Namespace", "CustomResourceDefinition"]
    namespaced = {"ServiceAccount", "Role", "RoleBinding", "Deployment", "PodDisruptionBudget", "Service"}
    assert {o["metadata"].get("namespace") for o in INSTALL if o["kind"] in namespaced} == {"busload-system"}


def test_the_operators_rights_are_the_least():
    """A change here is a change of what an attacker gets with the operator's token: read it twice."""
    rules = found("ClusterRole", "busload-operator")["rules"]
    rights = {
        (group, resource): rule["verbs"]
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    child = ["get", "list", "watch", "create", "patch", "delete"]
    assert rights == {
        ("busload.dev", "inferenceservices"): ["list", "watch"],
        ("busload.dev", "inferenceservices/status"): ["patch"],
        ("busload.dev", "inferenceservices/finalizers"): ["update"],
        ("apps", "deployments"): child,
        ("", "configmaps"): child,
        ("", "services"): child,
        ("", "serviceaccounts"): child,
        ("", "pods"): ["list", "watch", "patch"],
        ("", "events"): ["create", "patch"],
    }
    lease = found("Role", "busload-operator-lease")["rules"]
    assert [(rule["verbs"], rule.get("resourceNames")) for rule in lease] == [
        (["create"], None),
        (["get", "update"], ["busload-operator"]),
    ]


def test_the_operators_pods_are_restricted():
    pod = found("Deployment", "busload-operator")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_every_setting_of_the_deployment_is_one_that_the_operator_reads():
    from busload_operator.control.settings import Settings

    (container,) = found("Deployment", "busload-operator")["spec"]["template"]["spec"]["containers"]
    names = {item["name"] for item in container["env"]}
    assert names <= {field.alias for field in Settings.model_fields.values()}
    fixed = {item["name"]: item["value"] for item in container["env"] if item.get("value")}
    settings = Settings.from_environment(fixed)
    assert settings.runtime_image == "localhost/busload-runtime:dev"
    assert settings.http_port == container["ports"][0]["containerPort"]


def test_every_value_is_in_the_schema_and_nothing_else_is_allowed():
    def closed(values: Any, schema: dict[str, Any], definitions: dict[str, Any], path: str) -> list[str]:
        if "$ref" in schema:
            schema = definitions[schema["$ref"].rsplit("/", 1)[1]]
        if not isinstance(values, dict) or "properties" not in schema:
            return []
        problems = [] if schema.get("additionalProperties") is False else [f"{path} allows any key"]
        for key, value in values.items():
            if key in schema["properties"]:
                problems += closed(value, schema["properties"][key], definitions, f"{path}.{key}")
            else:
                problems.append(f"{path}.{key} is not in the schema")
        return problems

    for chart in ("busload", "busload-crds"):
        values = yaml.safe_load((CHARTS / chart / "values.yaml").read_text(encoding="utf-8"))
        schema = json.loads((CHARTS / chart / "values.schema.json").read_text(encoding="utf-8"))
        assert closed(values, schema, schema.get("definitions", {}), chart) == []
