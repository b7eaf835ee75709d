"""From token ids to text, one token at a time: whole characters only, and never a piece of a stop string."""

import codecs
from collections.abc import Callable, Sequence


class TextStream:
    """The text of one sequence. What `push` and `finish` return, joined, is the sequence's text.

    Bytes become text through an incremental UTF-8 decoder, so a character that spans tokens appears when its last byte
    does. Text that could be the beginning of a stop string is held back until it is clear that it is not one, and is
    handed out by `finish` if the end comes first. A match is cut off together with everything behind it.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], stop: Sequence[str] = (), min_tokens: int = 0) -> None:
        self.token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._mid_character = False
        self._stop = tuple(stop)
        self._unmatched_tokens = min_tokens
        self._held = ""
        self.stopped = False
        """A stop string was found; nothing follows."""

    def push(self, token: int) -> str:
        """The text that is certain now. Stop strings are looked for only behind the first `min_tokens` tokens."""
        return self.release(self.decode(token))

    def decode(self, token: int) -> str:
        """The characters that the token completes."""
        data = self.token_bytes(token)
        if not self._mid_character and data.isascii():
            return data.decode(
                "ascii"
            )  # most tokens: the decoder, which costs several times this, has nothing to remember
        text = self._decoder.decode(data)
        self._mid_character = bool(self._decoder.getstate()[0])
        return text

    def release(self, text: str) -> str:
        """What is certain of the text so far once `text`, that of the next token, has come."""
        if self.stopped:
            return ""
        if self._unmatched_tokens > 0:
            self._unmatched_tokens -= 1
            return text
        if not self._stop or not text:
            return text
        self._held += text
        if (cut := _first_match(self._held, self._stop)) is not None:
            self.stopped = True
            text, self._held = self._held[:cut], ""
            return text
        keep = possible_start(self._held, self._stop)
        text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return text

    def finish(self) -> str:
        """The text held back, at the end of the sequence. Bytes of a character that was never completed are dropped."""
        text, self._held = self._held, ""
        self.stopped = True
        return text


def _first_match(text: str, stop: Sequence[str]) -> int | None:
    """Where the stop string begins that is complete first (so the split into tokens cannot change the result)."""
    found = [(at + len(word), at) for word in stop if (at := text.find(word)) >= 0]
    return min(found)[1] if found else None


def possible_start(text: str, stop: Sequence[str]) -> int:
    """Length of the longest end of `text` that a stop string begins with."""
    longest = 0
    for word in stop:
        for length in range(min(len(word) - 1, len(text)), longest, -1):
            if text.endswith(word[:length]):
                longest = length
                break
    return longest
