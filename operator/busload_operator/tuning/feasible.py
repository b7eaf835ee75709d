"""Whether what a spec asks for can be had at all, said before a pod is tried: memory, and the floor of a step."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from busload_operator.tuning import words
from busload_operator.tuning.planner import MemoryPlan, ModelFacts, StepMemory, step_floor

FACT_SAMPLES = (
    "busload_weight_bytes",
    "busload_kv_bytes_per_token",
    "busload_kv_block_size_tokens",
    "busload_kv_blocks",
    "busload_limit_kv_cache_percent",
    "busload_memory_budget_bytes",
    "busload_copy_bandwidth_bytes_per_second",
)
"""Metrics of a pod that say what its model needs and what its machine gives."""
_NO_CONTEXT = 2**30


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Memory bandwidth of one replica, in bytes per second, and who says so."""

    bytes_per_second: float
    source: str

    @property
    def text(self) -> str:
        return f"{gigabytes(self.bytes_per_second)} GB/s ({self.source})"


@dataclass(frozen=True, slots=True)
class Reported:
    """What a pod said about its model and machine."""

    facts: ModelFacts
    """`overhead_bytes` holds activations too: a pod reports only what it has left."""
    copy_bandwidth: float
    budget: int
    """Bytes that the pod plans with."""


@dataclass(frozen=True, slots=True)
class Feasibility:
    """`possible` None: not known, and `message` says why."""

    possible: bool | None
    reason: str
    """One CamelCase word, as a condition has it."""
    message: str


def judge(plan: MemoryPlan | None, longest: int, objective: float, bandwidth: Bandwidth | None) -> Feasibility:
    """`plan` is of the shortest `maxSequenceLength` that the bounds allow; None: the model's figures are not known.

    `longest` is the upper bound of `maxSequenceLength`, `objective` the inter-token latency in seconds.
    """
    if plan is None:
        text = "what the model needs is not known before its first pod is ready"
        return Feasibility(None, "ModelUnknown", f"{text}; `busload plan --model FILE.gguf` reads it from the file.")
    floor = _floor(plan.facts, objective, bandwidth)
    if not plan.fits:
        reason = "ModelDoesNotFit" if plan.blocks == 0 else "SequenceDoesNotFit"
        if plan.limits.max_sequence_length > plan.facts.context_length:
            reason = "SequenceAboveContext"
        also = f" {floor.message}" if floor.possible is False else ""
        return Feasibility(False, reason, f"{plan.message}{also}")
    if floor.possible is None or not floor.possible:
        return floor
    return Feasibility(True, "PlanFits", f"{_memory(plan, longest)} {floor.message}")


def _memory(plan: MemoryPlan, longest: int) -> str:
    holds = min(longest, plan.longest_of(1))
    short = "" if holds == longest else f" of the {longest} that bounds.maxSequenceLength.max allows"
    return f"One request may have up to {holds} tokens{short}: {plan.account} leaves {words.size(plan.left)}."


def _floor(facts: ModelFacts, objective: float, bandwidth: Bandwidth | None) -> Feasibility:
    reads = f"Each step reads {words.size(facts.step_weight_bytes)} of weights"
    if bandwidth is None:
        text = f"{reads}; how long that takes is not known before a pod has measured its memory bandwidth."
        return Feasibility(None, "BandwidthUnknown", text)
    least = step_floor(facts, bandwidth.bytes_per_second)
    takes = f"{reads}, which takes {latency(least)} at {bandwidth.text}"
    if least > objective:
        text = (
            f"{takes}: objectives.interTokenLatency {latency(objective)} cannot be met by any setting; raise it, "
            "or use a smaller model, a smaller weight precision or faster memory."
        )
        return Feasibility(False, "ObjectiveBelowBandwidthFloor", text)
    return Feasibility(True, "PlanFits", f"{takes}; objectives.interTokenLatency is {latency(objective)}.")


def reported(name: str, samples: Mapping[str, float]) -> Reported | None:
    """From sample name -> value of one pod's metrics; None when they lack one or hold what cannot be (loading: 0)."""
    values = [samples.get(sample, math.nan) for sample in FACT_SAMPLES]
    if not all(math.isfinite(value) and value > 0 for value in values):
        return None
    weights, per_token, block_tokens, blocks, percent, budget = map(int, values[:6])
    left = blocks * block_tokens * per_token * 100 // max(1, percent)
    if min(weights, per_token, block_tokens, budget - weights - left) < 1:
        return None
    facts = ModelFacts(
        name=name,
        weight_bytes=weights,
        step_weight_bytes=weights,
        kv_bytes_per_token=per_token,
        block_tokens=block_tokens,
        context_length=_NO_CONTEXT,
        step_memory=StepMemory(),
        overhead_bytes=budget - weights - left,
    )
    return Reported(facts, values[6], budget)


def gigabytes(bytes_per_second: float) -> str:
    """GB/s (10^9 bytes) with two digits, so that one machine says the same every time it measures."""
    value = bytes_per_second / 1e9
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def latency(seconds: float) -> str:
    """`2.1ms` below 10 ms, else as `words.seconds` has it."""
    return f"{1000 * seconds:.2g}ms" if seconds < 0.01 else words.seconds(seconds)
