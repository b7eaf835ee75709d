"""The memory plan: what it says in numbers and words, and that a pod divides its memory by the same rule."""

from dataclasses import replace

import pytest
from fluid_service import LIMITS
from hypothesis import given
from hypothesis import strategies as st

from busload_operator.tuning.planner import MemoryPlan, ModelFacts, StepMemory, plan_memory, step_floor
from busload_runtime.engine import memory
from busload_runtime.engine.memory import LimitsImpossible

MIB = 2**20
FACTS = ModelFacts(
    name="model",
    weight_bytes=256 * MIB,
    step_weight_bytes=200 * MIB,
    kv_bytes_per_token=46_080,
    block_tokens=16,
    context_length=32_768,
    step_memory=StepMemory(fixed=64 * MIB),
    overhead_bytes=192 * MIB,
)


def plan(budget: int = 1024 * MIB, length: int = 2048, percent: int = 50, facts: ModelFacts = FACTS) -> MemoryPlan:
    return plan_memory(facts, budget, replace(LIMITS, max_sequence_length=length, kv_cache_percent=percent), threads=2)


def test_fits_with_the_numbers_in_words() -> None:
    found = plan()
    assert found.fits
    # 1024 - 512 MiB are left, half of it is 256 MiB, in blocks of 16 * 46,080 bytes: 364.
    assert found.kv_cache_tokens == 364 * 16
    assert found.requests_of(2048) == 2
    assert found.longest_of(1) == 5824
    assert found.longest_of(4) == 91 * 16
    for part in ("256 MiB", "64.0 MiB", "192 MiB", "5824 tokens", "2 requests of full length 2048"):
        assert part in found.message


def test_weights_alone_are_too_much() -> None:
    found = plan(facts=replace(FACTS, weight_bytes=2048 * MIB))
    assert not found.fits
    assert found.kv_cache_bytes == 0
    assert "does not fit" in found.message
    # 2048 + 64 + 192 MiB and twice the 128 blocks of one request.
    assert "at least 2484Mi" in found.message
    assert plan(budget=2484 * MIB, facts=found.facts).fits
    assert not plan(budget=2483 * MIB, facts=found.facts).fits


def test_one_full_length_request_must_fit() -> None:
    found = plan(length=8192)
    assert not found.fits
    assert "lower maxSequenceLength to at most 5824" in found.message
    assert plan(length=5824).fits
    assert not plan(length=5825).fits


def test_no_sequence_is_longer_than_the_context() -> None:
    found = plan(budget=64 * 1024 * MIB, length=32_769)
    assert not found.fits
    assert found.longest_of(1) == 32_768
    assert "above the context of model, 32768 tokens" in found.message


def test_sizes_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="weight_bytes must be at least 1, got 0"):
        replace(FACTS, weight_bytes=0)
    with pytest.raises(ValueError, match="budget must be at least 1, got 0"):
        plan(budget=0)


def test_the_floor_of_a_step() -> None:
    assert step_floor(FACTS, 100 * MIB) == 2.0
    assert step_floor(FACTS, 200 * MIB, requests=2, length=1000) == 1 + 2 * 1000 * 46_080 / (200 * MIB)
    for bandwidth in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="above 0"):
            step_floor(FACTS, bandwidth)


@given(
    budget=st.integers(1, 4096 * MIB),
    length=st.integers(16, 65_536),
    percent=st.integers(1, 100),
    batch=st.integers(1, 512),
    step=st.builds(StepMemory, *[st.integers(0, 2**18)] * 5),
)
def test_a_pod_divides_its_memory_by_the_same_rule(
    budget: int, length: int, percent: int, batch: int, step: StepMemory
) -> None:
    facts = replace(FACTS, step_memory=step)
    limits = replace(LIMITS, max_sequence_length=length, kv_cache_percent=percent, batch_size=batch, token_budget=512)
    planned = plan_memory(facts, budget, limits, threads=2)
    pod = memory.MemoryPlan(
        budget=memory.Budget(budget, "test"),
        weights=facts.weight_bytes,
        overhead=facts.overhead_bytes,
        block_size=facts.block_tokens,
        bytes_per_block=facts.block_tokens * facts.kv_bytes_per_token,
        context_length=facts.context_length,
        activations=lambda tokens, requests: step.of(tokens, requests, 2),
    )
    try:
        blocks = pod.num_blocks(limits)
    except LimitsImpossible:
        assert not planned.fits
    else:
        assert planned.fits
        assert planned.blocks == blocks
    if length <= facts.context_length:
        needed = planned.budget_for(length)
        assert replace(planned, budget=needed).fits
        assert not replace(planned, budget=needed - 1).fits
