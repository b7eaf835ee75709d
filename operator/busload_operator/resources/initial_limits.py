"""The limits that a new service starts with, before anything was observed, and the memory plan behind them."""

from dataclasses import replace

from busload_operator.api.units import parse_bytes, parse_cpu
from busload_operator.api.v1alpha1 import Spec
from busload_operator.resources.gpu import gpu_budget, wants_gpu, weight_bits
from busload_operator.tuning.models import BUNDLED, BUNDLED_ON_GPU
from busload_operator.tuning.planner import MemoryPlan, ModelFacts, plan_memory
from busload_runtime.contract import Limits, default_token_budget

BATCH_SIZE = 8
"""Decoding reads all weights per step, so a few requests at once cost little more than one; and the memory of a small
pod surely holds them."""
QUEUED_REQUESTS = 256
QUEUED_TOKENS = 262_144


def initial_limits(spec: Spec) -> Limits:
    """Limits inside the bounds of `spec`: what the bounds name as `initial`, else the following. The KV cache and the
    sequence length start at their upper bounds: memory that was set aside for the pod is paid for, and refusing a
    request that would fit helps nobody. The batch limit starts low, because only observation tells where a bigger one
    stops paying."""
    bounds = spec.bounds
    batch, percent = bounds.batch_size.initial, bounds.kv_cache_percent.initial
    if batch is None:
        batch = min(max(BATCH_SIZE, bounds.batch_size.min), bounds.batch_size.max)
    if percent is None:
        percent = bounds.kv_cache_percent.max
    length = longest_sequence(spec, percent)
    if bounds.max_sequence_length.initial is not None:
        length = min(length, bounds.max_sequence_length.initial)
    return _limits(spec, length, batch, percent)


def longest_sequence(spec: Spec, percent: int | None = None) -> int:
    """The upper bound, as far as model and memory are known to carry it with a KV cache of so many percent (None: the
    most of the bounds), but never below the lower bound.

    At the largest batch limit of the bounds: a step of it needs more memory, and a pod refuses limits under which one
    sequence of full length no longer fits.
    """
    bounds, facts, available = spec.bounds.max_sequence_length, known_facts(spec), budget(spec)
    if facts is None or available is None:
        return bounds.max
    if percent is None:
        percent = spec.bounds.kv_cache_percent.max
    limits = _limits(spec, bounds.min, spec.bounds.batch_size.max, percent)
    fitting = plan_memory(facts, available, limits, compute_threads(spec)).longest_of(1)
    return min(bounds.max, facts.context_length, max(bounds.min, fitting))


def known_facts(spec: Spec) -> ModelFacts | None:
    """What the model needs; None for a model that only its pods know."""
    name = spec.model.source.bundled or ""
    return BUNDLED_ON_GPU[weight_bits(spec)].get(name) if wants_gpu(spec) else BUNDLED.get(name)


def shortest_plan(spec: Spec, facts: ModelFacts, available: int) -> MemoryPlan:
    """The memory plan of a pod of `available` bytes that has to hold no more than the bounds insist on: their shortest
    sequence."""
    limits = replace(initial_limits(spec), max_sequence_length=spec.bounds.max_sequence_length.min)
    plan = plan_memory(facts, available, limits, compute_threads(spec))
    return replace(plan, budget_name="gpuMemory") if wants_gpu(spec) else plan


def budget(spec: Spec) -> int | None:
    """Bytes that a pod may use for weights, activations and KV cache; None: of a GPU whose memory only pods know."""
    return gpu_budget(spec) if wants_gpu(spec) else parse_bytes(spec.resources.limits.memory)


def compute_threads(spec: Spec) -> int:
    """Threads that a pod computes with: the whole CPUs that it requests."""
    return max(1, parse_cpu(spec.resources.requests.cpu) // 1000)


def _limits(spec: Spec, length: int, batch: int, percent: int) -> Limits:
    return Limits(
        max_sequence_length=length,
        batch_size=batch,
        kv_cache_percent=percent,
        token_budget=default_token_budget(batch),
        max_queued_requests=QUEUED_REQUESTS,
        # One request of the greatest length must always be able to wait.
        max_queued_tokens=max(QUEUED_TOKENS, length),
    )
