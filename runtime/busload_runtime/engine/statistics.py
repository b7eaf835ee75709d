"""What the engine counts beside the scheduler: time, as integrals on one monotonic clock, and bytes moved."""

from dataclasses import astuple

from busload_runtime.contract import StepLaw
from busload_runtime.engine.counters import Counters, Levels
from busload_runtime.engine.messages import Stats
from busload_runtime.engine.plan import Plan


class Statistics:
    """Call `advance` before every change of the levels: they held since the call before."""

    def __init__(self, now: float) -> None:
        self._clock = now
        self._batch_seconds = 0.0
        self._queue_seconds = 0.0
        self._kv_token_seconds = 0.0
        self._busy_seconds = 0.0
        self._bytes_moved = 0

    def advance(self, now: float, levels: Levels) -> None:
        seconds = now - self._clock
        self._clock = now
        self._batch_seconds += levels.running * seconds
        self._queue_seconds += levels.waiting * seconds
        self._kv_token_seconds += levels.kv_tokens * seconds

    def waited_before(self, seconds: float) -> None:
        """A request had waited this long when the engine first saw it."""
        self._queue_seconds += seconds

    def step(self, seconds: float, plan: Plan, weight_bytes: int, bytes_per_token: float) -> None:
        """A finished step read the weights once and each chunk's keys and values, and wrote those of its tokens."""
        self._busy_seconds += seconds
        kv_tokens = sum([chunk.start + 2 * len(chunk.tokens) for chunk in plan.chunks])
        self._bytes_moved += weight_bytes + round(kv_tokens * bytes_per_token)

    def snapshot(self, counters: Counters, levels: Levels, law: StepLaw | None) -> Stats:
        """The state as of the last `advance`."""
        return Stats(
            clock=self._clock,
            steps=counters.steps,
            busy_seconds=self._busy_seconds,
            step_batch=counters.step_batch,
            step_kv_tokens=counters.step_kv_tokens,
            step_prefill_tokens=counters.step_prefill_tokens,
            generated_tokens=counters.generated_tokens,
            preemptions=counters.preemptions,
            prefix_queried_tokens=counters.prefix_queried_tokens,
            prefix_hit_tokens=counters.prefix_hit_tokens,
            bytes_moved=self._bytes_moved,
            batch_seconds=self._batch_seconds,
            queue_seconds=self._queue_seconds,
            kv_token_seconds=self._kv_token_seconds,
            running=levels.running,
            waiting=levels.waiting,
            queued_prompt_tokens=levels.queued_prompt_tokens,
            kv_blocks=levels.kv_blocks,
            kv_blocks_free=levels.kv_blocks_free,
            step_law=None if law is None else astuple(law),
        )
