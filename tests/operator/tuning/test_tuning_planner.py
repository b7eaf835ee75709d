from dataclasses import replace

import pytest
from fluid_service import LIMITS

from busload_operator.tuning.planner import MemoryPlan, plan_memory

MIB = 2**20


def plan(budget: int = 1024 * MIB, length: int = 2048, percent: int = 50, weights: int = 256 * MIB) -> MemoryPlan:
    return plan_memory(
        budget_bytes=budget,
        weight_bytes=weights,
        activation_bytes=64 * MIB,
        overhead_bytes=192 * MIB,
        kv_bytes_per_token=46_080,
        block_size=16,
        limits=replace(LIMITS, max_sequence_length=length, kv_cache_percent=percent),
    )


def test_fits_with_the_numbers_in_words() -> None:
    found = plan()
    assert found.fits
    # 1024 - 512 MiB are left, half of it is 256 MiB, in blocks of 16 * 46,080 bytes: 364.
    assert found.kv_cache_tokens == 364 * 16
    assert found.full_length_requests == 2
    for part in ("256 MiB", "64.0 MiB", "192 MiB", "5824 tokens", "2 requests of full length 2048", "batchSize of 4"):
        assert part in found.message


def test_weights_alone_are_too_much() -> None:
    found = plan(weights=2048 * MIB)
    assert not found.fits
    assert found.kv_cache_bytes == 0
    assert "does not fit" in found.message
    assert "at least 1.3 GiB" in found.message


def test_one_full_length_request_must_fit() -> None:
    found = plan(length=8192)
    assert not found.fits
    assert found.longest_request == 5824
    assert "lower bounds.maxSequenceLength to 5824 or less" in found.message
    assert plan(length=5824).fits
    assert not plan(length=5825).fits


def test_sizes_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="weight_bytes must be at least 1, got 0"):
        plan(weights=0)
