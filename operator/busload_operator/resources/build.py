"""All children of a service, in the order in which they are applied."""

from typing import Any

from busload_operator.api.v1alpha1 import InferenceService
from busload_operator.resources.deployment import deployment
from busload_operator.resources.limits_config_map import limits_config_map
from busload_operator.resources.service import service
from busload_operator.resources.service_account import service_account
from busload_operator.resources.settings import RuntimeSettings
from busload_runtime.contract import LimitsDocument


def children(
    owner: InferenceService, settings: RuntimeSettings, limits: LimitsDocument, replicas: int
) -> list[dict[str, Any]]:
    """Bodies for server-side apply: each holds exactly the fields that the operator owns.

    What the pods need comes before the Deployment, so that none of them waits for it.
    """
    return [
        service_account(owner),
        limits_config_map(owner, limits),
        service(owner),
        deployment(owner, settings, replicas),
    ]
