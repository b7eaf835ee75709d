"""Names, labels and ownership that all children of a service share."""

from typing import Any

from busload_operator.api.v1alpha1 import API_VERSION, KIND, InferenceService

SERVICE_LABEL = "busload.dev/inferenceservice"
MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
MANAGED_BY = "busload"


def selector(name: str) -> dict[str, str]:
    """Labels that select the pods of the service of this name. Part of the Deployment's identity: never change it."""
    return {SERVICE_LABEL: name, MANAGED_BY_LABEL: MANAGED_BY}


def selector_text(name: str) -> str:
    """The same as text, as `status.selector` holds it for autoscalers."""
    return ",".join(f"{key}={value}" for key, value in selector(name).items())


def labels(name: str) -> dict[str, str]:
    """Labels of every child and pod of the service of this name."""
    return {
        "app.kubernetes.io/name": "busload-runtime",
        "app.kubernetes.io/instance": name,
        **selector(name),
    }


def metadata(service: InferenceService, name: str) -> dict[str, Any]:
    """Metadata of a child. The owner reference lets Kubernetes delete it with the service, without the operator.

    Labels and annotations of the service are not copied: GitOps tools would take the child for one of theirs.
    """
    owner = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": service.metadata.name,
        "uid": service.metadata.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
    return {
        "name": name,
        "namespace": service.metadata.namespace,
        "labels": labels(service.metadata.name),
        "ownerReferences": [owner],
    }
