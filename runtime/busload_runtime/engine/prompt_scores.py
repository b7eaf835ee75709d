"""Log-probabilities of prompts: which rows of a step give them, and how many a step may have. Pure.

A row of logits is as long as the vocabulary. So that what is asked for a prompt takes no memory that was not planned, a
step has so many rows at most as a full batch, or as fit beside it; a prompt is computed in smaller pieces for it.
"""

from busload_runtime.engine.plan import Scoring
from busload_runtime.engine.request import Request


class LogitRows:
    """Of one step."""

    def __init__(self, most: int, drawing: int) -> None:
        """`most`: rows that there is memory for; `drawing`: requests that may need one to draw."""
        self._spare = max(0, most - drawing)

    def tokens(self, request: Request, start: int, count: int) -> int:
        """How many of the `count` tokens from position `start` on may be computed: one at least, if there are any."""
        if not request.unscored:
            return count
        plain = max(0, len(request.prompt_logprobs) - start)  # computed again after a preemption, and scored already
        count = min(count, plain + 1 + self._spare)
        self._spare -= max(0, count - plain - 1)
        return count


def scoring_of(request: Request, start: int, end: int) -> Scoring | None:
    """What a chunk of positions `start` .. `end` - 1 has to score."""
    first, last = max(start, len(request.prompt_logprobs)), min(end, request.prompt_length - 1)
    if first >= last:
        return None
    return Scoring(first - start, tuple(request.tokens[first + 1 : last + 1]), request.sampling.logprobs or 0)
