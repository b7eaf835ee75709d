"""Memory of the GPU executor without a GPU: the pool on a driver that keeps books, and a worst-case step."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import TinyModel

from busload_runtime.engine.memory import device_budget
from busload_runtime.executors.cuda import CudaExecutor, CudaOptions
from busload_runtime.executors.errors import ExecutorError
from busload_runtime.executors.torch_model.device import memory_enough
from busload_runtime.executors.torch_model.device_pool import DevicePool, OutOfMemory
from busload_runtime.executors.torch_model.kv_cache import BLOCK_SIZE, CacheShape, DeviceCache
from busload_runtime.executors.torch_model.loading import GgufCheckpoint
from busload_runtime.executors.torch_model.quantise import quantise_matrix, quantise_rows
from busload_runtime.executors.torch_model.step import worst_case
from busload_runtime.model.load import load_weights

GRANULE = 4096


class BookkeepingDriver:
    """Implements `device_pool.Driver` on nothing; refuses what a real one would."""

    granularity = GRANULE

    def __init__(self, num_bytes: int) -> None:
        self.free_bytes = num_bytes
        self.reserved: dict[int, int] = {}
        self.mapped: dict[int, int] = {}

    def reserve(self, size: int) -> int:
        if size > 2**40:
            raise OutOfMemory("no address space")
        address = GRANULE * 1000 + max((start + length for start, length in self.reserved.items()), default=0)
        self.reserved[address] = size
        return address

    def free(self, address: int, size: int) -> None:
        assert self.reserved.pop(address) == size
        assert not any(address <= at < address + size for at in self.mapped)

    def map(self, address: int, size: int) -> None:
        assert size % GRANULE == 0
        assert address % GRANULE == 0
        assert any(first <= address and address + size <= first + space for first, space in self.reserved.items())
        assert all(address + size <= other or other + length <= address for other, length in self.mapped.items())
        if size > self.free_bytes:
            raise OutOfMemory("the GPU is out of memory")
        self.free_bytes -= size
        self.mapped[address] = size

    def unmap(self, address: int, size: int) -> None:
        assert self.mapped.pop(address) == size
        self.free_bytes += size


@given(
    regions=st.integers(1, 6),
    block_bytes=st.integers(1, 3 * GRANULE),
    sizes=st.lists(st.integers(0, 50), max_size=8),
    room=st.integers(0, 6 * 50 * 3 * GRANULE),
)
def test_what_is_used_is_mapped_and_little_more(regions: int, block_bytes: int, sizes: list[int], room: int) -> None:
    driver = BookkeepingDriver(room)
    pool = DevicePool(driver, regions, block_bytes, 50)
    used = 0
    for size in sizes:
        before = set(driver.mapped)
        problem = ""
        try:
            pool.resize(size)
        except ExecutorError as error:
            problem = str(error)
        if problem:
            assert re.match(r"cannot get \d+ MiB more for \d+ KV blocks: the GPU is out of memory; lower", problem)
            assert set(driver.mapped) == before
        else:
            # What stays keeps its memory, and with it its content.
            assert before <= set(driver.mapped) or set(driver.mapped) <= before
            used = size
        for region in range(regions):
            covered = [at for at in driver.mapped if 0 <= at - pool.address(region) < used * block_bytes]
            assert sum(driver.mapped[at] for at in covered) >= used * block_bytes
        assert sum(driver.mapped.values()) <= regions * used * block_bytes + pool.rounding_bytes
    pool.close()
    assert not driver.reserved
    assert driver.free_bytes == room


def test_a_pool_has_bounds() -> None:
    pool = DevicePool(BookkeepingDriver(2**30), 2, 100, 10)
    for size in (11, -1):
        with pytest.raises(ExecutorError, match=f"cannot resize the KV cache to {size} blocks; reserved: 10"):
            pool.resize(size)
    with pytest.raises(ExecutorError, match=r"cannot reserve \d+ KV blocks \(\d+ bytes of address space\): no address"):
        DevicePool(BookkeepingDriver(2**30), 2, 2**20, 2**20)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16])
def test_a_device_cache_has_its_pages_where_they_were(dtype: torch.dtype) -> None:
    """Tensors are made of addresses, shapes and types; here their addresses are kept instead."""
    made: dict[int, tuple[tuple[int, ...], torch.dtype]] = {}

    def tensor_at(address: int, shape: tuple[int, ...], kind: torch.dtype) -> torch.Tensor:
        made[address] = shape, kind
        return torch.empty(shape, dtype=kind, device="meta")

    shape = CacheShape(num_layers=3, kv_heads=2, head_dim=32, dtype=dtype)
    driver = BookkeepingDriver(2**24)
    cache = DeviceCache(shape, 20, driver, tensor_at)
    cache.resize(7)
    first = dict(made)
    assert len(first) == 3 * 2 * (2 if dtype == torch.int8 else 1)
    assert cache.layer(2).keys.shape == (7, 2, BLOCK_SIZE, 32)
    assert (cache.layer(0).key_scales is not None) == (dtype == torch.int8)
    assert sum(driver.mapped.values()) <= 7 * shape.bytes_per_block + cache.rounding_bytes
    cache.resize(12)
    assert made.keys() == first.keys()
    driver.free_bytes = 0
    with pytest.raises(ExecutorError, match="cannot get"):
        cache.resize(20)
    assert cache.num_blocks == 12
    cache.close()
    assert not driver.reserved
    assert not driver.mapped


@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 100))
def test_a_worst_case_is_as_large_as_asked(tokens: int, batch: int, longest: int) -> None:
    chunks = worst_case(tokens, min(batch, tokens), longest)
    assert sum(len(chunk.tokens) for chunk in chunks) == tokens
    assert all(len(chunk.tokens) <= longest and set(chunk.blocks) == {0} for chunk in chunks)
    assert len(chunks) >= min(batch, tokens)


def test_a_worst_case_step_writes_nothing(tmp_path: Path) -> None:
    TinyModel("llama", layers=2).write(tmp_path / "tiny.gguf")
    executor = CudaExecutor(GgufCheckpoint(load_weights(str(tmp_path / "tiny.gguf"))), CudaOptions("cpu"))
    executor.reserve(2)
    executor.resize(2)
    for layer in range(2):
        executor._cache.layer(layer).keys.fill_(3.0)
        executor._cache.layer(layer).values.fill_(0.5)
    executor.run_worst_case(100, 7, executor._cache)
    executor.run_worst_case(4, 4, executor._cache)
    for layer in range(2):
        assert np.array_equal(np.unique(executor._cache.layer(layer).keys.numpy()), [3.0])
        assert np.array_equal(np.unique(executor._cache.layer(layer).values.numpy()), [0.5])


def test_a_gpu_that_runs_out_says_when(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**20, 2**30))
    with (
        pytest.raises(
            ExecutorError,
            match=r"^the GPU ran out of memory in a step of 9 tokens \(1 of its 1024 MiB are free\): lower",
        ),
        memory_enough("in a step of 9 tokens"),
    ):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_a_large_matrix_is_quantised_in_parts(dtype: torch.dtype) -> None:
    matrix = torch.randn((9000, 3), generator=torch.Generator().manual_seed(0))
    codes, scales = quantise_matrix(matrix, dtype)
    whole, expected = quantise_rows(matrix, dtype)
    assert torch.equal(codes.view(torch.int8), whole.view(torch.int8))
    assert torch.equal(scales, expected)


def test_the_budget_is_the_devices() -> None:
    assert (device_budget(None, "NVIDIA H200", 100).num_bytes, device_budget(None, "x", 1).source) == (100, "x")
    assert device_budget(40, "NVIDIA H200", 100).num_bytes == 40
    assert device_budget(400, "NVIDIA H200", 100).num_bytes == 100
