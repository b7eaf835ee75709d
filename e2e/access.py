"""How the demo and the end-to-end tests reach a cluster: kubectl, and requests to a service inside it.

Two kinds: the embedded cluster (its own kubeconfig; requests enter the node's network namespace, so ClusterIPs and
endpoints work as for a client in the cluster) and the cluster of the current kubeconfig (kubectl port-forward).
"""

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


class NotReached(RuntimeError):
    """Something that was waited for did not happen in time; the message says what was seen last."""


@dataclass(frozen=True)
class Cluster:
    """One cluster. `enter` is the command prefix that puts a host program where the cluster's addresses work."""

    kubectl_path: str
    environment: dict[str, str] = field(default_factory=dict)
    enter: tuple[str, ...] | None = None

    def kubectl(self, *args: str, stdin: str | None = None, check: bool = True, timeout: float = 120) -> str:
        """Runs kubectl and returns its output (stdout, and stderr after it where `check` is off)."""
        done = subprocess.run(
            [self.kubectl_path, *args],
            env={**os.environ, **self.environment},
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        if check and done.returncode != 0:
            raise subprocess.CalledProcessError(done.returncode, done.args, done.stdout, done.stderr)
        return done.stdout if check else done.stdout + done.stderr

    def get(self, *args: str) -> Any:
        """`kubectl get ... -o json`, parsed."""
        return json.loads(self.kubectl("get", *args, "-o", "json"))

    def popen(self, *args: str) -> subprocess.Popen[str]:
        """kubectl in the background, its output on a pipe; the caller ends it."""
        environment = {**os.environ, **self.environment}
        return subprocess.Popen([self.kubectl_path, *args], env=environment, stdout=subprocess.PIPE, text=True)

    @contextmanager
    def reach(self, namespace: str, service: str, port: int = 8000) -> Iterator[tuple[str, list[str]]]:
        """Yields (base URL, command prefix) with which a host program reaches the service."""
        if self.enter is not None:
            address = self.get("service", service, "-n", namespace)["spec"]["clusterIP"]
            yield f"http://{address}:{port}", list(self.enter)
            return
        local = free_port()
        forward = self.popen("port-forward", "-n", namespace, f"service/{service}", f"{local}:{port}")
        try:
            wait_for(lambda: can_connect(local), 20, f"port-forward to {namespace}/{service}")
            yield f"http://127.0.0.1:{local}", []
        finally:
            forward.terminate()
            forward.wait(timeout=10)

    def program(self, prefix: list[str], module: str, *args: str) -> subprocess.Popen[str]:
        """A Python module of this repository, where `prefix` (from `reach`) puts it; its output on pipes."""
        command = [*prefix, sys.executable, "-m", module, *args]
        return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def embedded() -> Cluster:
    """The embedded cluster; raises `NotReached` when it is not up."""
    done = subprocess.run([sys.executable, "-m", "e2e.cluster", "env"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise NotReached(
            f"the embedded cluster is not up: {done.stderr.strip()}; `python3 -m e2e.cluster up` starts it"
        )
    values = dict(line.removeprefix("export ").split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    programs = shlex.split(values["PATH"].split(":")[0])[0]
    enter = (sys.executable, "-m", "e2e.cluster", "run", "--")
    return Cluster(f"{programs}/kubectl", {"KUBECONFIG": shlex.split(values["KUBECONFIG"])[0]}, enter)


def current() -> Cluster:
    """The cluster of the current kubeconfig, through the user's own kubectl."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        raise NotReached("CLUSTER=current needs kubectl on PATH")
    return Cluster(kubectl)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def can_connect(port: int) -> bool:
    with socket.socket() as client:
        client.settimeout(1)
        return client.connect_ex(("127.0.0.1", port)) == 0


def wait_for(condition: Callable[[], Any], seconds: float, what: str, every: float = 0.5) -> Any:
    """Polls until `condition` returns something true, which is returned. Raises `NotReached` after `seconds`.

    A condition that raises CalledProcessError, KeyError, IndexError or StopIteration is "not yet".
    """
    deadline = time.monotonic() + seconds
    last: object = None
    while True:
        try:
            if result := condition():
                return result
            last = result
        except (subprocess.CalledProcessError, KeyError, IndexError, StopIteration) as error:
            last = getattr(error, "stderr", None) or repr(error)
        if time.monotonic() > deadline:
            raise NotReached(f"{what}: not within {seconds:.0f} s; last seen: {last!r}")
        time.sleep(every)


def unwilling(nodes: list[dict[str, Any]]) -> list[str]:
    """Why nodes take no pods, in the words of their conditions; empty where every node takes them."""
    found = []
    for node in nodes:
        for item in node.get("status", {}).get("conditions", []):
            if item["status"] != ("True" if item["type"] == "Ready" else "False"):
                found.append(
                    f"{node['metadata']['name']}: {item['type']} is {item['status']}: {item.get('message', '')}"
                )
    return found


def require_willing_nodes(cluster: Cluster) -> None:
    """Without this, a full disk looks like an operator that does nothing, and every test waits to its end for it."""
    if found := unwilling(cluster.get("nodes")["items"]):
        raise NotReached(f"the cluster takes no pods: {'; '.join(found)}")


def condition(resource: dict[str, Any], kind: str) -> dict[str, Any]:
    """The condition of this type, or an empty one."""
    conditions = resource.get("status", {}).get("conditions", [])
    return next((c for c in conditions if c["type"] == kind), {"type": kind, "status": "Unknown", "reason": "Absent"})
