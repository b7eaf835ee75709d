"""The node's life: up, down, status. It is one process tree in namespaces of its own (node.sh), and one relay on the
machine that listens on 127.0.0.1 for the API server."""

from __future__ import annotations

import datetime
import os
import shutil
import ssl
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from . import cgroups, containers, host, pki, processes, programs, render
from . import settings as s
from .settings import HERE, Settings
from .shell import Failure, Progress, exclusive, last_lines, run, wait_until, write

# What a node takes while the end-to-end tests run (images unpacked, logs, etcd), with something to spare.
DISK_GIB = 3


def node_file(settings: Settings) -> Path:
    return settings.state / "node.pid"


def relay_file(settings: Settings) -> Path:
    return settings.state / "relay.pid"


def exists(settings: Settings) -> bool:
    """Whether there is a cluster's state, running or not."""
    return (settings.state / "format").exists()


def node_process(settings: Settings) -> processes.Process | None:
    """`unshare`, the parent of the node's process 1. It is in the node's network namespace itself."""
    return processes.read(node_file(settings))


def environment(settings: Settings, kubeconfig: Path) -> dict[str, str]:
    return {**os.environ, "KUBECONFIG": str(kubeconfig), "PATH": f"{settings.node_bin}:{os.environ.get('PATH', '')}"}


def kubectl(settings: Settings, *arguments: str, stdin: str | None = None, check: bool = True) -> str:
    """kubectl as administrator, from this machine, over the relay."""
    argv: list[str | Path] = [
        settings.node_bin / "kubectl",
        "--kubeconfig",
        settings.kubeconfig,
        "--request-timeout=10s",
        *arguments,
    ]
    return run(argv, stdin=stdin, check=check).stdout


def api_port(settings: Settings) -> int | None:
    """The port that the running relay listens on."""
    file = settings.state / "api.port"
    return int(file.read_text()) if relay_running(settings) and file.exists() else None


def relay_running(settings: Settings) -> bool:
    return processes.read(relay_file(settings)) is not None


def api_ready(settings: Settings) -> bool:
    """Asks /readyz as administrator. False for every way in which it may not answer."""
    port = api_port(settings)
    if port is None:
        return False
    try:
        context = ssl.create_default_context(cafile=str(settings.pki / "ca.crt"))
        context.load_cert_chain(settings.pki / "admin.crt", settings.pki / "admin.key")
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )
        with opener.open(f"https://127.0.0.1:{port}/readyz", timeout=3) as answer:
            return bool(answer.status == 200)
    except (OSError, ValueError):
        return False


def heartbeat_since(settings: Settings, moment: float) -> bool:
    """True when the node is Ready by a heartbeat since `moment`: a kept state still says Ready from the last run."""
    path = '{.status.conditions[?(@.type=="Ready")].status} {.status.conditions[?(@.type=="Ready")].lastHeartbeatTime}'
    words = kubectl(settings, "get", "node", s.NODE, "-o", f"jsonpath={path}", check=False).split()
    if len(words) != 2 or words[0] != "True":
        return False
    return datetime.datetime.fromisoformat(words[1]).timestamp() >= int(moment)


def dns_answers(settings: Settings) -> bool:
    """Asks the cluster's DNS, from the node's network, for the API server's own name."""
    process = node_process(settings)
    if process is None:
        return False
    name = "kubernetes.default.svc.cluster.local"
    argv = ["nsenter", "-t", str(process.pid), "-n", "timeout", "1", "busybox", "nslookup", name, s.DNS_IP]
    return run(argv, check=False).returncode == 0


@dataclass(frozen=True)
class Health:
    """What `status` shows. Everything must be true for a cluster that can be used."""

    node: bool
    relay: bool
    api: bool
    ready: bool
    dns: bool

    @property
    def good(self) -> bool:
        return self.node and self.relay and self.api and self.ready and self.dns


def health(settings: Settings) -> Health:
    node = node_process(settings) is not None
    api = node and api_ready(settings)
    ready = api and heartbeat_since(settings, time.time() - 600)  # the kubelet repeats itself every 5 minutes
    return Health(node, relay_running(settings), api, ready, ready and dns_answers(settings))


def _check_state(settings: Settings) -> None:
    marker = settings.state / "format"
    if not marker.exists():
        if settings.state.exists() and any(settings.state.iterdir()):
            raise Failure(
                f"{settings.state} is not empty and no cluster's state: set BUSLOAD_CLUSTER_STATE to another folder"
            )
        settings.state.mkdir(parents=True, exist_ok=True)
        settings.state.chmod(0o700)
        write(marker, s.STATE_FORMAT)
    if marker.read_text() != s.STATE_FORMAT:
        raise Failure(
            f"the cluster's state in {settings.state} was made by another version of this tool: "
            "start anew by `python3 -m e2e.cluster down --wipe`"
        )


def _clean_up(settings: Settings) -> None:
    """Removes what a node that has ended left behind: files, pods' cgroups, the pods' addresses."""
    for name in ("node.pid", "api.sock", "containerd.sock", "containerd.sock.ttrpc"):
        (settings.state / name).unlink(missing_ok=True)
    shutil.rmtree(settings.state / "var/lib/cni", ignore_errors=True)
    cgroups.remove(settings.cgroup)


def _start_relay(settings: Settings) -> None:
    """Starts the relay unless it runs, and writes the kubeconfig for the port that it got."""
    if relay_running(settings):
        return
    file = settings.state / "api.port"
    preferred = int(file.read_text()) if file.exists() else s.DEFAULT_API_PORT
    port = host.choose_port(settings.api_port, preferred)
    listen = f"TCP-LISTEN:{port},bind=127.0.0.1,fork,reuseaddr"
    processes.start(
        relay_file(settings), ["socat", listen, f"UNIX-CONNECT:{settings.api_socket}"], settings.logs / "host-relay.log"
    )
    write(file, str(port))
    pki.write_admin_kubeconfig(settings, port)


def _start_node(settings: Settings) -> None:
    folder = host.cni_folder()
    assert folder is not None  # host.install_packages saw to it
    cgroup = host.cgroup_version()
    machine = render.Machine(folder, host.proxy_mode(host.kernel_release()), cgroup)
    host.load_kernel_modules()
    cgroups.make(settings.cgroup)
    for file, text in render.files(settings, machine).items():
        write(file, text)
    namespaces = ["--net", "--mount", "--pid", "--uts", "--ipc"]
    argv: list[str | Path] = [
        "unshare",
        *namespaces,
        "--fork",
        "--kill-child",
        "--mount-proc",
        HERE / "node.sh",
        settings.state,
    ]
    processes.start(node_file(settings), argv, settings.logs / "node.log")


def _wait(settings: Settings, what: str, condition: Callable[[], bool], seconds: float, log: str) -> None:
    """Waits for a part of the node; when the node ends meanwhile, or time is up, says what the part's log said last."""

    def holds() -> bool:
        if node_process(settings) is None:
            raise Failure(f"the node ended while starting; node.log ends with:\n{_tail(settings, 'node')}")
        return condition()

    try:
        wait_until(what, holds, seconds)
    except Failure as error:
        raise Failure(f"{error}\n{settings.logs / log}.log ends with:\n{_tail(settings, log)}") from error


def _tail(settings: Settings, log: str) -> str:
    file = settings.logs / f"{log}.log"
    return last_lines(file.read_text(errors="replace")) if file.exists() else "(nothing)"


def up(settings: Settings, archives: list[Path], coredns_image: str, progress: Progress) -> None:
    """Brings the node up, completes one that is half up, leaves a healthy one alone. Raises Failure with a log's end.

    archives: the images of pause and CoreDNS. The programs must be built (programs.build).
    """
    host.require_root("starting the cluster")
    _check_state(settings)
    began = time.time()
    settings.logs.mkdir(exist_ok=True)
    with exclusive(
        settings.state / "up.lock", lambda: progress.note("another `up` or `down` is at work: waiting for it")
    ):
        running = node_process(settings) is not None
        if running:
            _start_relay(settings)
            if health(settings).good:
                progress.note("the cluster is up already")
                return
            progress.note("the node runs but is not healthy: completing it")
        else:
            processes.stop(relay_file(settings))
            _clean_up(settings)
            programs.link(settings)
            pki.make(settings)
            _start_node(settings)
            _start_relay(settings)
        with progress.step("containerd answers"):
            _wait(settings, "containerd", lambda: containers.answers(settings), 60, "containerd")
        containers.load(settings, archives, progress)
        with progress.step("API server ready"):
            _wait(settings, "the API server", lambda: api_ready(settings), 120, "kube-apiserver")
        kubectl(settings, "apply", "-f", "-", stdin=render.coredns(coredns_image))
        with progress.step("node Ready"):
            since = began if not running else time.time() - 600
            _wait(settings, "the node to be Ready", lambda: heartbeat_since(settings, since), 120, "kubelet")
        with progress.step("cluster DNS answers"):
            _wait(settings, "the cluster's DNS", lambda: dns_answers(settings), 120, "kubelet")


def down(settings: Settings, progress: Progress, *, wipe: bool) -> None:
    """Ends the node with all its pods, and the relay. With `wipe` its state goes too; the cache of programs stays."""
    host.require_root("stopping the cluster")
    if not exists(settings):
        progress.note(f"there is no cluster in {settings.state}")
        return
    with exclusive(
        settings.state / "up.lock", lambda: progress.note("another `up` or `down` is at work: waiting for it")
    ):
        processes.stop(relay_file(settings))
        node = node_process(settings)
        if node:
            inside = [process for pid in processes.children(node.pid) if (process := processes.find(pid))]
            processes.stop(node_file(settings))
            wait_until("the node's processes to end", lambda: not any(map(processes.Process.alive, inside)), 20)
        _clean_up(settings)
        if wipe:
            shutil.rmtree(settings.state)
    progress.note("the cluster is down" + (" and its state removed" if wipe else "; its state is kept"))
