"""The ServiceAccount of the runtime pods. It has no rights and its token is not mounted."""

from typing import Any

from busload_operator.api.v1alpha1 import InferenceService
from busload_operator.resources.labels import metadata


def service_account(service: InferenceService) -> dict[str, Any]:
    """A ServiceAccount of the service's own, so that policies and pull secrets can name it."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata(service, service.metadata.name),
        "automountServiceAccountToken": False,
    }
