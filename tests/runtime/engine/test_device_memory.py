"""An executor whose weights and cache live on a device: the memory plan is the device's, and is shown."""

import pytest
from hashing_executor import HashingExecutor

from busload_runtime.contract import Limits
from busload_runtime.engine.memory import LimitsImpossible
from busload_runtime.engine.process import start
from busload_runtime.executors.contract import DeviceMemory

MIB = 1 << 20
LIMITS = Limits(
    max_sequence_length=256,
    batch_size=4,
    kv_cache_percent=50,
    token_budget=64,
    max_queued_requests=8,
    max_queued_tokens=4096,
)


def on_device(num_bytes: int) -> HashingExecutor:
    executor = HashingExecutor(block_size=64)
    executor.device_memory = DeviceMemory("NVIDIA H200", num_bytes, 30 * MIB)
    return executor


def test_the_budget_is_the_devices_and_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    executor = on_device(100 * MIB)
    _, ready = start("m.gguf", "cuda", None, LIMITS, lambda name, source: executor)
    assert ready.memory_budget_bytes == 100 * MIB
    left = 100 * MIB - 30 * MIB - executor.weight_bytes - executor.activation_bytes(64, 4)
    assert executor.num_blocks == left // 2 // executor.bytes_per_block
    shown = capfd.readouterr().err
    assert "memory: 100 MiB budget (NVIDIA H200) - 1 MiB weights - 0 MiB activations - 30 MiB overhead" in shown
    assert f"50% of the rest is KV cache: 34 MiB, {executor.num_blocks} blocks" in shown


def test_a_flag_takes_less_of_it() -> None:
    _, ready = start("m.gguf", "cuda", 50 * MIB, LIMITS, lambda name, source: on_device(100 * MIB))
    assert ready.memory_budget_bytes == 50 * MIB


def test_a_device_that_is_too_small_is_named() -> None:
    with pytest.raises(LimitsImpossible, match=r"no memory is left for the KV cache: 31 MiB budget \(NVIDIA H200\)"):
        start("m.gguf", "cuda", None, LIMITS, lambda name, source: on_device(31 * MIB))
