"""The step law as this engine finds it: first from steps that it tried before it served, then from all that it runs.

It tells how long the queue is, and a server without an operator plans its steps by it.
"""

from dataclasses import astuple
from itertools import product

from busload_runtime import step_law
from busload_runtime.contract import StepLaw
from busload_runtime.engine.messages import Stats

WINDOW_SECONDS = 0.5
"""Of steps in one equation: a single step says little, on a machine that does other things too."""
WINDOW_STEPS = 3
SOLVE_EVERY = 8
"""Equations."""
NEEDED = 20
MAX_ERROR = 0.25
"""Root mean square of the relative error, above which the steps follow no such law."""
TOLERANCE = 0.10
"""What a coefficient must be off for the law to change: all that wait are judged anew by another one."""
FORGETTING = 0.998
"""Weight of an equation one equation later: a half-life of 346, three minutes of steps at least."""
_LENGTHS = (64.0, 512.0)
_BATCHES = (1.0, 2.0, 4.0, 8.0, 16.0)

Work = tuple[float, float, float, float]
"""Steps, and summed over them decodes, KV tokens, prompt tokens."""


class OwnLaw:
    """Pure. `law` is None until enough is known."""

    def __init__(self, tried: StepLaw | None) -> None:
        self.law = tried
        self._gram = [[0.0] * 4 for _ in range(4)]
        self._moment = [0.0] * 4
        self._weight = 0.0
        self._equations = 0
        self._seen: tuple[Work, float] = ((0.0,) * 4, 0.0)
        """Counters at the end of the last window."""
        if tried is not None:
            self._begin_with(tried)

    def observe(self, stats: Stats) -> bool:
        """Takes the counters in; whether the law is another one now."""
        work = (stats.steps, stats.step_batch, stats.step_kv_tokens, stats.step_prefill_tokens)
        before, busy = self._seen
        seconds = stats.busy_seconds - busy
        if seconds < WINDOW_SECONDS or work[0] - before[0] < WINDOW_STEPS:
            return False
        self._seen = work, stats.busy_seconds
        self._add([now - then for now, then in zip(work, before, strict=True)], seconds)
        return self._equations % SOLVE_EVERY == 0 and self._solve()

    def _begin_with(self, law: StepLaw) -> None:
        """Equations of steps as the law has them: decodes of short and of longer sequences, with prompts and without.
        As many as it takes to be of use; what runs outweighs them soon."""
        for batch, length, prompt in product(_BATCHES, _LENGTHS, (0.0, 64.0)):
            work = (1.0, batch, batch * length, prompt)
            seconds = sum(x * y for x, y in zip(astuple(law), work, strict=True))
            if seconds > 0:
                self._add(work, seconds)

    def _add(self, work: list[float] | Work, seconds: float) -> None:
        row = [value / seconds for value in work]
        for i in range(4):
            self._moment[i] = FORGETTING * self._moment[i] + row[i]
            for j in range(4):
                self._gram[i][j] = FORGETTING * self._gram[i][j] + row[i] * row[j]
        self._weight = FORGETTING * self._weight + 1.0
        self._equations += 1

    def _solve(self) -> bool:
        # Without prompts or without decodes among the steps nothing is known of what they cost.
        if self._equations < NEEDED or not (self._gram[1][1] and self._gram[3][3]):
            return False
        found = step_law.least_squares(self._gram, self._moment, self._weight)
        if found is None or found[0] > MAX_ERROR:
            return False
        law = StepLaw(*found[1])
        if self.law is not None and not _differs(self.law, law):
            return False
        self.law = law
        return True


def _differs(old: StepLaw, new: StepLaw) -> bool:
    return any(abs(a - b) > TOLERANCE * max(a, b) for a, b in zip(astuple(old), astuple(new), strict=True))
