"""Does a service fit its memory: weights + activations + overhead + KV cache against the pod's budget."""

from dataclasses import dataclass

from busload_operator.tuning import words
from busload_runtime.contract import Limits


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes, and what they hold."""

    fits: bool
    """Weights, activations, overhead and at least one request of the full length."""
    kv_cache_bytes: int
    """What `kvCachePercent` gives the KV cache of the memory that is left; 0 when nothing is left."""
    kv_cache_tokens: int
    full_length_requests: int
    """Requests of `maxSequenceLength` that the KV cache holds at once."""
    longest_request: int
    """Tokens of the longest single request that fits."""
    message: str
    """One sentence with the numbers, and what to do when it does not fit."""


def plan_memory(
    *,
    budget_bytes: int,
    weight_bytes: int,
    activation_bytes: int,
    overhead_bytes: int,
    kv_bytes_per_token: int,
    block_size: int,
    limits: Limits,
) -> MemoryPlan:
    """The plan of one pod. `overhead_bytes` is what the processes need beside the model.

    Requests need not all be at full length at once (the cache is paged), so less than `batchSize` of them is no fault;
    it is said in the message. Raises `ValueError` for sizes that cannot be.
    """
    sizes = {
        "budget_bytes": budget_bytes,
        "kv_bytes_per_token": kv_bytes_per_token,
        "block_size": block_size,
        "weight_bytes": weight_bytes,
    }
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    fixed = weight_bytes + activation_bytes + overhead_bytes
    left = budget_bytes - fixed
    parts = (
        f"weights {words.size(weight_bytes)}, activations {words.size(activation_bytes)} and overhead "
        f"{words.size(overhead_bytes)}"
    )
    if left <= 0:
        message = (
            f"The model does not fit: {parts} need {words.size(fixed)} of {words.size(budget_bytes)}; raise the memory "
            f"limit by at least {words.size(1 - left)} or use a smaller weight precision."
        )
        return MemoryPlan(False, 0, 0, 0, 0, message)
    block_bytes = block_size * kv_bytes_per_token
    kv_bytes = left * limits.kv_cache_percent // 100 // block_bytes * block_bytes
    tokens = kv_bytes // kv_bytes_per_token
    length = limits.max_sequence_length
    need = -(-length // block_size) * block_bytes
    full = kv_bytes // need
    pool = f"the KV cache gets {words.size(kv_bytes)} ({limits.kv_cache_percent}% of what is left)"
    holds = f"{tokens} tokens of {kv_bytes_per_token} bytes"
    if full == 0:
        message = (
            f"No request of maxSequenceLength {length} fits: beside {parts} {pool}, which holds {holds}; lower "
            f"bounds.maxSequenceLength to {tokens} or less, or raise kvCachePercent or the memory limit."
        )
        return MemoryPlan(False, kv_bytes, tokens, 0, tokens, message)
    message = (
        f"It fits: beside {parts} {pool}, which holds {holds}, enough for {words.count(full, 'request')} of full "
        f"length {length} at a batchSize of {limits.batch_size}."
    )
    return MemoryPlan(True, kv_bytes, tokens, full, tokens, message)
