"""Images in the node's containerd: what is there, and getting an archive in without doing it twice."""

from __future__ import annotations

import hashlib
import json
import re
import tarfile
from pathlib import Path

from .host import which
from .settings import Settings
from .shell import Failure, Progress, run, write


def ctr(settings: Settings, *arguments: str | Path, check: bool = True) -> str:
    """Runs containerd's own client in Kubernetes' namespace and returns what it prints."""
    argv = [which("ctr") or "ctr", "-a", settings.containerd_socket, "-n", "k8s.io", *arguments]
    return run(argv, check=check).stdout


def answers(settings: Settings) -> bool:
    return bool(ctr(settings, "version", check=False))


def references(archive: Path) -> list[str]:
    """The image names in a docker-archive (as `docker save` makes it). Raises Failure for any other file."""
    try:
        with tarfile.open(archive) as tar:
            member = tar.extractfile("manifest.json")
            manifest = json.load(member) if member else []
        names = [name for image in manifest for name in image["RepoTags"] or []]
    except (OSError, KeyError, TypeError, ValueError, tarfile.TarError) as error:
        raise Failure(f"{archive} is no docker-archive with an image in it: {error!r}") from error
    if not names:
        raise Failure(f"{archive} holds an image without a name: save it by name, for example `docker save NAME:TAG`")
    return names


def digest(archive: Path) -> str:
    with archive.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load(settings: Settings, archives: list[Path], progress: Progress) -> None:
    """Imports the archives that the node does not have yet, as they are now."""
    present = set(ctr(settings, "images", "ls", "-q").split())
    for archive in archives:
        names, content = references(archive), digest(archive)
        record = settings.state / "loaded" / re.sub(r"[^A-Za-z0-9.-]", "_", names[0])
        if set(names) <= present and record.exists() and record.read_text() == content:
            continue
        with progress.step(f"image {names[0]} loaded ({archive.stat().st_size / 1e6:.0f} MB)"):
            ctr(settings, "images", "import", "--digests=false", archive)
            write(record, content)
