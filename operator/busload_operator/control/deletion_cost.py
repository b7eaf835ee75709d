"""Says which pods a Deployment should let go first: those with the least work under way.

A ReplicaSet that has to remove pods takes those that are not ready first, then those of the lowest
`controller.kubernetes.io/pod-deletion-cost` (Kubernetes documentation, "ReplicaSet", pod deletion cost). The pod that
goes drains; one with little to finish is gone soonest. Written only just before a Deployment gets smaller: the
annotation is not meant to follow load.
"""

import logging
from collections.abc import Mapping, Sequence

from busload_operator.control import pods as pod_words
from busload_operator.control.apply import MANAGER
from busload_operator.control.client import ApiError, Client
from busload_operator.control.kinds import PODS, Object
from busload_operator.control.logs import about

log = logging.getLogger(__name__)
ANNOTATION = "controller.kubernetes.io/pod-deletion-cost"
_MOST = 2**31 - 1
"""The annotation is a 32-bit number. A pod of which nothing is known gets it: it may be full."""


async def mark_deletion_cost(client: Client, pods: Sequence[Object], requests: Mapping[str, int]) -> None:
    """Gives each ready pod the number of its requests as cost. A pod that cannot be written to keeps its old cost:
    no sale waits for that."""
    for pod in pods:
        if not pod_words.is_ready(pod):
            continue
        metadata = pod["metadata"]
        cost = str(min(_MOST, requests.get(metadata["name"], _MOST)))
        if (metadata.get("annotations") or {}).get(ANNOTATION) == cost:
            continue
        body = {"metadata": {"uid": metadata["uid"], "annotations": {ANNOTATION: cost}}}
        try:
            await client.merge(PODS, metadata["namespace"], metadata["name"], body, MANAGER)
        except ApiError as error:
            if error.status != 404:
                log.warning("pod has no deletion cost: %s", error, extra=about(metadata["namespace"], metadata["name"]))
