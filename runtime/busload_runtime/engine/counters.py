"""What the scheduler counts, and what it holds."""

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Work of committed steps since the start."""

    steps: int = 0
    step_batch: int = 0
    """Sum over steps of decoding requests."""
    step_kv_tokens: int = 0
    """Sum over steps of KV tokens read by attention: for each chunk, the length of its sequence after the step."""
    step_prefill_tokens: int = 0
    """Tokens computed that were not a decode; recomputation included."""
    recomputed_tokens: int = 0
    """Tokens computed again after a preemption."""
    generated_tokens: int = 0
    preemptions: int = 0
    prefix_queried_tokens: int = 0
    """Prompt tokens of requests that started for the first time."""
    prefix_hit_tokens: int = 0
    """Those of them that were cached. A preempted request that finds its own blocks again counts in neither."""


@dataclass(frozen=True, slots=True)
class Levels:
    """What the scheduler holds now."""

    running: int
    waiting: int
    queued_prompt_tokens: int
    """Tokens of waiting requests."""
    kv_tokens: int
    """Computed tokens of running requests; a shared token counts for each."""
    kv_blocks: int
    kv_blocks_free: int
