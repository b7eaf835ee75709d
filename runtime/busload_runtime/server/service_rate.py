"""How fast requests are served, and so how long a queue lasts: by the step law where one is known, else as measured."""

from collections import deque

from busload_runtime.contract import StepLaw
from busload_runtime.engine.messages import Stats

_WINDOW_BUSY_SECONDS = 30.0
_SNAPSHOT_SECONDS = 1.0
_LEAST_BUSY_SECONDS = 0.5
"""Of steps in the window, for its rate to mean anything."""
_FORGETTING = 1 / 32
"""Share of one request in the mean lengths."""


class ServiceRate:
    """Predicts from lengths of finished requests and the time that steps take. Pure: time is the engine's busy time,
    so idleness slows nothing down."""

    def __init__(self) -> None:
        self.law: StepLaw | None = None
        self._snapshots: deque[tuple[float, int]] = deque()
        """Busy seconds, and prompt and output tokens computed in them."""
        self._prompt = 0.0
        self._output = 0.0
        """Mean lengths of finished requests; 0: none has finished."""

    def observe(self, stats: Stats) -> None:
        """The engine's newest counters."""
        now = stats.busy_seconds
        if self._snapshots and now - self._snapshots[-1][0] < _SNAPSHOT_SECONDS:
            return
        self._snapshots.append((now, stats.step_prefill_tokens + stats.generated_tokens))
        while now - self._snapshots[0][0] > _WINDOW_BUSY_SECONDS and len(self._snapshots) > 2:
            self._snapshots.popleft()

    def finished(self, prompt_tokens: int, output_tokens: int) -> None:
        """Lengths of a request that ended by itself."""
        share = _FORGETTING if self._output else 1.0
        self._prompt += share * (prompt_tokens - self._prompt)
        self._output += share * (output_tokens - self._output)

    def seconds(self, requests: int, prompt_tokens: int, batch: int) -> float | None:
        """How long a full batch of `batch` requests takes to serve `requests` more with so many prompt tokens in all;
        None while nothing is known of it.

        By the law a step of B decodes takes a + B*(b + c*kv), each request takes D of them and its share of them is
        1/B; its prompt takes d for each token. Measured: tokens to compute over tokens computed per busy second.
        """
        if not self._output:
            return None
        law, output = self.law, self._output
        if law is not None:
            kv_tokens = self._prompt + output / 2
            per_request = output * (law.a / max(batch, 1) + law.b + law.c * kv_tokens)
            return requests * per_request + law.d * prompt_tokens
        if not self._snapshots:
            return None
        (first, tokens_before), (last, tokens) = self._snapshots[0], self._snapshots[-1]
        if last - first < _LEAST_BUSY_SECONDS or tokens == tokens_before:
            return None
        return (prompt_tokens + requests * output) * (last - first) / (tokens - tokens_before)
