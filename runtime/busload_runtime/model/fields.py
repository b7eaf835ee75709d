"""The metadata of one architecture in a GGUF file, checked key by key."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from busload_runtime.model.errors import ModelError

MAX_DIMENSION = 2**24


@dataclass(frozen=True, slots=True)
class Fields:
    """Reads `<architecture>.<key>`; what is missing or out of range is a `ModelError` with file, key and value."""

    file: str
    architecture: str
    metadata: Mapping[str, Any]

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self.bad(key, value, f"an integer from {low} to {high}")
        return value

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        value = self.get(key, default)
        if not isinstance(value, float) or not math.isfinite(value) or not low <= value <= high:
            raise self.bad(key, value, f"a number from {low:g} to {high:g}")
        return value

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def refuse(self, key: str, why: str) -> None:
        """Raises unless `key` is missing or says no (0, false, none)."""
        value = self.get(key)
        if value and value != "none":
            raise self.bad(key, value, f"0 or missing ({why})")

    def bad(self, key: str, value: object, allowed: str) -> ModelError:
        got = "missing" if value is None else f"{value!r:.80}"
        return ModelError(
            f"{self.file}: {self.architecture}.{key} is {got}; must be {allowed}; the file is corrupt or unsupported"
        )
