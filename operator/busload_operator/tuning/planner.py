"""The memory plan of one pod: budget - weights - activations - overhead, and what the KV cache holds of the rest.

The one place where this is worked out before a pod exists: `busload plan`, the condition `Feasible` and the limits of a
new service all ask here. A pod measures its own overhead at start and divides the rest by the same rule.
"""

import math
from dataclasses import dataclass

from busload_operator.tuning import words
from busload_runtime.contract import Limits


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes that one step needs beside weights and KV, as a sum over what it is made of."""

    fixed: int = 0
    per_thread: int = 0
    per_token: int = 0
    per_token_and_thread: int = 0
    tokens_at_once: int = 2**31
    """Tokens that a thread computes before the next ones take the same place; `per_token_and_thread` is of those."""
    per_request: int = 0
    """One row of logits for each request that gets a token."""
    per_row_of_tokens: int = 0
    """Of what is kept for each token in whole panels of `panel` rows; less than one panel is an odd number of rows."""
    per_row_of_requests: int = 0
    """The same for each request that gets a token."""
    panel: int = 1

    def of(self, tokens: int, requests: int, threads: int) -> int:
        """Bytes of a step of so many tokens that draws for so many requests."""
        tokens, requests = max(1, tokens), max(1, min(tokens, requests))
        each_thread = self.per_thread + min(tokens, self.tokens_at_once) * self.per_token_and_thread
        rows = self._rows(tokens) * self.per_row_of_tokens + self._rows(requests) * self.per_row_of_requests
        return self.fixed + threads * each_thread + tokens * self.per_token + requests * self.per_request + rows

    def _rows(self, count: int) -> int:
        return count | 1 if count < self.panel else -(-count // self.panel) * self.panel


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a model needs on one engine. Bytes and tokens."""

    name: str
    weight_bytes: int
    """In memory."""
    step_weight_bytes: int
    """Read by every step: all but an embedding table that is not the output head as well."""
    kv_bytes_per_token: int
    block_tokens: int
    """Tokens per KV block."""
    context_length: int
    """Longest sequence the model was made for."""
    step_memory: StepMemory
    overhead_bytes: int
    """What the processes need beside the model: code, vocabulary, queues, room to grow."""

    def __post_init__(self) -> None:
        least = {"overhead_bytes": 0}
        for name in ("weight_bytes", "step_weight_bytes", "kv_bytes_per_token", "block_tokens", "context_length"):
            least[name] = 1
        for name, low in least.items():
            if (value := getattr(self, name)) < low:
                raise ValueError(f"{self.name}: {name} must be at least {low}, got {value}")


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The account of one pod, in bytes, and what the KV cache holds."""

    facts: ModelFacts
    limits: Limits
    budget: int
    activations: int
    budget_name: str = "the memory limit"
    """What to raise for a larger budget."""

    @property
    def fixed(self) -> int:
        """Everything but the KV cache."""
        return self.facts.weight_bytes + self.activations + self.facts.overhead_bytes

    @property
    def left(self) -> int:
        """What the KV cache may take a share of; negative: so much is missing."""
        return self.budget - self.fixed

    @property
    def block_bytes(self) -> int:
        return self.facts.block_tokens * self.facts.kv_bytes_per_token

    @property
    def blocks(self) -> int:
        """KV blocks that `kvCachePercent` of what is left holds."""
        return max(0, self.left) * self.limits.kv_cache_percent // 100 // self.block_bytes

    @property
    def kv_cache_bytes(self) -> int:
        return self.blocks * self.block_bytes

    @property
    def kv_cache_tokens(self) -> int:
        return self.blocks * self.facts.block_tokens

    @property
    def fits(self) -> bool:
        """One request of `maxSequenceLength` can run; a pod does not start otherwise."""
        return self.requests_of(self.limits.max_sequence_length) >= 1

    def requests_of(self, length: int) -> int:
        """Requests of so many tokens that the KV cache holds at once; 0 for more than the model's context."""
        if length > self.facts.context_length:
            return 0
        return self.blocks // _blocks_of(length, self.facts.block_tokens)

    def longest_of(self, requests: int) -> int:
        """Tokens that each of so many requests may have at once; 0: not even one block each."""
        return min(self.facts.context_length, self.blocks // requests * self.facts.block_tokens)

    def budget_for(self, length: int) -> int:
        """The smallest budget with which one request of so many tokens fits, at these limits."""
        need = _blocks_of(length, self.facts.block_tokens) * self.block_bytes
        return self.fixed + -(-need * 100 // self.limits.kv_cache_percent)

    @property
    def account(self) -> str:
        """`768 MiB - weights 92.0 MiB - ...`: how what is left came about."""
        return (
            f"{words.size(self.budget)} - weights {words.size(self.facts.weight_bytes)} - activations "
            f"{words.size(self.activations)} - overhead {words.size(self.facts.overhead_bytes)}"
        )

    @property
    def message(self) -> str:
        """One sentence with the numbers, and what to do when it does not fit."""
        limits, length = self.limits, self.limits.max_sequence_length
        if length > self.facts.context_length:
            return (
                f"maxSequenceLength {length} is above the context of {self.facts.name}, {self.facts.context_length} "
                "tokens; lower it to that."
            )
        enough = f"raise {self.budget_name} to at least {whole_mib(self.budget_for(length))}"
        if self.left <= 0:
            return f"{self.facts.name} does not fit: {self.account} leaves nothing for the KV cache; {enough}."
        pool = f"{limits.kv_cache_percent}% of {words.size(self.left)} ({self.account})"
        holds = f"{self.kv_cache_tokens} tokens of {self.facts.kv_bytes_per_token} bytes"
        if not self.fits:
            lower = f", or lower maxSequenceLength to at most {self.kv_cache_tokens}" if self.blocks else ""
            return f"No request of maxSequenceLength {length} fits: {pool} holds {holds}; {enough}{lower}."
        full = words.count(self.requests_of(length), "request")
        return f"It fits: {pool} holds {holds}, enough for {full} of full length {length} at once."


def plan_memory(facts: ModelFacts, budget: int, limits: Limits, threads: int) -> MemoryPlan:
    """The plan of one pod of `budget` bytes whose engine computes with so many threads.

    Requests need not all be at full length at once (the cache is paged), so room for less than `batchSize` of them is
    no fault. Raises `ValueError` for a budget or a number of threads below 1.
    """
    for name, value in (("budget", budget), ("threads", threads)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    return MemoryPlan(facts, limits, budget, facts.step_memory.of(limits.token_budget, limits.batch_size, threads))


def step_floor(facts: ModelFacts, bandwidth: float, requests: int = 0, length: int = 0) -> float:
    """Seconds below which no step can go: the bytes it must read / memory bandwidth (bytes per second).

    Each step reads all weights once, and the keys and values of each request in it; the roofline of Williams,
    Waterman and Patterson (2009) with decoding far on its memory side. Weights that stay in the CPU's cache are read
    faster than memory gives them; there the floor of the weights does not hold.
    """
    if not (math.isfinite(bandwidth) and bandwidth > 0):
        raise ValueError(f"bandwidth must be a number of bytes per second above 0, got {bandwidth}")
    return (facts.step_weight_bytes + requests * length * facts.kv_bytes_per_token) / bandwidth


def whole_mib(num_bytes: int) -> str:
    """Bytes rounded up, as Kubernetes spells them: `420Mi`."""
    return f"{-(-num_bytes // 2**20)}Mi"


def _blocks_of(length: int, block_tokens: int) -> int:
    return -(-max(1, length) // block_tokens)
