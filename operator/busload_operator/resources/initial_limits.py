"""The limits that a new service starts with, before anything was observed."""

from busload_operator.api.units import parse_bytes
from busload_operator.api.v1alpha1 import BUNDLED_CONTEXTS, Spec
from busload_runtime.contract import Limits

BATCH_SIZE = 8
"""Decoding reads all weights per step, so a few requests at once cost little more than one; and the memory of a small
pod surely holds them."""
TOKEN_BUDGET = 512
"""Tokens per step: large enough to prefill well, small enough that a prefill does not stall running requests."""
QUEUED_REQUESTS = 256
QUEUED_TOKENS = 262_144

# What a pod of a bundled model needs beside the KV cache, and per token of it, as the runtime reports them at start
# (weights, activations of TOKEN_BUDGET tokens, process), with some room. A pod that starts with too long a sequence
# ends at once and says how long it may be; these figures spare small pods that.
_MIB = 1024**2
_RESIDENT_BYTES = {"smollm2-135m-instruct": 352 * _MIB}
_KV_BYTES_PER_TOKEN = {"smollm2-135m-instruct": 12_240}
_BLOCK_TOKENS = 32


def initial_limits(spec: Spec) -> Limits:
    """Limits inside the bounds of `spec`. The KV cache and the sequence length start at their upper bounds: memory
    that was set aside for the pod is paid for, and refusing a request that would fit helps nobody. The batch limit
    starts low, because only observation tells where a bigger one stops paying."""
    bounds = spec.bounds
    batch = bounds.batch_size.initial
    if batch is None:
        batch = min(max(BATCH_SIZE, bounds.batch_size.min), bounds.batch_size.max)
    longest = longest_sequence(spec)
    return Limits(
        max_sequence_length=longest,
        batch_size=batch,
        kv_cache_percent=bounds.kv_cache_percent.max,
        token_budget=max(TOKEN_BUDGET, batch),
        max_queued_requests=QUEUED_REQUESTS,
        # One request of the greatest length must always be able to wait.
        max_queued_tokens=max(QUEUED_TOKENS, longest),
    )


def longest_sequence(spec: Spec) -> int:
    """The upper bound, as far as model and memory are known to carry it, but never below the lower bound."""
    bounds, bundled = spec.bounds.max_sequence_length, spec.model.source.bundled
    if bundled is None:
        return bounds.max
    free = parse_bytes(spec.resources.limits.memory) - _RESIDENT_BYTES[bundled]
    tokens = free * spec.bounds.kv_cache_percent.max // (100 * _KV_BYTES_PER_TOKEN[bundled])
    fitting = max(bounds.min, tokens // _BLOCK_TOKENS * _BLOCK_TOKENS)
    return min(bounds.max, BUNDLED_CONTEXTS[bundled], fitting)
