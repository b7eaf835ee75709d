"""Finds the texts of control tokens (`<|im_start|>`, `<eos>`) in a text."""

import re
from collections.abc import Iterator, Mapping


class ControlTexts:
    """Thousands of texts cost nothing to prepare: candidates begin with one of few characters and have few lengths."""

    def __init__(self, control: Mapping[str, int]) -> None:
        """`control`: text of each token -> its id."""
        self._ids = control
        first = "".join(sorted({text[0] for text in control}))
        self._begin = re.compile(f"[{re.escape(first)}]") if control else None
        lengths: dict[str, set[int]] = {}
        for text in control:
            lengths.setdefault(text[0], set()).add(len(text))
        self._lengths = {character: sorted(found, reverse=True) for character, found in lengths.items()}

    def split(self, text: str) -> Iterator[str | int]:
        """`text` in order: token ids where a control text was (the longest that fits), the rest as text."""
        done = 0
        for begin in self._begins(text):
            if begin >= done:
                end = begin + self._length(text, begin)
                yield text[done:begin]
                yield self._ids[text[begin:end]]
                done = end
        yield text[done:]

    def hide(self, text: str, mark: str) -> str:
        """`text` with `mark` after the first character of each control text (if of two or more): `split` finds none."""
        parts, done = [], 0
        for begin in self._begins(text):  # also those inside another
            parts += [text[done : begin + 1], mark]
            done = begin + 1
        return "".join((*parts, text[done:]))

    def _begins(self, text: str) -> Iterator[int]:
        """Where a control text begins."""
        places = (match.start() for match in self._begin.finditer(text)) if self._begin else ()
        return (place for place in places if self._length(text, place))

    def _length(self, text: str, begin: int) -> int:
        return next((n for n in self._lengths[text[begin]] if text[begin : begin + n] in self._ids), 0)
