"""A service's life on a real cluster: apply, answer, change, crash, operator restart, delete."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from e2e import services
from e2e.access import Cluster, wait_for
from e2e.ask import QUESTION

CHILDREN = "serviceaccounts,configmaps,deployments.apps,services,pods"


def children(cluster: Cluster, namespace: str, name: str) -> list[str]:
    selector = f"busload.dev/inferenceservice={name}"
    items = cluster.get(CHILDREN, "-n", namespace, "-l", selector)["items"]
    return sorted(f"{item['kind']}/{item['metadata']['name']}" for item in items)


def test_apply_answers_changes_and_goes(operator: Cluster, namespace: str) -> None:
    services.apply(operator, namespace, services.manifest("chat"))
    service = services.wait_ready(operator, namespace, "chat")
    kinds = {child.split("/")[0] for child in children(operator, namespace, "chat")}
    assert kinds == {"ServiceAccount", "ConfigMap", "Deployment", "Service", "Pod"}
    assert not service["metadata"].get("finalizers"), "deletion must not need the operator"
    assert service["status"]["tuned"]["batchSize"] == 4

    with operator.reach(namespace, "chat") as (url, prefix):
        ask = operator.program(prefix, "e2e.ask", "--url", f"{url}/v1", "--model", "chat", QUESTION)
        answer, errors = ask.communicate(timeout=120)
    assert ask.returncode == 0, errors
    assert "Paris" in answer

    row = operator.kubectl("get", "inferenceservices", "-n", namespace).splitlines()
    assert row[0].split() == ["NAME", "READY", "MODEL", "REPLICAS", "BATCH", "KV", "WAIT", "BOTTLENECK", "AGE"]
    assert row[1].split()[:4] == ["chat", "True", "smollm2-135m-instruct", "1"]

    before = {pod["metadata"]["name"] for pod in services.pods(operator, namespace, "chat")}
    bounds = {"maxSequenceLength": {"min": 512, "max": 768}, "batchSize": {"initial": 4, "min": 1, "max": 2}}
    changed = services.manifest("chat")
    changed["spec"]["bounds"].update(bounds)
    changed["spec"]["bounds"]["batchSize"]["initial"] = 2
    services.apply(operator, namespace, changed)

    def clamped() -> bool:
        tuned = services.get(operator, namespace, "chat")["status"]["tuned"]
        return bool(tuned["batchSize"] == 2 and tuned["maxSequenceLength"] == 768)

    wait_for(clamped, 300, "tuned values inside the new bounds")
    wait_for(lambda: applied(operator, namespace, "busload_limit_batch_size") == 2, 300, "the pod runs batchSize 2")
    assert {pod["metadata"]["name"] for pod in services.pods(operator, namespace, "chat")} == before, "no pod restarted"

    operator.kubectl("delete", "inferenceservice", "chat", "-n", namespace, "--wait")
    wait_for(lambda: not children(operator, namespace, "chat"), 300, "all children gone")


def applied(cluster: Cluster, namespace: str, metric: str) -> float | None:
    """A metric's value as the service's pod exports it now."""
    with cluster.reach(namespace, "chat") as (url, prefix):
        program = cluster.program(prefix, "e2e.fetch", f"{url}/metrics")
        text, _ = program.communicate(timeout=120)
    values = [line.split()[-1] for line in text.splitlines() if line.split(" ")[0] == metric]
    return float(values[0]) if values else None


def test_children_go_with_the_operator_stopped(operator: Cluster, namespace: str) -> None:
    services.apply(operator, namespace, services.manifest("chat"))
    services.wait_ready(operator, namespace, "chat")
    deployment = ("deployment/busload-operator", "-n", "busload-system")
    operator.kubectl("scale", *deployment, "--replicas=0")
    try:
        selector = ("-n", "busload-system", "-l", "app.kubernetes.io/name=busload")
        wait_for(lambda: not operator.get("pods", *selector)["items"], 300, "operator stopped")
        operator.kubectl("delete", "inferenceservice", "chat", "-n", namespace, "--wait")
        wait_for(lambda: not children(operator, namespace, "chat"), 300, "all children gone without the operator")
    finally:
        operator.kubectl("scale", *deployment, "--replicas=2")
        operator.kubectl("rollout", "status", *deployment, "--timeout=240s", timeout=260)


def test_a_crashed_engine_is_not_ready_and_comes_back(operator: Cluster, namespace: str) -> None:
    services.apply(operator, namespace, services.manifest("chat"))
    services.wait_ready(operator, namespace, "chat")
    pod = services.pods(operator, namespace, "chat")[0]["metadata"]["name"]
    kill = "for p in /proc/[0-9]*; do grep -qa [e]ngine.process $p/cmdline && kill -9 ${p#/proc/}; done; true"
    with watching_ready(operator, namespace) as seen:
        operator.kubectl("exec", "-n", namespace, pod, "--", "/bin/sh", "-c", kill)
        # Watched, for on a fast machine the container is back before anybody asks.
        not_ready = wait_for(lambda: [line for line in seen if line.startswith("False ")], 300, "Ready=False")
    assert not_ready[0].removeprefix("False ").strip(), "the condition has a message"

    def restarted() -> bool:
        status = services.pods(operator, namespace, "chat")[0]["status"]
        return bool(status["containerStatuses"][0]["restartCount"] >= 1)

    wait_for(restarted, 300, "the container to be restarted")
    services.wait_ready(operator, namespace, "chat")
    after = services.pods(operator, namespace, "chat")
    assert [p["metadata"]["name"] for p in after] == [pod], "the container was restarted, not the pod replaced"


@contextmanager
def watching_ready(cluster: Cluster, namespace: str) -> Iterator[list[str]]:
    """Status and message of the Ready condition, a line for each version of the service while this runs."""
    ready = '{.status.conditions[?(@.type=="Ready")]'
    line = f'jsonpath={ready}.status}} {ready}.message}}{{"\\n"}}'
    watch = cluster.popen("get", "inferenceservice", "chat", "-n", namespace, "--watch", "-o", line)
    seen: list[str] = []

    def read() -> None:
        for text in watch.stdout or ():
            seen.append(text)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        wait_for(lambda: seen, 60, "the first line of the watch")
        yield seen
    finally:
        watch.terminate()
        reader.join()


def test_an_operator_restart_writes_nothing(operator: Cluster, namespace: str) -> None:
    services.apply(operator, namespace, services.manifest("chat"))
    services.wait_ready(operator, namespace, "chat")
    settle(operator, namespace)
    before = versions(operator, namespace)
    started = time.time()
    deployment = ("deployment/busload-operator", "-n", "busload-system")
    operator.kubectl("rollout", "restart", *deployment)
    operator.kubectl("rollout", "status", *deployment, "--timeout=240s", timeout=260)
    wait_for(lambda: leader_since(operator) > started, 300, "a leader of the new pods")
    time.sleep(20)  # several reconcile and scrape rounds of the new leader
    assert versions(operator, namespace) == before


def versions(cluster: Cluster, namespace: str) -> dict[str, str]:
    """Who wrote what last: resource versions of the service and its children (pods left to the kubelet)."""
    kinds = "inferenceservices,serviceaccounts,configmaps,deployments.apps,services"
    items = cluster.get(kinds, "-n", namespace)["items"]
    return {f"{i['kind']}/{i['metadata']['name']}": i["metadata"]["resourceVersion"] for i in items}


def settle(cluster: Cluster, namespace: str) -> None:
    """Waits until nothing in the namespace was written for 15 s: a bottleneck is told once it lasted 10 s."""
    last, since = versions(cluster, namespace), time.monotonic()

    def quiet() -> bool:
        nonlocal last, since
        if (now := versions(cluster, namespace)) != last:
            last, since = now, time.monotonic()
        return time.monotonic() - since > 15

    wait_for(quiet, 300, "a settled namespace", every=1)


def leader_since(cluster: Cluster) -> float:
    """When the present leader took the lease (seconds of the wall clock); 0 while there is none."""
    lease = cluster.get("lease", "busload-operator", "-n", "busload-system")["spec"]
    if not lease.get("holderIdentity"):
        return 0.0
    acquired = lease["acquireTime"].split(".")[0].rstrip("Z") + "Z"
    return float(time.mktime(time.strptime(acquired, "%Y-%m-%dT%H:%M:%SZ"))) - time.timezone


def test_a_bad_manifest_is_refused_with_a_helpful_text(operator: Cluster, namespace: str) -> None:
    bad = services.manifest("chat")
    bad["spec"]["bounds"]["replicas"] = {"min": 3, "max": 1}
    text = operator.kubectl("apply", "-n", namespace, "-f", "-", stdin=json.dumps(bad), check=False)
    assert "spec.bounds.replicas" in text
    assert "min" in text
    assert "max" in text
