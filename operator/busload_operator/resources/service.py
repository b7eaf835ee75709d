"""The Service in front of the runtime pods."""

from typing import Any

from busload_operator.api.v1alpha1 import InferenceService
from busload_operator.resources.labels import metadata, selector

PORT = 8000
PORT_NAME = "http"


def service(owner: InferenceService) -> dict[str, Any]:
    """One port for the API and the metrics; only ready pods get requests."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(owner, owner.metadata.name),
        "spec": {
            "type": "ClusterIP",
            "selector": selector(owner.metadata.name),
            "ports": [
                {"name": PORT_NAME, "port": PORT, "protocol": "TCP", "appProtocol": "http", "targetPort": PORT_NAME}
            ],
        },
    }


def endpoint(owner: InferenceService) -> str:
    """Base URL of the OpenAI API inside the cluster."""
    return f"http://{owner.metadata.name}.{owner.metadata.namespace}.svc:{PORT}/v1"
