"""InferenceServices for the end-to-end tests, and what tests ask of them."""

import json
import subprocess
from typing import Any

from busload_runtime.bench.outcome import Level, levels_from_json
from e2e.access import Cluster, NotReached, condition, wait_for


def manifest(name: str, **spec: Any) -> dict[str, Any]:
    """A small service on the bundled model; keyword arguments replace parts of `spec`."""
    body: dict[str, Any] = {
        "model": {"source": {"bundled": "smollm2-135m-instruct"}},
        "objectives": {"timeToFirstToken": "2s", "interTokenLatency": "1s"},
        "bounds": {
            "maxSequenceLength": {"min": 512, "max": 1024},
            "batchSize": {"initial": 4, "min": 1, "max": 32},
            "replicas": {"min": 1, "max": 2},
        },
        "resources": {"requests": {"cpu": "200m", "memory": "512Mi"}, "limits": {"memory": "768Mi"}},
    }
    body.update(spec)
    return {
        "apiVersion": "busload.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": {"name": name},
        "spec": body,
    }


def apply(cluster: Cluster, namespace: str, body: dict[str, Any]) -> None:
    cluster.kubectl("apply", "-n", namespace, "-f", "-", stdin=json.dumps(body))


def get(cluster: Cluster, namespace: str, name: str) -> dict[str, Any]:
    service: dict[str, Any] = cluster.get("inferenceservice", name, "-n", namespace)
    return service


def ready(cluster: Cluster, namespace: str, name: str) -> dict[str, Any] | None:
    """The service, once Ready is True for its present generation."""
    service = get(cluster, namespace, name)
    seen = condition(service, "Ready")
    current = service.get("status", {}).get("observedGeneration") == service["metadata"]["generation"]
    return service if current and seen["status"] == "True" else None


def wait_ready(cluster: Cluster, namespace: str, name: str, seconds: float = 300) -> dict[str, Any]:
    """Waits until the service is Ready. When it is not in time, the error holds its Ready condition."""
    service: dict[str, Any] = wait_for(
        lambda: ready(cluster, namespace, name) or NotReadyYet(condition(get(cluster, namespace, name), "Ready")),
        seconds,
        f"InferenceService {namespace}/{name} Ready",
        every=1,
    )
    return service


class NotReadyYet(dict[str, Any]):
    """A condition that counts as false, so that a failed wait prints it."""

    def __bool__(self) -> bool:
        return False


def pods(cluster: Cluster, namespace: str, name: str) -> list[dict[str, Any]]:
    """The service's pods that are not being deleted."""
    items = cluster.get("pods", "-n", namespace, "-l", f"busload.dev/inferenceservice={name}")["items"]
    return [pod for pod in items if "deletionTimestamp" not in pod["metadata"]]


class Load:
    """A running `busload bench` inside the cluster's network: clients in a closed loop.

    Options are its flags. SIGTERM (`process.terminate()`) lets running requests finish.
    """

    def __init__(self, cluster: Cluster, namespace: str, name: str, **options: object) -> None:
        self._reach = cluster.reach(namespace, name)
        url, prefix = self._reach.__enter__()
        # Words, as real clients send them; every request in the report, whose reader decides what a failure means.
        flags = ["--warmup=0", "--prompt=words", "--input-tokens=16", "--json=-", "--records", "--allow-errors"]
        flags += [f"--{key.replace('_', '-')}={value}" for key, value in ({"seconds": 600} | options).items()]
        command = ("bench", f"--url={url}/v1", f"--model={name}", *flags)
        self.process = cluster.program(prefix, "busload_operator.cli", *command)

    def running(self) -> bool:
        return self.process.poll() is None

    def report(self, seconds: float = 600) -> Level:
        """Waits for the client's end and returns what it saw. Raises `NotReached` when it saw nothing."""
        try:
            output, errors = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        finally:
            self._reach.__exit__(None, None, None)
        if self.process.returncode != 0:
            raise NotReached(f"the load client failed: {errors.strip() or 'it was ended before it began'}")
        (level,) = levels_from_json(json.loads(output))
        return level
