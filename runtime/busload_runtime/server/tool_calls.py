"""Calls of tools in a model's output, found while it streams."""

import json
import re
import secrets
import string
from collections.abc import Callable, Collection
from typing import Any

import msgspec

from busload_runtime.model.tool_format import ToolFormat
from busload_runtime.server.text import possible_start

Json = dict[str, Any]

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(\w+)"\s*:\s*(?=\{)', re.DOTALL)
_ALPHANUMERIC = string.ascii_letters + string.digits


class Found(msgspec.Struct, frozen=True):
    """News of an answer: text that is no call, the beginning of a call, or more of its arguments."""

    content: str = ""
    call: int | None = None
    """Which call; the others are about it."""
    id: str | None = None
    name: str | None = None
    arguments: str = ""

    def delta(self) -> Json:
        """As the delta of a chunk."""
        if self.call is None:
            return {"content": self.content}
        if self.name is None:
            return {"tool_calls": [{"index": self.call, "function": {"arguments": self.arguments}}]}
        function = {"name": self.name, "arguments": self.arguments}
        return {"tool_calls": [{"index": self.call, "id": self.id, "type": "function", "function": function}]}


class ToolCallParser:
    """One answer. What looks like a call but is none, or calls what is not there, stays text.

    A name goes out once it is whole, arguments as they come; unless a model writes them in another order or as a text,
    which takes the whole call. Blanks in front of a call are not part of the text.
    """

    def __init__(self, tool_format: ToolFormat, names: Collection[str], most: int | None = None) -> None:
        """`names`: of the tools; `most`: calls, after which nothing more is taken."""
        self._format = tool_format
        self._names = names
        self._most = most
        self._look = self._text if tool_format.begin else self._first
        self._held = ""
        """Read but not told."""
        self._prefix = ""
        """What was in front of it, which is text if it turns out to be no call."""
        self._end = _JsonEnd()
        self._told = 0
        """Characters of the call in `_held` that went out, as arguments or around them; 0 before its head."""
        self.num_calls = 0

    def push(self, text: str) -> list[Found]:
        """What is certain now."""
        self._held += text
        found: list[Found] = []
        while (news := self._look()) is not None:
            found += news
        return _joined(found)

    def finish(self) -> list[Found]:
        """What is left when the answer ends. A call whose arguments have begun to go out stays what it is."""
        rest, self._held = self._prefix + self._held, ""
        silent = self._told > 0 or self._look == self._behind or (self.num_calls > 0 and not rest.strip())
        self._look = self._nothing
        return [Found(content=rest)] if rest and not silent else []

    # Each state returns what it found, or None when it needs more text.

    def _nothing(self) -> list[Found] | None:
        self._held = ""
        return None

    def _first(self) -> list[Found] | None:
        """The answer is one call, or text to its end."""
        start = self._held.lstrip()
        if not start:
            return None
        self._look = self._call if start[0] == "{" else self._plain
        return []

    def _plain(self) -> list[Found] | None:
        text, self._held = self._held, ""
        return [Found(content=text)] if text else None

    def _text(self) -> list[Found] | None:
        begin = self._format.begin
        at = self._held.find(begin)
        if at >= 0:
            text = self._held[:at].rstrip()
            self._prefix, self._held = self._held[len(text) : at] + begin, self._held[at + len(begin) :]
            self._look = self._list if self._format.array else self._call
            return [Found(content=text)] if text else []
        certain = len(self._held) - possible_start(self._held, (begin,))
        text = self._held[:certain].rstrip()
        self._held = self._held[len(text) :]
        return [Found(content=text)] if text else None

    def _list(self) -> list[Found] | None:
        """Between `begin` and the bracket of a list."""
        start = self._held.lstrip()
        if not start:
            return None
        if start[0] != "[":
            return self._no_call()
        self._prefix, self._held = f"{self._prefix}{self._held[: -len(start)]}[", start[1:]
        self._look = self._call
        return []

    def _call(self) -> list[Found] | None:
        """At or inside a call."""
        if not self._told and (start := self._held.lstrip()) and start[0] != "{":
            return self._no_call()
        end = self._end.of(self._held)
        found = [] if self._told else self._head()
        if self._told:
            found += self._arguments()
        if end is not None:
            found += self._whole(end)
        return found or None

    def _head(self) -> list[Found]:
        """The beginning of a call whose arguments are about to come."""
        head = _HEAD.match(self._held)
        if head is None or head[2] != self._format.arguments or (name := _name(head[1])) not in self._names:
            return []
        self._told = head.end()
        return [self._begin(name)]

    def _arguments(self) -> list[Found]:
        end = self._end.inner if self._end.inner is not None else len(self._held)
        arguments, self._told = self._held[self._told : end], max(self._told, end)
        return [Found(call=self.num_calls - 1, arguments=arguments)] if arguments else []

    def _whole(self, end: int) -> list[Found]:
        """A call that is complete: `_held[:end]`."""
        found = []
        if not self._told:
            call = _parsed(self._held[:end], self._format.arguments)
            if call is None or call[0] not in self._names:
                return self._no_call()
            found = [self._begin(call[0]), Found(call=self.num_calls - 1, arguments=call[1])]
        self._held, self._prefix, self._told, self._end = self._held[end:], "", 0, _JsonEnd()
        self._look = self._nothing if self._most is not None and self.num_calls >= self._most else self._behind
        return found

    def _behind(self) -> list[Found] | None:
        """Behind a call: its end, and maybe another one."""
        rest, end = self._held.lstrip(), self._format.end
        if not self._format.begin:
            self._look = self._nothing
        elif not rest or (len(rest) < len(end) and end.startswith(rest)):
            return None
        elif self._format.array:
            self._held, self._look = rest[1:], self._call if rest[0] == "," else self._text
        else:
            self._held, self._look = rest.removeprefix(end), self._text
        return []

    def _no_call(self) -> list[Found]:
        """What looked like a call is text; another one may follow in it."""
        text, self._prefix, self._told, self._end = self._prefix, "", 0, _JsonEnd()
        self._look = self._text if self._format.begin else self._plain
        return [Found(content=text)] if text else []

    def _begin(self, name: str) -> Found:
        call, self.num_calls = self.num_calls, self.num_calls + 1
        self._prefix = ""
        return Found(call=call, id=_new_id(self._format.short_ids), name=name)


class _JsonEnd:
    """Where a JSON object ends that grows, and the object or array inside it which ended last at its top level."""

    def __init__(self) -> None:
        self._at = 0
        self._depth = 0
        self._in_text = False
        self._escaped = False
        self.inner: int | None = None

    def of(self, text: str) -> int | None:
        """Its length, once it is whole; `text` is all of it so far."""
        for at in range(self._at, len(text)):
            character = text[at]
            if self._in_text:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._in_text = False
            elif character == '"':
                self._in_text = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 1 and self.inner is None:
                    self.inner = at + 1
                if self._depth <= 0:
                    self._at = at + 1
                    return at + 1
        self._at = len(text)
        return None


class CallsOfTools(msgspec.Struct, frozen=True):
    """How calls are read from the answers of one request."""

    parser: Callable[[], ToolCallParser]
    """A new one for each choice."""
    token_bytes: Callable[[int], bytes]
    """What a token adds to the text in which they are found."""


def add_calls(choice: Json, parser: ToolCallParser) -> None:
    """Takes the calls out of the text of a chat choice in one piece."""
    message = choice["message"]
    message.update(message_of(parser.push(message["content"]) + parser.finish()))
    if parser.num_calls and choice["finish_reason"] == "stop":
        choice["finish_reason"] = "tool_calls"


def chunk_choices(
    index: int, parser: ToolCallParser, text: str, finish_reason: str | None, logprobs: Json | None
) -> list[Json]:
    """The choice objects that a piece of a chat choice becomes in a stream; log-probabilities go with the first."""
    found = parser.push(text)
    if finish_reason is not None:
        found += parser.finish()
    deltas: list[Json] = [news.delta() for news in found]
    if logprobs is not None and not deltas:
        deltas.append({"content": ""})
    choices: list[Json] = [
        {"index": index, "delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas
    ]
    if finish_reason is not None:
        reason = "tool_calls" if parser.num_calls and finish_reason == "stop" else finish_reason
        choices.append({"index": index, "delta": {}, "logprobs": None, "finish_reason": reason})
    if logprobs is not None:
        choices[0]["logprobs"] = logprobs
    return choices


def message_of(found: list[Found]) -> Json:
    """Content and calls of a whole answer."""
    content = "".join(news.content for news in found)
    calls: list[Json] = []
    for news in found:
        if news.name is not None:
            calls.append({"id": news.id, "type": "function", "function": {"name": news.name, "arguments": ""}})
        if news.call is not None:
            calls[news.call]["function"]["arguments"] += news.arguments
    return {"content": content or None, "tool_calls": calls} if calls else {"content": content}


def _joined(found: list[Found]) -> list[Found]:
    """Pieces of text that follow each other as one."""
    joined: list[Found] = []
    for news in found:
        if news.call is None and joined and joined[-1].call is None:
            joined[-1] = Found(content=joined[-1].content + news.content)
        else:
            joined.append(news)
    return joined


def _parsed(text: str, key: str) -> tuple[str, str] | None:
    """Name and arguments of a call; None if it is none."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(name := call.get("name"), str):
        return None
    arguments = call.get(key, {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    return (name, json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


def _name(quoted: str) -> str:
    try:
        return str(json.loads(quoted))
    except ValueError:
        return ""


def _new_id(short: bool) -> str:
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9)) if short else f"call_{secrets.token_hex(12)}"
