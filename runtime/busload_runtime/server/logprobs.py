"""Log-probabilities beside the text: which tokens a piece of text is made of, how likely each was, and what else was.

A drawn token is written as what it adds to the text, so that the tokens of an answer, joined, are its text: the bytes
of a character that spans tokens count with the one that completes it, and a token that a stop string cuts is written up
to the cut. Other tokens are written as themselves: their text, `bytes:\\xf0\\x9f` for a part of a character (as in the
OpenAI API), and the vocabulary's word for a control token, which has no text.
"""

from collections import deque
from collections.abc import Iterable
from typing import Any

import msgspec

from busload_runtime.engine.plan import Logprobs
from busload_runtime.model.tokenizer import TextTokenizer
from busload_runtime.server.text import TextStream

Json = dict[str, Any]


class ScoredToken(msgspec.Struct, frozen=True):
    """One token and its natural log-probability."""

    text: str
    data: bytes
    logprob: float | None
    """None of the first token of a prompt, which nothing predicts."""
    top: "tuple[ScoredToken, ...]" = ()
    """With a drawn token: the most likely ones at its place, most likely first."""


def joined(parts: Iterable[Json]) -> Json:
    """One logprobs object of several that follow each other."""
    whole: Json = {}
    for part in parts:
        for key, value in part.items():
            if isinstance(value, list):
                whole.setdefault(key, []).extend(value)
            else:
                whole[key] = value
    return whole


def text_of_prompt(tokens: Iterable[int], tokenizer: TextTokenizer) -> str:
    """The text of `score_prompt`."""
    text = TextStream(tokenizer.token_bytes)
    return "".join(map(text.decode, tokens))


def score_prompt(tokens: list[int], logprobs: list[Logprobs], tokenizer: TextTokenizer) -> list[ScoredToken]:
    """The tokens of a prompt; `logprobs` of those from the second one on."""
    text = TextStream(tokenizer.token_bytes)
    scored = ScoredText(text, tokenizer)
    first = ScoredToken(text.decode(tokens[0]), tokenizer.token_bytes(tokens[0]), None)
    rest = zip(tokens[1:], logprobs, strict=True)
    return [first, *(scored.scored(token, text.decode(token), values) for token, values in rest)]


class ScoredText:
    """The text of one sequence in whole tokens. As `TextStream`, but text comes with the tokens that it is made of."""

    def __init__(self, text: TextStream, tokenizer: TextTokenizer) -> None:
        self._text = text
        self._tokenizer = tokenizer
        self._certain = ""
        """Text that is certain, of tokens that are not, not all of them."""
        self._tokens: deque[ScoredToken] = deque()
        """Those tokens, and the ones behind them."""

    def push(self, token: int, logprobs: Logprobs) -> tuple[str, list[ScoredToken]]:
        """What is certain now, up to the end of a token; all that is left when the text has stopped."""
        piece = self._text.decode(token)
        self._tokens.append(self.scored(token, piece, logprobs))
        self._certain += self._text.release(piece)
        return self._take()

    def finish(self) -> tuple[str, list[ScoredToken]]:
        """The text held back, at the end of the sequence."""
        self._certain += self._text.finish()
        text, tokens = self._take()
        return text, [*tokens, *self._tokens]  # what is left has no text: parts of a character that was not completed

    def _take(self) -> tuple[str, list[ScoredToken]]:
        taken = []
        while self._certain and self._tokens:
            token = self._tokens[0]
            if len(token.text) > len(self._certain):
                if not self._text.stopped:
                    break
                cut = self._certain
                token = ScoredToken(cut, cut.encode(), token.logprob, token.top)
            self._tokens.popleft()
            taken.append(token)
            self._certain = self._certain[len(token.text) :]
        return "".join(token.text for token in taken), taken

    def scored(self, token: int, piece: str, logprobs: Logprobs) -> ScoredToken:
        """A token that adds `piece` to the text."""
        data = self._text.token_bytes(token)
        top = tuple(
            ScoredToken(piece, data, logprob) if other == token else self._other(other, logprob)
            for other, logprob in logprobs.top
        )
        return ScoredToken(piece, data, logprobs.drawn, top)

    def _other(self, token: int, logprob: float) -> ScoredToken:
        data = self._tokenizer.token_bytes(token) or self._tokenizer.written(token).encode()
        try:
            text = data.decode()
        except UnicodeDecodeError:
            text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
        return ScoredToken(text, data, logprob)
