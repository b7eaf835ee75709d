"""Command line: python3 -m e2e.cluster. Needs the standard library alone: it runs before anything is installed."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

from . import containers, host, node, programs
from .settings import Settings
from .shell import Failure, Progress

EPILOG = """\
A real Kubernetes on this one machine, in namespaces of its own: etcd, control plane, kubelet, kube-proxy and
cluster DNS, with pods in containerd. It touches neither the machine's network nor ~/.kube/config. Needs Debian or
Ubuntu, root and Go.

  python3 -m e2e.cluster up                    (first builds the programs, 7 minutes on 2 cores; later: seconds)
  eval "$(python3 -m e2e.cluster env)"         (KUBECONFIG and PATH for this shell)
  kubectl get pods -A
  python3 -m e2e.cluster run -- curl http://10.96.0.1    (a program of this machine inside the node's network)
  python3 -m e2e.cluster down

environment:
  BUSLOAD_CACHE           programs and images, kept (default ~/.cache/busload)
  BUSLOAD_CLUSTER_STATE   this cluster's data, logs and kubeconfig (default $BUSLOAD_CACHE/cluster)
  BUSLOAD_API_PORT        port of 127.0.0.1 for the API server (default: the first free one from 16443)
"""


def packages(settings: Settings, arguments: argparse.Namespace, progress: Progress) -> int:
    lock = settings.cache / "locks" / "packages"
    host.install_packages(lock, progress, images_only=arguments.images_only)
    progress.note("all system packages are there")
    return 0


def build(settings: Settings, arguments: argparse.Namespace, progress: Progress) -> int:
    host.require_linux()
    for name in arguments.name or list(programs.PROGRAMS):
        print(programs.build(settings, name, progress))
    if node.exists(settings):
        programs.link(settings)
    return 0


def up(settings: Settings, _: argparse.Namespace, progress: Progress) -> int:
    from e2e.images import base, store

    host.require_linux()
    host.require_root("starting the cluster")
    if node.node_process(settings) is None:
        host.require_space(settings.state, node.DISK_GIB, "a node with its images")
    host.install_packages(settings.cache / "locks" / "packages", progress)
    for name in programs.NEEDED:
        programs.build(settings, name, progress)
    with store.building(settings, progress):
        archives = base.build_system(store.Store(settings), progress)
    node.up(settings, archives, base.COREDNS_IMAGE, progress)
    progress.note('use it: eval "$(python3 -m e2e.cluster env)"; kubectl get pods -A')
    return 0


def down(settings: Settings, arguments: argparse.Namespace, progress: Progress) -> int:
    node.down(settings, progress, wipe=arguments.wipe)
    return 0


def require_node(settings: Settings) -> int:
    """The pid to enter the node's namespaces by."""
    process = node.node_process(settings)
    if process is None:
        raise Failure(f"no cluster runs with its state in {settings.state}: start it by `python3 -m e2e.cluster up`")
    return process.pid


def load(settings: Settings, arguments: argparse.Namespace, progress: Progress) -> int:
    require_node(settings)
    host.require_root("loading images")
    containers.load(settings, arguments.archive, progress)
    return 0


def run(settings: Settings, arguments: argparse.Namespace, _: Progress) -> int:
    pid = require_node(settings)
    host.require_root("entering the node's network")
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        raise Failure("no command given: python3 -m e2e.cluster run -- COMMAND [ARGUMENT...]")
    environment = node.environment(settings, settings.node_kubeconfig)
    for name in ("http_proxy", "https_proxy", "all_proxy"):  # no proxy can be reached from in there
        environment.pop(name, None)
        environment.pop(name.upper(), None)
    host.enter_network(pid, command, environment)


def status(settings: Settings, _: argparse.Namespace, progress: Progress) -> int:
    health = node.health(settings)
    port = node.api_port(settings)
    lines = {
        "node processes": health.node,
        f"relay on 127.0.0.1:{port}" if port else "relay": health.relay,
        "API server": health.api,
        "node Ready": health.ready,
        "cluster DNS": health.dns,
    }
    for name, good in lines.items():
        print(f"{name:24} {'yes' if good else 'NO'}")
    print(
        f"{'state':24} {settings.state}\n{'kubeconfig':24} {settings.kubeconfig}\n{'audit log':24} {settings.audit_log}"
    )
    print(f"{'logs':24} {settings.logs}")
    if not health.good:
        progress.note("not healthy: `python3 -m e2e.cluster up` starts or completes it; logs as above")
    return 0 if health.good else 1


def env(settings: Settings, _: argparse.Namespace, __: Progress) -> int:
    require_node(settings)
    print(f"export KUBECTL={shlex.quote(str(settings.node_bin / 'kubectl'))}")
    print(f"export KUBECONFIG={shlex.quote(str(settings.kubeconfig))}")
    print(f'export PATH={shlex.quote(str(settings.node_bin))}:"$PATH"')
    return 0


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="python3 -m e2e.cluster", epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, function: object, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(function=function)
        return sub

    sub = command("packages", packages, "Install the system packages that are missing, by apt-get (as root).")
    sub.add_argument("--images-only", action="store_true", help="only what building images needs, no node")
    sub = command(
        "build", build, "Build programs from their Go modules into the cache; prints their paths. Needs Go, not root."
    )
    sub.add_argument(
        "name",
        nargs="*",
        choices=[[], *programs.PROGRAMS],
        metavar="NAME",
        help=f"{', '.join(programs.PROGRAMS)} (default: all)",
    )
    command(
        "up",
        up,
        "Bring the cluster up: packages, programs, images, node. Does nothing to a healthy one; mends one half up.",
    )
    sub = command("down", down, "End the cluster and all its pods. State is kept for the next `up`.")
    sub.add_argument("--wipe", action="store_true", help="remove the state too: objects, images, logs, certificates")
    sub = command("load", load, "Load images (docker-archive files) into the node; skips those it has already.")
    sub.add_argument("archive", nargs="+", type=Path, metavar="IMAGE.tar")
    sub = command(
        "run",
        run,
        "Run a program of this machine inside the node's NETWORK namespace, where Services (10.96.x.x), pods "
        "(10.244.x.x) and cluster DNS (10.96.0.10) can be reached. Files, users and processes are the machine's own; "
        "KUBECONFIG is set.",
    )
    sub.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="the program and its arguments")
    command("status", status, "Show what runs and where its files are. Exit status 0 when healthy, else 1.")
    command("env", env, 'Print shell lines that set KUBECTL, KUBECONFIG and PATH for this cluster: eval "$(... env)".')
    return top


def main() -> int:
    arguments = parser().parse_args()
    try:
        status_code: int = arguments.function(Settings.from_environment(os.environ), arguments, Progress())
    except Failure as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; run it again to go on", file=sys.stderr)
        return 130
    return status_code


if __name__ == "__main__":
    sys.exit(main())
