"""The limits that a new service starts with, before anything was observed."""

from busload_operator.api.v1alpha1 import Spec
from busload_runtime.contract import Limits

CONTEXT_LENGTHS: dict[str, int] = {"smollm2-135m-instruct": 8192}
"""Longest sequence of each bundled model, in tokens: what its file says. A runtime refuses limits above it."""
BATCH_SIZE = 8
"""Decoding reads all weights per step, so a few requests at once cost little more than one; and the memory of a small
pod surely holds them."""
TOKEN_BUDGET = 512
"""Tokens per step: large enough to prefill well, small enough that a prefill does not stall running requests."""
QUEUED_REQUESTS = 256
QUEUED_TOKENS = 262_144


def initial_limits(spec: Spec) -> Limits:
    """Limits inside the bounds of `spec`. The KV cache and the sequence length start at their upper bounds: memory
    that was set aside for the pod is paid for, and refusing a request that would fit helps nobody. The batch limit
    starts low, because only observation tells where a bigger one stops paying."""
    bounds = spec.bounds
    batch = bounds.batch_size.initial
    if batch is None:
        batch = min(max(BATCH_SIZE, bounds.batch_size.min), bounds.batch_size.max)
    return Limits(
        max_sequence_length=_longest(spec),
        batch_size=batch,
        kv_cache_percent=bounds.kv_cache_percent.max,
        token_budget=max(TOKEN_BUDGET, batch),
        max_queued_requests=QUEUED_REQUESTS,
        # One request of the greatest length must always be able to wait.
        max_queued_tokens=max(QUEUED_TOKENS, _longest(spec)),
    )


def _longest(spec: Spec) -> int:
    bound = spec.bounds.max_sequence_length.max
    if spec.model.source.bundled is None:
        return bound
    return min(bound, CONTEXT_LENGTHS[spec.model.source.bundled])
