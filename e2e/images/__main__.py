"""Command line: python3 -m e2e.images, by a Python that has pip (.venv/bin/python)."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from e2e.cluster import host
from e2e.cluster.settings import Settings
from e2e.cluster.shell import Failure, Progress

from . import app, base, deliver, wheels
from .store import Store, building, digest

EPILOG = """\
Builds localhost/busload-runtime:dev and localhost/busload-operator:dev by buildah, without any image registry: the base
image is made of the distribution's own packages. Archives and everything else are kept in $BUSLOAD_CACHE
(~/.cache/busload); what did not change is not built, loaded or pushed again.

  .venv/bin/python -m e2e.images build                        both images
  .venv/bin/python -m e2e.images build runtime-gpu            localhost/busload-runtime-gpu:dev (5 GB)
  .venv/bin/python -m e2e.images build --load embedded        and into the embedded cluster
  REGISTRY=ghcr.io/me .venv/bin/python -m e2e.images build --load current
  .venv/bin/python -m e2e.images lock                         after a change of dependencies in pyproject.toml
  .venv/bin/python -m e2e.images context runtime /tmp/c --python 3.13 && docker build -f runtime/Dockerfile /tmp/c
"""


def build(settings: Settings, arguments: argparse.Namespace, progress: Progress) -> int:
    host.require_linux()
    host.require_root("building images")
    if bool(arguments.base) != bool(arguments.python):
        raise Failure("--base and --python go together: name the base image and the Python version in it, such as 3.13")
    store = Store(settings)
    with building(settings, progress):
        names = arguments.name or app.NAMES
        bases = {name: _base(store, name, arguments, progress) for name in names}
        own = wheels.own(settings, progress)
        images = [
            deliver.Image(app.reference(name), app.build(store, name, bases[name], own, progress)) for name in names
        ]
    if arguments.load == "embedded":
        deliver.to_embedded(store, images, progress)
    elif arguments.load == "current":
        deliver.to_current(store, images, progress)
    return 0


def _base(store: Store, name: str, arguments: argparse.Namespace, progress: Progress) -> base.Base:
    if arguments.base:
        return base.Base(arguments.base, arguments.python, digest(arguments.base))
    return base.build_python(store, progress, compiler=name == app.GPU_RUNTIME)


def lock(_: Settings, arguments: argparse.Namespace, progress: Progress) -> int:
    wheels.refresh_locks(progress, upgrade=arguments.upgrade)
    return 0


def context(settings: Settings, arguments: argparse.Namespace, progress: Progress) -> int:
    app.write_context(settings, arguments.name, arguments.python, arguments.folder, progress)
    return 0


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="python3 -m e2e.images", epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    sub = commands.add_parser("build", help="build images", description="Build images; prints sizes and seconds.")
    sub.add_argument(
        "name",
        nargs="*",
        choices=[[], *app.NAMES, app.GPU_RUNTIME],
        metavar="NAME",
        help="runtime, operator (default: both); runtime-gpu",
    )
    sub.add_argument(
        "--base", metavar="IMAGE", help="another base image, with python3 and a shell (default: made here)"
    )
    sub.add_argument("--python", metavar="3.X", help="the Python version in --base")
    sub.add_argument(
        "--load",
        choices=["embedded", "current"],
        help="then load them: into the embedded cluster, or into the current kubeconfig's (kind, minikube, k3d; "
        "pushed to $REGISTRY where that is set)",
    )
    sub.set_defaults(function=build)
    text = "Bring all locks up to date with pyproject.toml (needs uv)."
    sub = commands.add_parser("lock", help=text, description=text)
    sub.add_argument("--upgrade", action="store_true", help="take the newest allowed version of every dependency")
    sub.set_defaults(function=lock)
    text = "Fill a folder for `docker build -f NAME/Dockerfile FOLDER`."
    sub = commands.add_parser("context", help=text, description=text)
    sub.add_argument("name", choices=[*app.NAMES, app.GPU_RUNTIME])
    sub.add_argument("folder", type=Path)
    sub.add_argument("--python", default="3.13", metavar="3.X", help="the base image's Python version (default 3.13)")
    sub.set_defaults(function=context)
    return top


def main() -> int:
    arguments = parser().parse_args()
    try:
        code: int = arguments.function(Settings.from_environment(), arguments, Progress())
    except Failure as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; run it again to go on", file=sys.stderr)
        return 130
    return code


if __name__ == "__main__":
    sys.exit(main())
