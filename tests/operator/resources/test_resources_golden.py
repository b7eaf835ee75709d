"""Everything that stands for a service, against files that a reviewer reads. `UPDATE_GOLDEN=1` rewrites them."""

import os
from pathlib import Path

import pytest
import yaml

from busload_operator.api.v1alpha1 import InferenceService
from busload_operator.resources.build import children
from busload_operator.resources.initial_limits import initial_limits
from busload_operator.resources.settings import RuntimeSettings
from busload_runtime.contract import LimitsDocument

GOLDEN = Path(__file__).parent / "golden"
METADATA = {"name": "chat", "namespace": "team-a", "uid": "0d5b3f0e-6a54-4a4c-9f0f-6f2f3a3a1b11"}
SETTINGS = RuntimeSettings("example.org/busload-runtime:1.0", gpu_image="example.org/busload-runtime-gpu:1.0")
CLAIM = {"persistentVolumeClaim": {"claimName": "models", "path": "llama/chat-q8_0.gguf"}}
SPECS = {
    "smallest": {"model": {"source": {"bundled": "smollm2-135m-instruct"}}},
    "claim": {
        "model": {"source": CLAIM, "servedName": "team/chat"},
        "bounds": {"batchSize": {"initial": 4, "max": 32}, "maxSequenceLength": {"max": 32768}},
        "resources": {"requests": {"cpu": "3500m", "memory": "6Gi"}, "limits": {"cpu": "8", "memory": "7.5Gi"}},
        "apiKeys": {"secretName": "chat-api-keys"},
    },
    "gpu": {
        "model": {"source": CLAIM, "weightPrecision": "FP8"},
        "resources": {
            "requests": {"cpu": "8", "memory": "16Gi"},
            "limits": {"memory": "32Gi", "nvidia.com/gpu": 1},
            "gpuMemory": "76Gi",
        },
    },
    "gpu-unmeasured": {
        "model": {"source": {"bundled": "smollm2-135m-instruct"}},
        "resources": {"limits": {"memory": "8Gi", "nvidia.com/gpu": "1"}},
    },
}


@pytest.mark.parametrize("name", SPECS)
def test_children(name: str):
    service = InferenceService.model_validate({"metadata": METADATA, "spec": SPECS[name]})
    limits = LimitsDocument(1, initial_limits(service.spec))
    built = children(service, SETTINGS, limits, replicas=1)
    text = yaml.safe_dump_all(built, sort_keys=False, width=120)
    golden = GOLDEN / f"{name}.yaml"
    if os.environ.get("UPDATE_GOLDEN") == "1":
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8"), "if the change is meant: UPDATE_GOLDEN=1, then read the diff"
