"""The ConfigMap that keeps what was learned of a service when the operator starts anew. Nothing mounts it."""

from typing import Any

from busload_operator.api.v1alpha1 import InferenceService
from busload_operator.resources.labels import metadata

LEARNED_KEY = "learned.json"


def learned_config_map_name(name: str) -> str:
    """Name of the ConfigMap of the service of this name."""
    return f"{name}-learned"


def learned_config_map(service: InferenceService, text: str) -> dict[str, Any]:
    """What was learned, as `tuning.learned.Memory` writes it."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(service, learned_config_map_name(service.metadata.name)),
        "data": {LEARNED_KEY: text},
    }
