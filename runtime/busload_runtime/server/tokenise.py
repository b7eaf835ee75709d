"""Prompts to token ids, off the event loop where it takes time, and never longer than a prompt that could fit."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from busload_runtime.model.chat import ChatError
from busload_runtime.model.text import TextModel
from busload_runtime.server.errors import invalid
from busload_runtime.server.sampling import check_length

T = TypeVar("T")
Admit = Callable[[int], None]
"""Told how many tokens are expected, before any work. Raises `ApiError` when even so many are not welcome."""

# Below this a hand-over to a thread costs more than the work.
_INLINE_BYTES = 4000
# What a message costs beside its content: role and marks around it.
_MESSAGE_BYTES = 64
# Unicode composition, which some tokenisers begin with, makes a text at most this much shorter in UTF-8
# (https://unicode.org/faq/normalization.html, "what are the maximum expansion factors").
_COMPOSITION_FACTOR = 3
# Of a token, while nothing is known of the texts that come; of English it is 4.
_TYPICAL_BYTES = 8
# Texts so far back count half, those twice as far a quarter, ...
_REMEMBERED_BYTES = 2**20


class PromptEncoder:
    """A text model as the routes need it: every failure is an `ApiError` 400 that names the parameter."""

    def __init__(self, model: TextModel) -> None:
        self.model = model
        tokenizer = model.tokenizer
        self._bytes_per_token = tokenizer.longest_token() * _COMPOSITION_FACTOR
        self._seen_bytes, self._seen_tokens = _TYPICAL_BYTES, 1

    async def encode(self, prompts: dict[str, str], limit: int, admit: Admit) -> list[list[int]]:
        """Token ids of texts, given by the name of their parameter; `limit` is the longest sequence allowed.

        What is certainly longer is refused without tokenising it; what turns out to be is for the caller to refuse.
        """
        size = sum(self._check_size(prompt, limit, param) for param, prompt in prompts.items())
        admit(self._few_tokens(size))
        encode = self.model.tokenizer.encode
        encoded = await _run(size, lambda: [encode(prompt, special=False) for prompt in prompts.values()])
        self._learn(size, sum(map(len, encoded)))
        for param, ids in zip(prompts, encoded, strict=True):
            if not ids:
                raise invalid(f"{param} is empty; give at least one token", param)
        return encoded

    async def encode_any(self, prompt: str, limit: int, bos: bool) -> list[int]:
        """Token ids of one text, which may be empty; without BOS, if so wished. `limit` as in `encode`."""
        size = self._check_size(prompt, limit, "prompt")
        return await _run(size, lambda: self.model.tokenizer.encode(prompt, special=False, bos=bos))

    async def encode_chat(
        self,
        messages: list[dict[str, Any]],
        limit: int,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        admit: Admit = lambda tokens: None,
    ) -> list[int]:
        """Token ids of a conversation in the model's own chat format; `limit` as in `encode`."""
        check_length(len(messages), limit, "messages", exact=False)  # each is a token at the very least
        size = sum(self._check_size(message["content"], limit, "messages") for message in messages)
        self._check_length(size, limit, "messages")
        size += self._check_json(tools, limit, "tools") if tools else 0
        size += self._check_json([m["tool_calls"] for m in messages if "tool_calls" in m], limit, "messages")
        admit(self._few_tokens(size))
        try:
            return await _run(
                size + _MESSAGE_BYTES * len(messages),
                lambda: self.model.encode_chat(messages, add_generation_prompt, tools),
            )
        except ChatError as error:
            raise invalid(str(error), "messages") from None

    async def decode(self, ids: list[int]) -> str:
        """The text of token ids, control tokens by their names. Raises `ApiError` 400 for ids that are none."""
        if not ids:
            return ""
        decode = self.model.tokenizer.decode
        return await _run(len(ids), lambda: decode(self.check(ids, "tokens"), control=True))

    async def written(self, ids: list[int]) -> list[str]:
        """Token ids as the vocabulary writes them."""
        return await _run(len(ids), lambda: [self.model.tokenizer.written(token) for token in ids])

    def check(self, ids: list[Any], param: str) -> list[int]:
        """The token ids, if each is one of the model's."""
        if not ids:
            raise invalid(f"{param} is empty; give at least one token", param)
        vocab_size = self.model.tokenizer.vocab_size
        if set(map(type, ids)) != {int}:
            raise invalid(f"{param} mixes token ids with other values", param)
        for token in (min(ids), max(ids)):
            if not 0 <= token < vocab_size:
                raise invalid(f"{param}: token id {token} is outside 0 to {vocab_size - 1}", param)
        return ids

    def _few_tokens(self, size: int) -> int:
        """Half of the tokens that so many bytes usually are here: hardly ever more than they turn out to be."""
        return size * self._seen_tokens // (2 * self._seen_bytes)

    def _learn(self, size: int, tokens: int) -> None:
        self._seen_bytes += size
        self._seen_tokens += tokens
        if self._seen_bytes > _REMEMBERED_BYTES:
            self._seen_bytes, self._seen_tokens = self._seen_bytes // 2, max(1, self._seen_tokens // 2)

    def _check_size(self, text: str, limit: int, param: str) -> int:
        """UTF-8 bytes of a text that is Unicode and not certainly too long."""
        try:
            size = len(text.encode())
        except UnicodeEncodeError:
            raise invalid(f"{param} holds half of a surrogate pair, which is not Unicode text", param) from None
        self._check_length(size, limit, param)
        return size

    def _check_json(self, value: list[Any], limit: int, param: str) -> int:
        """As `_check_size`, of what a template writes as JSON: in most, with blanks, so that it gets no shorter."""
        try:
            size = len(msgspec.json.encode(value))
        except UnicodeEncodeError:
            raise invalid(f"{param} holds half of a surrogate pair, which is not Unicode text", param) from None
        except RecursionError:
            raise invalid(f"{param} is nested too deeply", param) from None
        self._check_length(size, limit, param)
        return size

    def _check_length(self, size: int, limit: int, param: str) -> None:
        """A token is only so many bytes long: a huge prompt is refused by its size, without tokenising it."""
        check_length(size // self._bytes_per_token, limit, param, exact=False)


async def _run(size: int, work: Callable[[], T]) -> T:
    return work() if size <= _INLINE_BYTES else await asyncio.to_thread(work)
