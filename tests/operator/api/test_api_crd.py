import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from manifest_cases import SMALLEST, good
from typer.testing import CliRunner

from busload_operator.api import crd
from busload_operator.api.structural import NotStructural
from busload_operator.api.v1alpha1 import InferenceService
from busload_operator.cli import build_app

COMMITTED = Path(__file__).parents[3] / "crds" / "inferenceservices.busload.dev.yaml"
DEFINITION = crd.custom_resource_definition()
VERSION = DEFINITION["spec"]["versions"][0]
SCHEMA = VERSION["schema"]["openAPIV3Schema"]


def filled(value: Any, schema: dict[str, Any]) -> Any:
    """The value with defaults, by the API server's rule: a default counts only where its parent exists."""
    if not isinstance(value, dict):
        return value
    value = {key: item for key, item in value.items() if item is not None}
    for name, child in schema.get("properties", {}).items():
        if name not in value and "default" in child:
            value[name] = child["default"]
        if name in value:
            value[name] = filled(value[name], child)
    return value


def test_committed_file_is_current():
    assert COMMITTED.read_text(encoding="utf-8") == crd.render(), (
        "the models changed: run `busload crd -o crds/inferenceservices.busload.dev.yaml` and commit the file"
    )


@pytest.mark.parametrize("case", good(), ids=lambda case: case.name)
def test_the_schema_and_the_models_have_the_same_defaults(case):
    by_model = InferenceService.model_validate(case.manifest).spec.model_dump(by_alias=True, exclude_none=True)
    assert filled(case.manifest["spec"], SCHEMA["properties"]["spec"]) == by_model


def test_the_smallest_manifest_has_these_defaults():
    spec = InferenceService.model_validate(SMALLEST).spec.model_dump(by_alias=True, exclude_none=True)
    assert spec == {
        "model": {"source": {"bundled": "smollm2-135m-instruct"}, "weightPrecision": "Auto"},
        "objectives": {"timeToFirstToken": "2s", "interTokenLatency": "100ms", "percentile": 99},
        "bounds": {
            "maxSequenceLength": {"min": 1024, "max": 8192},
            "kvCachePercent": {"min": 20, "max": 90},
            "batchSize": {"min": 1, "max": 64},
            "replicas": {"min": 1, "max": 4},
        },
        "tuning": {"mode": "Auto"},
        "scaling": {"mode": "Observed"},
        "replicas": 1,
        "resources": {"requests": {"cpu": "2", "memory": "2Gi"}, "limits": {"memory": "2Gi"}},
    }


def test_names_columns_and_subresources():
    assert DEFINITION["spec"]["names"]["categories"] == ["busload"]
    assert "shortNames" not in DEFINITION["spec"]["names"]
    columns = VERSION["additionalPrinterColumns"]
    shown = [column["name"].upper() for column in columns if not column.get("priority")]
    assert shown == ["READY", "MODEL", "REPLICAS", "BATCH", "KV", "WAIT", "BOTTLENECK", "AGE"]
    assert [column["name"].upper() for column in columns if column.get("priority")] == ["ENDPOINT", "REASON"]
    assert VERSION["subresources"] == {
        "status": {},
        "scale": {
            "specReplicasPath": ".spec.replicas",
            "statusReplicasPath": ".status.replicas",
            "labelSelectorPath": ".status.selector",
        },
    }


def test_every_field_of_the_spec_is_described():
    def bare(node: dict[str, Any], path: str) -> list[str]:
        if "properties" not in node:
            return []
        found = [] if "description" in node else [path]
        return found + [name for key, child in node["properties"].items() for name in bare(child, f"{path}.{key}")]

    assert bare(SCHEMA["properties"]["spec"], "spec") == []
    assert bare(SCHEMA["properties"]["status"], "status") == []


def test_it_stays_small():
    assert len(COMMITTED.read_bytes()) < 64 * 1024


def test_a_scale_path_to_nowhere_is_refused(monkeypatch):
    monkeypatch.setitem(crd._SCALE, "labelSelectorPath", ".status.nothing")
    with pytest.raises(NotStructural, match=r"scale.labelSelectorPath .status.nothing"):
        crd.custom_resource_definition()


def test_spec_replicas_without_a_default_is_refused():
    schema = {
        "properties": {
            "spec": {"properties": {"replicas": {"type": "integer"}}},
            "status": SCHEMA["properties"]["status"],
        }
    }
    with pytest.raises(NotStructural, match="must have a default"):
        crd._check_scale(schema)


def test_command_writes_and_prints_the_same(tmp_path):
    target = tmp_path / "crd.yaml"
    printed = CliRunner().invoke(build_app(), ["crd"])
    written = CliRunner().invoke(build_app(), ["crd", "--output", str(target)])
    assert (printed.exit_code, written.exit_code) == (0, 0)
    assert printed.output == target.read_text(encoding="utf-8") == crd.render()
    assert yaml.safe_load(printed.output) == DEFINITION


def test_command_names_a_file_that_cannot_be_written(tmp_path):
    result = CliRunner().invoke(build_app(), ["crd", "--output", str(tmp_path / "none" / "crd.yaml")])
    assert result.exit_code == 2
    assert "--output" in result.output
    assert "none/crd.yaml" in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_rendering_does_not_depend_on_the_process():
    code = "from busload_operator.api.crd import render; print(render(), end='')"
    one = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert one.stdout == crd.render()
