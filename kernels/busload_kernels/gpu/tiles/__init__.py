"""Tables of tiles: which cut of a kernel is fast on which device, as data.

`<device>-triton<version>.json` holds what `e2e/gpu/check.sh` measured there (device in lower case, dashes for spaces:
nvidia-h200), `<device>.json` what holds for any version, `default.json` what compiles without spills on sm_80, sm_90
and sm_100. A table maps a kernel to entries. An entry matches when each of its keys equals what is asked (a key that it
leaves out matches anything) and its `rows`, if it has them, are at least those asked. The first table with a match
wins, within it the match with the fewest rows, then the first.
"""

import json
from functools import cache, lru_cache
from importlib import resources
from typing import Any

import triton

from ..errors import GpuKernelError
from ..launch import Tile

_HOW = ("sizes", "num_warps", "num_stages", "rows")


@lru_cache(maxsize=4096)  # a step asks for every layer
def tile_for(kernel: str, device: str, rows: int = 0, **shape: object) -> Tile:
    """The tile of `kernel` for a device name as CUDA gives it, for at least `rows` rows and this shape."""
    for name in table_names(device):
        matches = [
            entry
            for entry in _table(name).get(kernel, ())
            if rows <= entry.get("rows", rows) and all(shape.get(key) == entry[key] for key in entry if key not in _HOW)
        ]
        if matches:
            found = min(matches, key=lambda entry: entry.get("rows", float("inf")))
            return Tile(found["sizes"], found["num_warps"], found["num_stages"])
    asked = ", ".join(f"{key} {value}" for key, value in {"rows": rows, **shape}.items())
    raise GpuKernelError(
        f"no tile for {kernel} with {asked} in {', '.join(table_names(device))}: add an entry to default.json"
    )


def table_names(device: str) -> tuple[str, ...]:
    """The files that may know a device; the first with a match wins."""
    slug = device.lower().replace(" ", "-")
    version = ".".join(triton.__version__.split(".")[:2])
    return f"{slug}-triton{version}.json", f"{slug}.json", "default.json"


@cache
def _table(name: str) -> dict[str, list[dict[str, Any]]]:
    file = resources.files(__name__).joinpath(name)
    if not file.is_file():
        return {}
    table: dict[str, list[dict[str, Any]]] = json.loads(file.read_text())
    return table
