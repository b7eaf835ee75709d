"""No request is lost while pods come and go: rolling update and scale-down under continuous requests."""

import json
import time

from e2e import services
from e2e.access import Cluster, wait_for


def test_rolling_update_and_scale_down_lose_no_request(operator: Cluster, namespace: str) -> None:
    """Neither of clients that keep their connections nor of those that open one for each request."""
    body = services.manifest("chat", scaling={"mode": "External"}, replicas=2)
    services.apply(operator, namespace, body)
    wait_for(lambda: len(running(operator, namespace)) == 2, 300, "two ready pods")
    before = {pod["metadata"]["name"] for pod in services.pods(operator, namespace, "chat")}

    options = {"requests": 100000, "concurrency": 2, "output_tokens": 24}
    loads = [
        services.Load(operator, namespace, "chat", connections=kind, **options) for kind in ("keep-alive", "fresh")
    ]
    try:
        time.sleep(3)
        body["spec"]["resources"]["requests"]["cpu"] = "210m"
        services.apply(operator, namespace, body)
        wait_for(lambda: replaced(operator, namespace, before), 600, "all pods replaced by the rolling update")
        time.sleep(3)
        operator.kubectl("scale", "inferenceservice", "chat", "-n", namespace, "--replicas=1")
        wait_for(lambda: len(all_pods(operator, namespace)) == 1, 300, "scaled down to one pod, the other drained")
        time.sleep(3)
        assert all(load.running() for load in loads), "a load client ended early"
    finally:
        for load in loads:
            load.process.terminate()
    for report in [load.report() for load in loads]:
        assert len(report.outcomes) > 20, "too few requests to show anything"
        assert report.errors == []


def running(cluster: Cluster, namespace: str) -> set[str]:
    """Names of the pods that are ready."""
    return {
        pod["metadata"]["name"]
        for pod in services.pods(cluster, namespace, "chat")
        if any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", []))
    }


def replaced(cluster: Cluster, namespace: str, before: set[str]) -> bool:
    now = running(cluster, namespace)
    return len(now) == 2 and not now & before and len(all_pods(cluster, namespace)) == 2


def all_pods(cluster: Cluster, namespace: str) -> list[str]:
    """All pods, those that drain too."""
    items = cluster.get("pods", "-n", namespace, "-l", "busload.dev/inferenceservice=chat")["items"]
    return [json.dumps(pod["metadata"]["name"]) for pod in items]
