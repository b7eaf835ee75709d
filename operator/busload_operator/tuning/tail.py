"""The tail of whole lengths: how many requests, prompt and output together, a limit would not hold."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from busload_operator.tuning.window import PodWindow
from busload_runtime.contract import SEQUENCE_LENGTHS

_REQUESTS = 3000.0
"""Requests after which what was learned counts a third (1/e): a tail of 1% is then known from thirty."""


@dataclass(frozen=True, slots=True)
class Tail:
    """Sums over finished requests, forgetting."""

    requests: float = 0.0
    tokens: float = 0.0
    """Prompt and output tokens of all of them."""
    longer: tuple[float, ...] = ()
    """Of them, longer than each of `SEQUENCE_LENGTHS`; empty: nothing was seen."""
    since: float | None = None
    """When the first of them was seen, on the caller's clock: the longest take longest to finish, so at first they are
    missing."""

    def over(self, length: int) -> float:
        """Requests longer than `length`, one of `SEQUENCE_LENGTHS`: all that it would refuse or cut off as a limit."""
        return self.longer[SEQUENCE_LENGTHS.index(length)] if self.longer else 0.0

    def share_over(self, length: int, most: int) -> float:
        """Share of all tokens that lie beyond `length` (one of `SEQUENCE_LENGTHS`) in requests of at most `most`.

        A request between two bounds is taken to have their geometric mean. Long ones hold their blocks for longer,
        too, so of the memory it is rather more.
        """
        if self.tokens <= 0 or not self.longer:
            return 0.0
        ends = (*SEQUENCE_LENGTHS, max(most, SEQUENCE_LENGTHS[-1]))
        beyond = 0.0
        for (low, high), (more, fewer) in zip(pairwise(ends), pairwise((*self.longer, 0.0)), strict=True):
            typical = math.sqrt(low * max(low, min(high, most)))
            beyond += max(0.0, more - fewer) * max(0.0, typical - length)
        return min(1.0, beyond / self.tokens)


def learn_tail(old: Tail, windows: Sequence[PodWindow]) -> Tail:
    """The tail with one more round of windows; those of pods that do not count lengths change nothing."""
    told = [(w, w.sequence_lengths) for w in windows if w.sequence_lengths is not None and w.finished > 0]
    if not told:
        return old
    finished = sum(w.finished for w, _ in told)
    kept = math.exp(-finished / _REQUESTS)
    before = old.longer or (0.0,) * len(SEQUENCE_LENGTHS)
    longer = [sum(max(0.0, w.finished - lengths[i]) for w, lengths in told) for i in range(len(before))]
    return Tail(
        requests=kept * old.requests + finished,
        tokens=kept * old.tokens + sum(w.output_tokens_sum + (w.finished_prompt_tokens or 0.0) for w, _ in told),
        longer=tuple(kept * a + b for a, b in zip(before, longer, strict=True)),
        since=old.since if old.since is not None else min(w.start for w, _ in told),
    )
