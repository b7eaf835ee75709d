"""Loads the table of manifests; used here and by the end-to-end test that asks a real API server."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent / "cases"
SMALLEST: dict[str, Any] = {
    "apiVersion": "busload.dev/v1alpha1",
    "kind": "InferenceService",
    "metadata": {"name": "case"},
    "spec": {"model": {"source": {"bundled": "smollm2-135m-instruct"}}},
}


@dataclass(frozen=True)
class Case:
    """One manifest. `model` and `server` are what each judge must say; empty for a good one."""

    name: str
    manifest: dict[str, Any]
    field: str = ""
    model: str = ""
    server: str = ""


def good() -> list[Case]:
    return [Case(entry["case"], _manifest(entry)) for entry in _load("good.yaml")]


def bad() -> list[Case]:
    return [
        Case(
            entry["case"],
            _manifest(entry),
            entry.get("field", ""),
            entry.get("model") or entry["says"],
            entry.get("server") or entry["says"],
        )
        for entry in _load("bad.yaml")
    ]


def _load(name: str) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))
    allowed = {"case", "set", "remove", "field", "says", "model", "server"}
    for entry in entries:
        assert set(entry) <= allowed, f"{name}: {entry['case']}: unknown keys {set(entry) - allowed}"
    return entries


def _manifest(entry: dict[str, Any]) -> dict[str, Any]:
    manifest = copy.deepcopy(SMALLEST)
    for path in entry.get("remove", ()):
        *parents, last = path.split(".")
        _walk(manifest, parents).pop(last)
    for path, value in entry.get("set", {}).items():
        *parents, last = path.split(".")
        _walk(manifest, parents)[last] = copy.deepcopy(value)
    return manifest


def _walk(node: dict[str, Any], parents: list[str]) -> dict[str, Any]:
    for part in parents:
        node = node.setdefault(part, {})
    return node
