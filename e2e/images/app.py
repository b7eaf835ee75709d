"""The two images of this project: what goes into their build, and when they have to be built again."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster.settings import Settings
from e2e.cluster.shell import Failure, Progress, write

from . import wheels
from .base import Base
from .store import Store, digest

NAMES = ("runtime", "operator")
"""What is built and loaded when nobody asks for anything else."""
GPU_RUNTIME = "runtime-gpu"
"""The runtime's image with the libraries for GPUs: 5 GB more, so it is built only by name."""
INSTALLER = Path(__file__).resolve().parent / "install.py"


def reference(name: str) -> str:
    return f"localhost/busload-{name}:dev"


@dataclass(frozen=True)
class Inputs:
    """The folders of a build context that the Dockerfile's steps mount, and the lock that belongs into some of them.

    pip: pip's wheel and install.py. steps: by name (model, dependencies, accelerator, code), the folder with the step's
    wheels; None: the step is left out.
    """

    pip: Path
    steps: dict[str, Path | None]
    locks: dict[str, str]

    def keys(self) -> dict[str, str]:
        """The Dockerfile's build arguments: what each step's result depends on."""
        installer = INSTALLER.read_text()
        return {
            f"{step.upper()}_KEY": ""
            if folder is None
            else digest(installer, self.locks.get(step, ""), folder if step == "code" else folder.name)
            for step, folder in self.steps.items()
        }

    def lay_out(self, context: Path) -> None:
        """Fills an empty folder, by hard links where possible: there are 200 MB of wheels."""
        (context / "pip").mkdir(parents=True)
        _link_or_copy(next(self.pip.glob("pip-*.whl")), context / "pip")
        _link_or_copy(INSTALLER, context / "pip")
        for step, folder in self.steps.items():
            (context / step).mkdir()
            for wheel in folder.glob("*.whl") if folder else ():
                _link_or_copy(wheel, context / step)
            if step in self.locks:
                write(context / step / "requirements.lock", self.locks[step])


def _link_or_copy(source: Path, folder: Path) -> None:
    try:
        os.link(source, folder / source.name)
    except OSError:  # another file system
        shutil.copy2(source, folder)


def dockerfile(name: str) -> Path:
    return wheels.ROOT / ("runtime" if name == GPU_RUNTIME else name) / "Dockerfile"


def inputs(settings: Settings, name: str, python: str, own: wheels.Own, progress: Progress) -> Inputs:
    """Downloads what the image needs for this Python version, besides `own`, which both images share."""
    locked = locks_of(name)
    steps = {step: lock and wheels.wheelhouse(settings, lock, python, progress) for step, lock in locked.items()}
    locks = {step: wheels.for_python(lock.read_text(), python) for step, lock in locked.items() if lock}
    return Inputs(own.pip, {**steps, "code": own.wheel}, locks)


def locks_of(name: str) -> dict[str, Path | None]:
    """The lock of each of the Dockerfile's steps; None for a step that this image leaves out. Raises Failure for a lock
    that pyproject.toml has left behind."""
    if name == "operator":
        wheels.check_lock("operator")
        return {"dependencies": wheels.LOCKS["operator"]}
    wheels.check_lock("runtime")
    if name == GPU_RUNTIME:
        wheels.check_lock("gpu")
    accelerator = wheels.LOCKS["gpu"] if name == GPU_RUNTIME else None
    return {"model": wheels.MODEL_LOCK, "dependencies": wheels.LOCKS["runtime"], "accelerator": accelerator}


def build(store: Store, name: str, base: Base, own: wheels.Own, progress: Progress) -> Path:
    """The image's docker-archive, built only when something in it changed."""
    target, file = reference(name), dockerfile(name)
    parts = inputs(store.settings, name, base.python, own, progress)
    arguments = {"BASE": base.reference, **parts.keys()}
    key = digest(base.key, file.read_text(), *(f"{name}={value}" for name, value in arguments.items()))
    if store.is_current(target, key):
        progress.note(f"{target} is up to date")
        return store.archive(target)
    context = store.settings.cache / "build" / f"image-{name}"
    shutil.rmtree(context, ignore_errors=True)
    context.mkdir(parents=True)
    with progress.step(f"{target} built"):
        parts.lay_out(context)
        store.build(target, context, file, arguments)
        archive = store.export(target, key)
    shutil.rmtree(context)
    store.prune(progress)
    progress.note(f"  {archive.stat().st_size / 1e6:.0f} MB: {archive}")
    return archive


def write_context(settings: Settings, name: str, python: str, folder: Path, progress: Progress) -> None:
    """Fills `folder` for a build elsewhere: `docker build -f NAME/Dockerfile FOLDER`."""
    if folder.exists() and any(folder.iterdir()):
        raise Failure(f"{folder} is not empty: name a new folder")
    inputs(settings, name, python, wheels.own(settings, progress), progress).lay_out(folder)
