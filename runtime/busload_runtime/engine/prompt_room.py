"""How many prompt tokens of a step the inter-token objective leaves room for. Pure."""

import math
from collections.abc import Callable

from busload_runtime.contract import Pace

SHARE = 0.90
"""Of the objective, which a step is planned to take: steps scatter, and short outputs average over few of them."""


class PromptRoom:
    """For one step: `SHARE*objective >= a + b*batch + c*kv + d*prompt tokens`, solved for the prompt tokens.

    `batch` decoding requests read `kv` tokens; a chunk of a prompt reads its sequence up to its own end. Unbounded
    while nothing decodes or objective or law are unknown. Some room, `floor` tokens, there always is, so that prompts
    move on beside a batch that takes all the time by itself.
    """

    def __init__(self, pace: Pace, floor: int, decoding: Callable[[], tuple[int, int]]) -> None:
        """`decoding` gives batch and kv; it is asked once, and only if there is a prompt."""
        self._pace = pace
        self._floor = floor
        self._decoding = decoding
        self._seconds: float | None = None
        """Left for prompts."""

    def tokens(self, start: int, most: int) -> int:
        """Of a prompt that is computed up to `start`: how many of `most` tokens fit. Maybe none."""
        if self._seconds is None:
            self._seconds = self._measure()
        law = self._pace.law
        if law is None or self._seconds == math.inf:
            return most
        per_token, left = law.c + law.d, self._seconds - law.c * start
        fitting = left / per_token if per_token > 0 else math.copysign(math.inf, left)
        return int(min(most, max(fitting, self._floor, 0)))

    def take(self, start: int, count: int) -> None:
        """These tokens are planned."""
        law = self._pace.law
        if law is not None and self._seconds is not None:
            self._seconds -= law.c * (start + count) + law.d * count
            self._floor -= count

    def _measure(self) -> float:
        objective, law = self._pace.inter_token_latency, self._pace.law
        if objective is None or law is None:
            return math.inf
        batch, kv_tokens = self._decoding()
        return SHARE * objective - law.a - law.b * batch - law.c * kv_tokens if batch else math.inf
