"""Chat messages to prompt text, by the Jinja template inside the model file."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from busload_runtime.model.errors import ModelError
from busload_runtime.model.tool_format import tool_format_of

Message = Mapping[str, Any]

# Noncharacters: no text carries them, so one of them can mark a place in a text.
_MARKS = tuple(map(chr, range(0xFDD0, 0xFDF0)))


class ChatError(ValueError):
    """The template refused these messages (for example a role it does not know); the message is for the client."""


class ChatTemplate:
    """A compiled template. `source` None means that the model has none."""

    def __init__(self, file: str, source: str | None, special_tokens: Mapping[str, str]) -> None:
        self._file = file
        self._special_tokens = special_tokens
        environment = _environment()
        names: set[str] = set()
        self.words: frozenset[str] = frozenset()
        """Texts that the template compares with or writes, the names of its roles among them."""
        try:
            self._template = None if source is None else environment.from_string(source)
            if source is not None:
                parsed = environment.parse(source)
                names = {name.name for name in parsed.find_all(nodes.Name)}
                self.words = frozenset(c.value for c in parsed.find_all(nodes.Const) if isinstance(c.value, str))
        except (TemplateError, RecursionError, SyntaxError, MemoryError) as error:
            raise ModelError(f"{file}: tokenizer.chat_template is not a Jinja template: {_line(error)}") from None

        self.takes_tools = "tools" in names
        """Whether the template writes tools into the prompt."""
        self.tool_format = tool_format_of(source) if source is not None and self.takes_tools else None
        """How the model calls them; None if it knows no tools, or in a way that is not known here."""

    @property
    def available(self) -> bool:
        return self._template is not None

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The prompt text. Raises `ChatError` when the model has no template or the template refuses the messages."""
        if self._template is None:
            raise ChatError(f"{self._file} has no chat template; use /v1/completions with a whole prompt")
        try:
            return self._template.render(
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
                tools=None if tools is None else list(tools),
                **self._special_tokens,
            )
        except TemplateError as error:
            raise ChatError(f"the model's chat template refused the messages: {_line(error)}") from None
        except (TypeError, ValueError, KeyError, ArithmeticError, RecursionError, LookupError) as error:
            raise ChatError(f"the model's chat template cannot take these messages: {_line(error)}") from None


def unused_mark(messages: object) -> str:
    """A character that is in no text of `messages`. Raises `ChatError` if all candidates are."""
    text = json.dumps(messages, ensure_ascii=False, default=str)
    mark = next((mark for mark in _MARKS if mark not in text), None)
    if mark is None:
        raise ChatError("the messages hold every Unicode noncharacter from U+FDD0 to U+FDEF; remove one of them")
    return mark


def map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """`value` (messages, tools) with `change` applied to every text in it, keys among them."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): map_texts(item, change) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [map_texts(item, change) for item in value]
    return value


def _environment() -> ImmutableSandboxedEnvironment:
    """What templates written for Hugging Face's `apply_chat_template` expect to find."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    # Jinja's own filter escapes <, >, & and ' for HTML, which no model has seen.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().astimezone().strftime(layout)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
