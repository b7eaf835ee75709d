"""The ConfigMap that carries the limits document into the pods."""

from typing import Any

from busload_operator.api.v1alpha1 import InferenceService
from busload_operator.resources.labels import metadata
from busload_runtime.contract import LIMITS_KEY, LimitsDocument


def limits_config_map_name(name: str) -> str:
    """Name of the ConfigMap of the service of this name."""
    return f"{name}-limits"


def limits_config_map(service: InferenceService, document: LimitsDocument) -> dict[str, Any]:
    """The limits document as a ConfigMap. Pods mount it as a directory and see changes without a restart."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(service, limits_config_map_name(service.metadata.name)),
        "data": {LIMITS_KEY: document.to_json()},
    }
