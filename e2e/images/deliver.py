"""Getting images into the cluster that will run them: the embedded one, or the one of the current kubeconfig."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster import containers, node
from e2e.cluster.shell import Failure, Progress, run

from .store import Store


@dataclass(frozen=True)
class Image:
    reference: str
    archive: Path


@dataclass(frozen=True)
class Context:
    """The current context of the user's kubeconfig. minikube: whether minikube wrote it (names there are free)."""

    name: str
    minikube: bool


def to_embedded(store: Store, images: list[Image], progress: Progress) -> None:
    if node.node_process(store.settings) is None:
        raise Failure("the embedded cluster is not up: python3 -m e2e.cluster up")
    containers.load(store.settings, [image.archive for image in images], progress)


def parse_context(view: str) -> Context:
    """From `kubectl config view --minify -o json`. Raises Failure where there is no current context."""
    config = json.loads(view)
    name = config.get("current-context", "")
    if not name:
        raise Failure("kubectl has no current context: choose one by `kubectl config use-context NAME`")
    clusters = config.get("clusters") or []
    extensions = [item for cluster in clusters for item in cluster["cluster"].get("extensions") or []]
    providers = {(item.get("extension") or {}).get("provider") for item in extensions}
    return Context(name, "minikube.sigs.k8s.io" in providers)


def loader(context: Context) -> tuple[str, Callable[[Path], list[str]]] | None:
    """(program, its arguments for an archive) that loads images into a local cluster; None for any other cluster."""
    name = context.name
    if context.minikube:
        return "minikube", lambda archive: ["--profile", name, "image", "load", str(archive)]
    if name.startswith("kind-"):
        return "kind", lambda archive: ["load", "image-archive", str(archive), "--name", name.removeprefix("kind-")]
    if name.startswith("k3d-"):
        return "k3d", lambda archive: ["image", "import", str(archive), "--cluster", name.removeprefix("k3d-")]
    return None


def pushed_name(reference: str, registry: str) -> str:
    """localhost/busload-runtime:dev -> REGISTRY/busload-runtime:dev. Raises Failure for an address with a scheme."""
    registry = registry.rstrip("/")
    if "://" in registry or not registry:
        raise Failure(f"REGISTRY={registry!r} must be HOST[:PORT][/PATH] without a scheme, for example ghcr.io/me")
    return f"{registry}/{reference.removeprefix('localhost/')}"


def push_arguments(reference: str, registry: str) -> list[str]:
    """buildah's arguments. A registry on this machine speaks plain HTTP, as everybody's tools assume."""
    local = registry.split("/")[0].split(":")[0] in ("localhost", "127.0.0.1")
    insecure = ["--tls-verify=false"] if local else []
    return ["push", "--quiet", *insecure, reference, f"docker://{pushed_name(reference, registry)}"]


def to_current(store: Store, images: list[Image], progress: Progress) -> None:
    """Pushes to $REGISTRY where that is set, else loads into the current context's kind, minikube or k3d cluster."""
    registry = os.environ.get("REGISTRY", "")
    if registry:
        for image in images:
            with progress.step(f"{pushed_name(image.reference, registry)} pushed"):
                store.buildah(*push_arguments(image.reference, registry))
        return
    context = parse_context(run(["kubectl", "config", "view", "--minify", "-o", "json"]).stdout)
    found = loader(context)
    if found is None:
        raise Failure(
            f"the current context {context.name!r} is no kind, minikube or k3d cluster, so images cannot be loaded "
            "into it: set REGISTRY=HOST/PATH to a registry that its nodes can pull from"
        )
    program, arguments = found
    if not shutil.which(program):
        raise Failure(f"the current context {context.name!r} is a {program} cluster, but {program} is not on PATH")
    for image in images:
        with progress.step(f"{image.reference} loaded into {context.name}"):
            run([program, *arguments(image.archive)])
