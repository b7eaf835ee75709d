"""The vocabulary of a GGUF file (`tokenizer.ggml.*`), checked. Written for 262,144 tokens: no work per token."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from busload_runtime.model.errors import ModelError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


@dataclass(frozen=True)
class Vocabulary:
    """Texts and types of all tokens; the index is the token id."""

    file: str
    metadata: Mapping[str, Any]
    tokens: list[str]
    types: list[int]

    @classmethod
    def read(cls, file: str, metadata: Mapping[str, Any]) -> "Vocabulary":
        """Raises `ModelError` unless there is a list of different texts with a known type each."""
        tokens = metadata.get("tokenizer.ggml.tokens")
        if not isinstance(tokens, list) or set(map(type, tokens)) != {str} or "" in tokens:
            raise ModelError(
                f"{file}: tokenizer.ggml.tokens must be a list of texts; the file has no usable vocabulary"
            )
        if len(set(tokens)) != len(tokens):
            raise ModelError(f"{file}: tokenizer.ggml.tokens holds a token twice; the file is corrupt")
        types = metadata.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
        known = set(range(NORMAL, BYTE + 1))
        if not isinstance(types, list) or len(types) != len(tokens) or not _all_in(types, known):
            raise ModelError(f"{file}: tokenizer.ggml.token_type must hold one type from 1 to 6 for each of the tokens")
        return cls(file, metadata, tokens, types)

    @cached_property
    def _unusual(self) -> list[int]:
        return [index for index, kind in enumerate(self.types) if kind != NORMAL]

    def texts_of(self, kind: int) -> dict[str, int]:
        """Text -> id of the tokens of a type other than `NORMAL`."""
        return {self.tokens[index]: index for index in self._unusual if self.types[index] == kind}

    def token_id(self, key: str) -> int | None:
        value = self.metadata.get(f"tokenizer.ggml.{key}")
        if value is None or (isinstance(value, int) and 0 <= value < len(self.tokens)):
            return value
        raise ModelError(f"{self.file}: tokenizer.ggml.{key} is {value!r:.80}; must be below {len(self.tokens)}")

    def flag(self, key: str, default: bool) -> bool:
        return bool(self.metadata.get(f"tokenizer.ggml.{key}", default))


def _all_in(values: list[Any], known: set[int]) -> bool:
    try:
        return set(values) <= known
    except TypeError:  # a list of lists, say
        return False
