"""Building images with buildah into a store of our own, and keeping each as a docker-archive beside its content's key.

The key is made of everything that goes into an image. An archive whose key file agrees is up to date and is not
touched; whoever loads it sees the same bytes and skips it too.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster.settings import Settings
from e2e.cluster.shell import Failure, Progress, exclusive, run, write


def digest(*parts: str | bytes | Path) -> str:
    """A key over text, bytes, files and folders; for these, over the names below them, modes and contents."""
    total = hashlib.sha256()
    for part in parts:
        if isinstance(part, Path):
            files = (
                sorted(file for file in part.rglob("*") if "__pycache__" not in file.parts) if part.is_dir() else [part]
            )
            for file in files:
                if file.is_file():
                    total.update(f"{file.relative_to(part)}\0{file.stat().st_mode & 0o111}\0".encode())
                    total.update(hashlib.sha256(file.read_bytes()).digest())
        else:
            total.update(hashlib.sha256(part.encode() if isinstance(part, str) else part).digest())
    return total.hexdigest()


@dataclass(frozen=True)
class Store:
    """buildah's storage below the cache, apart from what else on this machine uses buildah or podman."""

    settings: Settings

    def buildah(self, *arguments: str | Path) -> str:
        root = self.settings.cache / "buildah"
        root.mkdir(parents=True, exist_ok=True)
        driver = "vfs" if _on_overlay(root) else "overlay"
        environment = {**os.environ, "BUILDAH_ISOLATION": "chroot"}  # RUN needs no container runtime then
        places: list[str | Path] = ["--root", root / "root", "--runroot", root / "run", "--storage-driver", driver]
        return run(["buildah", *places, *arguments], env=environment).stdout

    def has(self, reference: str) -> bool:
        return bool(self.buildah("images", "-q", "--filter", f"reference={reference}").strip())

    def build(
        self, reference: str, context: Path, dockerfile: Path, arguments: Mapping[str, str] | None = None
    ) -> None:
        """Builds the image `reference`. Steps whose inputs are as before come from the store."""
        pairs = [word for name, value in (arguments or {}).items() for word in ("--build-arg", f"{name}={value}")]
        self.buildah("build", "--layers", "--quiet", "--tag", reference, "--file", dockerfile, *pairs, context)

    def prune(self, progress: Progress) -> None:
        """Removes what earlier builds left: containers of killed ones, and layers that no image has any more. Those of
        the current images stay, for the next build to use again."""
        try:
            self.buildah("rm", "--all")
            self.buildah("rmi", "--prune")
        except Failure as error:  # costs disk only
            progress.note(f"old layers were not removed: {error}")

    def archive(self, reference: str) -> Path:
        """Where the docker-archive of an image is kept."""
        return self.settings.archives / (reference.rsplit("/", 1)[1].replace(":", "-") + ".tar")

    def is_current(self, reference: str, key: str) -> bool:
        record = self.archive(reference).with_suffix(".key")
        return self.archive(reference).exists() and record.exists() and record.read_text() == key

    def export(self, reference: str, key: str) -> Path:
        """Writes the image's docker-archive, whole or not at all, and notes its key. Returns the archive."""
        archive = self.archive(reference)
        archive.parent.mkdir(parents=True, exist_ok=True)
        new = archive.with_name(f".{archive.name}.new")
        new.unlink(missing_ok=True)
        self.buildah("push", "--quiet", reference, f"docker-archive:{new}:{reference}")
        new.replace(archive)
        write(archive.with_suffix(".key"), key)
        return archive


@contextlib.contextmanager
def building(settings: Settings, progress: Progress) -> Iterator[None]:
    """One image builder at a time."""
    file = settings.cache / "locks" / "images"
    with exclusive(file, lambda: progress.note(f"another build of images holds {file}: waiting for it")):
        yield


def _on_overlay(folder: Path) -> bool:
    """overlay cannot be stacked on overlay, which is what / is inside a container."""
    return run(["stat", "-f", "-c", "%T", folder]).stdout.strip() == "overlayfs"
