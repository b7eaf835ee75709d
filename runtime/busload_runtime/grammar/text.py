"""Grammar texts, in the Lark dialect of llguidance (its docs/syntax.md and docs/json_schema.md)."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from busload_runtime.grammar.limits import MAX_GRAMMAR_BYTES, MAX_SCHEMA_BYTES

JsonSchema = Mapping[str, Any]

# Tokens are drawn, never forced: the model keeps to the cutting of text into tokens that it knows.
_HEAD = '%llguidance {"no_forcing": true}\n'
_LINE_ENDS = {"\n": r"\n", "\r": r"\r"}
# Compact but for one space where people and models put it.
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


class GrammarTextError(ValueError):
    """What was asked for cannot be written as a grammar; one line for the client."""


def grammar(start: str, rules: Sequence[str] = ()) -> str:
    """A whole grammar: the expression to match and further rules. Raises `GrammarTextError` when it is too long."""
    text = "\n".join((_HEAD + f"start: {start}", *rules, ""))
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise GrammarTextError("it holds half of a surrogate pair, which is not Unicode text") from None
    if size > MAX_GRAMMAR_BYTES:
        raise GrammarTextError(f"the grammar takes more than {MAX_GRAMMAR_BYTES} bytes; ask for less in one request")
    return text


def json_expression(schema: JsonSchema) -> str:
    """JSON that is valid under `schema`. Raises `GrammarTextError` for a schema too large or too deep."""
    try:
        text = msgspec.json.encode({**schema, "x-guidance": _LAYOUT})
    except RecursionError:
        raise GrammarTextError("the schema is nested too deeply") from None
    except UnicodeEncodeError:
        raise GrammarTextError("the schema holds half of a surrogate pair, which is not Unicode text") from None
    if len(text) > MAX_SCHEMA_BYTES:
        raise GrammarTextError(f"the schema takes {len(text)} bytes as JSON; at most {MAX_SCHEMA_BYTES} are allowed")
    return f"%json {text.decode()}"


def regex_expression(pattern: str) -> str:
    """Text that the whole pattern matches (syntax of Rust's regex crate, without look-around)."""
    if not pattern:
        raise GrammarTextError("the pattern is empty; give one that matches something")
    return f"/{_in_slashes(pattern)}/"


def text_expression(text: str) -> str:
    """Exactly this text."""
    return json.dumps(text, ensure_ascii=False)


def choice_expression(choices: Sequence[str]) -> str:
    """One of the texts."""
    return " | ".join(text_expression(choice) for choice in choices)


def _in_slashes(pattern: str) -> str:
    """The pattern with nothing in it that ends it: slashes and line ends escaped."""
    parts, characters = [], iter(pattern)
    for character in characters:
        escaped = character == "\\"
        if escaped and (character := next(characters, "")) == "":
            raise GrammarTextError("the pattern ends with a single backslash; write two for a backslash")
        if character in _LINE_ENDS:
            parts.append(_LINE_ENDS[character])
        else:
            parts.append(f"\\{character}" if escaped or character == "/" else character)
    return "".join(parts)
