"""What the engine relies on beside right logits: independence of batch-mates, memory, clear errors."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from threadpoolctl import threadpool_info
from tiny_llama import TinyLlama

from busload_runtime.engine.plan import Chunk, Plan, SamplingParams
from busload_runtime.executors.contract import Executor
from busload_runtime.executors.create import create_executor
from busload_runtime.executors.errors import ExecutorError
from busload_runtime.executors.kv_pool import KvPool
from busload_runtime.executors.linear import Linear, rows_of, tile, usable_threads
from busload_runtime.executors.reference import ReferenceExecutor
from busload_runtime.model.load import load_weights

GREEDY = SamplingParams(temperature=0)
# Where OpenBLAS uses one kernel for 2 to 16 rows, decoding rows must agree to the bit.
EXACT = any(info.get("architecture") in ("SkylakeX", "Cooperlake", "SapphireRapids") for info in threadpool_info())
TOLERANCE = 0.0 if EXACT else 1e-5


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> ReferenceExecutor:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    TinyLlama(heads=9, kv_heads=3, head_dim=64, ffn=1536, context=512).write(path)
    executor = ReferenceExecutor(load_weights(str(path)))
    executor.reserve(256)
    executor.resize(256)
    return executor


def test_it_is_an_executor(executor: ReferenceExecutor) -> None:
    contract: Executor = executor
    assert (contract.block_size, contract.context_length) == (16, 512)
    assert contract.bytes_per_block == 2 * 2 * 3 * 64 * 4 * 16
    assert contract.vocab_size == len(TinyLlama().tokens)
    weights = contract.vocab_size * 576 + 2 * (576 * (960 + 576 + 3 * 1536) + 2 * 576) + 576
    assert weights * 4 <= contract.weight_bytes <= weights * 4 * 1.05
    assert contract.copy_bandwidth > 1e8


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_a_decode_does_not_see_its_batch_mates(executor: ReferenceExecutor, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 60), min_size=2, max_size=24))
    pieces = data.draw(st.lists(st.integers(2, 40), max_size=2))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    table = iter(rng.permutation(256).tolist())

    def request(name: int, length: int) -> Chunk:
        blocks = tuple(next(table) for _ in range(-(-length // 16)))
        return Chunk(name, tuple(rng.integers(0, 250, length).tolist()), 0, blocks, GREEDY)

    decodes = []
    for name, length in enumerate(lengths):
        prompt = request(name, length + 1)
        executor.run(Plan((Chunk(name, prompt.tokens[:-1], 0, prompt.blocks, None),)))
        decodes.append(Chunk(name, prompt.tokens[-1:], length, prompt.blocks, GREEDY))
    alone = np.concatenate([executor.logits([chunk], [0]) for chunk in decodes])
    prompts = [request(100 + index, length) for index, length in enumerate(pieces)]
    together = executor.logits([*decodes, *prompts], range(len(decodes)))
    np.testing.assert_allclose(together, alone, atol=TOLERANCE * np.abs(alone).max(), rtol=0)


@pytest.mark.parametrize(("outputs", "inputs"), [(576, 576), (3072, 576), (576, 1536), (77, 100), (500, 2048), (1, 3)])
def test_linear_is_the_product(outputs: int, inputs: int) -> None:
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((outputs, inputs), dtype=np.float32)
    x = rng.standard_normal((70, inputs), dtype=np.float32)
    tiles = tile(weight)
    exact = x.astype(np.float64) @ weight.T.astype(np.float64)
    for threads in (1, 3):
        for num_decodes in (0, 1, 16, 17, 70):
            ours = Linear(threads)(x, tiles, num_decodes)
            np.testing.assert_allclose(ours[:, :outputs], exact, atol=2e-6 * inputs, rtol=0)
            assert not ours[:, outputs:].any()
    np.testing.assert_array_equal(rows_of(tiles, np.array([outputs - 1, 0])), weight[[-1, 0]])


def test_threads_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert usable_threads() == 3
    for unusable in ("0", "", "many", "-1"):
        monkeypatch.setenv("OMP_NUM_THREADS", unusable)
        assert usable_threads() >= 1


def test_unknown_executor() -> None:
    with pytest.raises(ExecutorError, match=r"executor 'gpu' is unknown; allowed: reference"):
        create_executor("gpu", "model.gguf")


@pytest.mark.parametrize(("tokens", "decodes"), [(1, 1), (24, 24), (200, 1), (500, 1), (150, 12)])
def test_activation_bytes_bound_a_step(executor: ReferenceExecutor, tokens: int, decodes: int) -> None:
    # Decodes at the end of long contexts whose blocks are scattered, so that keys and values are copied.
    length = 16 * (256 // decodes) if decodes > 1 else 512
    length = min(length, 512)
    order = np.random.default_rng(0).permutation(256).tolist()
    per = length // 16
    params = SamplingParams(temperature=1.0, top_p=0.9, top_k=20)
    chunks = [Chunk(i, (1,), length - 1, tuple(order[i * per : (i + 1) * per]), params) for i in range(decodes)]
    if decodes == 1:
        chunks = [Chunk(0, (3,) * tokens, length - tokens, tuple(order[:per]), params)]
    bound = executor.activation_bytes(tokens, decodes)
    tracemalloc.start()
    try:
        executor.run(Plan(tuple(chunks)))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # BLAS's own buffers are not traced, so they are left out on both sides.
    assert peak <= bound - usable_threads() * 2**25


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_pool_commits_when_written_and_gives_back() -> None:
    before = resident_bytes()
    pool = KvPool(2, (16, 4, 64), 4096)  # 128 MiB of address space
    pool.resize(4096)
    assert resident_bytes() - before < 2**23
    pool.blocks[:, :, :2048] = 1
    committed = resident_bytes() - before
    assert committed > 60 * 2**20
    pool.resize(512)
    assert resident_bytes() - before < committed * 0.3
    assert (pool.blocks == 1).all()
    assert pool.blocks.shape[2] == 512
    pool.resize(1024)
    assert (pool.blocks[:, :, :512] == 1).all()
    assert not pool.blocks[:, :, 512:].any()
    pool.resize(0)
    assert resident_bytes() - before < 2**23


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=6))
def test_resizing_never_touches_what_stays(sizes: list[int]) -> None:
    # Blocks of 192 bytes: page borders fall inside blocks.
    pool = KvPool(3, (4, 1, 12), 40)
    kept = 0
    for stamp, size in enumerate(sizes, start=1):
        kept = min(kept, size)
        pool.resize(size)
        if kept:
            assert (pool.blocks[:, :, :kept] == stamp - 1).all()
        pool.blocks[:] = stamp
        kept = size
