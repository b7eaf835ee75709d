"""The pydantic models judge the table of manifests; the end-to-end tests give the same table to an API server."""

import re
from pathlib import Path

import pytest
import yaml
from manifest_cases import SMALLEST, Case, bad, good

from busload_operator.api.status import Status
from busload_operator.api.v1alpha1 import InferenceService, check, check_authored

ARCHITECTURE = Path(__file__).parents[3] / "docs" / "architecture.md"
GOOD, BAD = good(), bad()


def test_names_of_cases_are_unique():
    names = [case.name for case in GOOD + BAD]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("case", GOOD, ids=lambda case: case.name)
def test_good(case: Case):
    assert check_authored(case.manifest) == []


@pytest.mark.parametrize("case", BAD, ids=lambda case: case.name)
def test_bad(case: Case):
    found = [str(problem) for problem in check_authored(case.manifest)]
    assert any(text.startswith(case.field) and case.model in text for text in found), found


def test_unknown_fields_of_a_newer_version_are_ignored_when_read():
    manifest = {**SMALLEST, "spec": {**SMALLEST["spec"], "futureField": {"a": 1}}, "futurePart": []}
    assert check(manifest) == []
    assert [problem.field for problem in check_authored(manifest)] == ["futurePart", "spec.futureField"]


def test_all_problems_are_named_at_once():
    spec = {
        **SMALLEST["spec"],
        "replicas": "2",
        "bounds": {
            "batchSize": {"initial": 70, "min": 65},
            "kvCachePercent": {"initial": 95},
            "maxSequenceLength": {"initial": 512},
            "replicas": {"min": 9},
        },
    }
    found = {problem.field for problem in check_authored({**SMALLEST, "spec": spec})}
    assert found == {
        "spec.replicas",
        "spec.bounds.batchSize.min",
        "spec.bounds.batchSize.initial",
        "spec.bounds.kvCachePercent.initial",
        "spec.bounds.maxSequenceLength.initial",
        "spec.bounds.replicas.min",
    }


def test_the_documented_example_has_no_unknown_field():
    found = re.search(r"```yaml\n(spec:.*?)```", ARCHITECTURE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    example = yaml.safe_load(found[1])
    assert check_authored({**SMALLEST, "spec": example["spec"]}) == []
    Status.model_validate(example["status"], extra="forbid")


def test_a_stored_status_is_read():
    status = {
        "observedGeneration": 3,
        "conditions": [
            {
                "type": "Ready",
                "status": "True",
                "reason": "ReplicasReady",
                "message": "",
                "lastTransitionTime": "2026-01-01T00:00:00Z",
            }
        ],
        "bottleneck": "SomethingNew",
        "decisions": [
            {
                "id": 1,
                "time": "2026-01-01T00:00:00Z",
                "knob": "batchSize",
                "from": "4",
                "to": "8",
                "reason": "WaitFromBatchLimit",
                "message": "m",
                "inputs": [{"name": "batch", "value": "3.9"}],
            }
        ],
    }
    service = InferenceService.model_validate({**SMALLEST, "status": status})
    assert service.status.decisions[0].from_ == "4"
    assert service.status.model_dump(by_alias=True, exclude_none=True, mode="json") == status
