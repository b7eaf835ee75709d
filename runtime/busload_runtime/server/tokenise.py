"""Prompts to token ids, off the event loop where it takes time, and never longer than a prompt that could fit."""

import asyncio
from collections.abc import Callable
from typing import Any

from busload_runtime.model.chat import ChatError
from busload_runtime.model.load import TextModel
from busload_runtime.server.errors import invalid
from busload_runtime.server.sampling import check_length

# Below this a hand-over to a thread costs more than the work.
_INLINE_BYTES = 4000
# Unicode composition, which some tokenisers begin with, makes a text at most this much shorter in UTF-8
# (https://unicode.org/faq/normalization.html, "what are the maximum expansion factors").
_COMPOSITION_FACTOR = 3


class PromptEncoder:
    """A text model as the routes need it: every failure is an `ApiError` 400 that names the parameter."""

    def __init__(self, model: TextModel) -> None:
        self.model = model
        tokenizer = model.tokenizer
        longest = max(len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size))
        self._bytes_per_token = max(1, longest) * _COMPOSITION_FACTOR

    async def encode(self, prompt: str, limit: int, param: str) -> list[int]:
        """Token ids of a text; `limit` is the longest sequence allowed."""
        size = self._check_size(prompt, limit, param)
        ids = await _run(size, lambda: self.model.tokenizer.encode(prompt, special=False))
        if not ids:
            raise invalid(f"{param} is empty; give at least one token", param)
        return ids

    async def encode_chat(self, messages: list[dict[str, Any]], limit: int) -> list[int]:
        """Token ids of a conversation in the model's own chat format."""
        size = sum(self._check_size(message["content"], limit, "messages") for message in messages)
        self._check_length(size, limit, "messages")
        try:
            return await _run(size, lambda: self.model.encode_chat(messages))
        except ChatError as error:
            raise invalid(str(error), "messages") from None

    def check(self, ids: list[Any], param: str) -> list[int]:
        """The token ids, if each is one of the model's."""
        if not ids:
            raise invalid(f"{param} is empty; give at least one token", param)
        vocab_size = self.model.tokenizer.vocab_size
        for token in ids:
            if type(token) is not int:
                raise invalid(f"{param} mixes token ids with other values; got {str(token)[:40]!r}", param)
            if not 0 <= token < vocab_size:
                raise invalid(f"{param}: token id {token} is outside 0 to {vocab_size - 1}", param)
        return ids

    def _check_size(self, text: str, limit: int, param: str) -> int:
        """UTF-8 bytes of a text that is Unicode and not certainly too long."""
        try:
            size = len(text.encode())
        except UnicodeEncodeError:
            raise invalid(f"{param} holds half of a surrogate pair, which is not Unicode text", param) from None
        self._check_length(size, limit, param)
        return size

    def _check_length(self, size: int, limit: int, param: str) -> None:
        """A token is only so many bytes long: a huge prompt is refused by its size, without tokenising it."""
        check_length(size // self._bytes_per_token, limit, param, exact=False)


async def _run(size: int, work: Callable[[], list[int]]) -> list[int]:
    return work() if size <= _INLINE_BYTES else await asyncio.to_thread(work)
