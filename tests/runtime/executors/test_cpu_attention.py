"""Attention of the C++ engine: both precisions of the cache, and several segments of keys, which are summed apart by
whichever thread is free."""

from pathlib import Path

import numpy as np
import pytest
import quantised_llama
from generating import GREEDY, AnyExecutor, sized
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray
from tiny_llama import TinyLlama
from tiny_models import VOCABULARY, TinyModel

from busload_kernels.cpu import library
from busload_runtime.engine.plan import Chunk
from busload_runtime.executors.cpu import CpuExecutor
from busload_runtime.executors.create import create_executor
from busload_runtime.executors.errors import ExecutorError
from busload_runtime.executors.reference import ReferenceExecutor
from busload_runtime.model.load import load_weights

ISAS = library.usable_isas()
PRECISIONS = ("int8", "fp32")
BLOCK = library.BLOCK_TOKENS
BLOCKS = 192
TOKENS = np.random.default_rng(5).integers(0, len(VOCABULARY), 1300).tolist()
# More than one segment, ends on and beside the borders of blocks, spans and segments.
LENGTHS = (513, 640, 1025)
# Relative logit error of 2-layer random models against fp32; with their sharp softmax they are harder than real ones.
ERROR = {"int8": 0.1, "fp32": 0.07}


def opened(path: Path, isa: str, kv_precision: str, threads: int = 2) -> CpuExecutor:
    executor = sized(CpuExecutor(load_weights(str(path)), threads, isa, kv_precision), BLOCKS)
    assert isinstance(executor, CpuExecutor)
    return executor


@pytest.fixture(scope="module", params=["all keys", "window of 300"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    if request.param == "all keys":
        TinyLlama(heads=6, kv_heads=2, head_dim=32, context=2048).write(path)
    else:
        window = 300
        TinyModel(
            "gemma3",
            layers=2,
            options={"sliding_window": window, "layer_types": ["sliding_attention", "full_attention"]},
            metadata={"attention.sliding_window": window, "attention.sliding_window_pattern": [True, False]},
        ).write(path)
    return path


def all_logits(executor: AnyExecutor, count: int) -> NDArray[np.float32]:
    chunk = Chunk(1, tuple(TOKENS[:count]), 0, tuple(range(-(-count // executor.block_size))), GREEDY)
    return executor.logits([chunk], range(count))


def at_once(executor: CpuExecutor, length: int) -> NDArray[np.float32]:
    chunk = Chunk(1, tuple(TOKENS[:length]), 0, tuple(range(-(-length // BLOCK))), GREEDY)
    return executor.logits([chunk], [length - 1])[0]


def decoded(executor: CpuExecutor, lengths: tuple[int, ...]) -> NDArray[np.float32]:
    """The last token of each prompt, all of them in one step; what is before it was computed in pieces."""
    free = iter(np.random.default_rng(2).permutation(BLOCKS).tolist())
    tables = [tuple(next(free) for _ in range(-(-length // BLOCK))) for length in lengths]
    for length, table in zip(lengths, tables, strict=True):
        for start in range(0, length - 1, 400):
            piece = tuple(TOKENS[start : min(start + 400, length - 1)])
            executor.logits([Chunk(1, piece, start, table, None)], [0])
    last = [
        Chunk(name, (TOKENS[length - 1],), length - 1, table, GREEDY)
        for name, (length, table) in enumerate(zip(lengths, tables, strict=True))
    ]
    return executor.logits(last, range(len(last)))


@pytest.mark.parametrize("kv_precision", PRECISIONS)
@pytest.mark.parametrize("isa", ISAS)
def test_a_long_context_gives_the_same_bits_however_it_is_computed(model: Path, isa: str, kv_precision: str) -> None:
    executor = opened(model, isa, kv_precision, threads=1)
    expected = np.array([at_once(executor, length) for length in LENGTHS])
    for threads in (1, 3):
        executor = opened(model, isa, kv_precision, threads)
        np.testing.assert_array_equal(decoded(executor, LENGTHS), expected)
        np.testing.assert_array_equal(decoded(executor, LENGTHS[-1:])[0], expected[-1])


@pytest.mark.parametrize("kv_precision", PRECISIONS)
def test_more_segments_than_are_kept_apart(model: Path, kv_precision: str) -> None:
    """100 requests that share all blocks but the last: some have their segments summed apart, some not."""
    executor = opened(model, ISAS[0], kv_precision)
    length, shared = 1300, 1300 // BLOCK
    expected = at_once(executor, length)
    tables = [(*range(shared), shared + name) for name in range(100)]
    for table in tables:
        executor.logits([Chunk(1, tuple(TOKENS[shared * BLOCK : -1]), shared * BLOCK, table, None)], [0])
    chunks = [Chunk(name, (TOKENS[-1],), length - 1, table, GREEDY) for name, table in enumerate(tables)]
    for logits in executor.logits(chunks, range(100)):
        np.testing.assert_array_equal(logits, expected)


@pytest.mark.parametrize("kv_precision", PRECISIONS)
@pytest.mark.parametrize("isa", ISAS)
def test_nothing_but_rounding_differs_over_several_segments(tmp_path: Path, isa: str, kv_precision: str) -> None:
    """To fp64, except after a value that lies so close to a step that it is rounded the other way."""
    path, count, medians = tmp_path / "tiny.gguf", 1100, []
    for seed in range(4):
        TinyLlama(heads=6, layers=1, head_dim=32, context=2048, precision=Type.Q8_0, seed=seed).write(path)
        exact = quantised_llama.logits(load_weights(str(path)), TOKENS[:count], isa, kv_precision)
        ours = all_logits(opened(path, isa, kv_precision), count)
        errors = np.linalg.norm(ours - exact, axis=1) / np.linalg.norm(exact, axis=1)
        assert errors.max() < 0.1
        medians.append(np.median(errors[512:]))
        if medians[-1] < 1e-5:
            break
    assert min(medians) < 1e-5


@pytest.mark.parametrize("shape", [(16, 1, 32), (3, 3, 64), (4, 2, 128), (4, 1, 256)])
def test_what_the_cache_costs_against_exact_attention(tmp_path: Path, shape: tuple[int, int, int]) -> None:
    """Relative logit error against fp32, with int8 activations in both: the fp32 cache leaves only theirs."""
    heads, kv_heads, head_dim = shape
    path, count = tmp_path / "tiny.gguf", 600
    TinyLlama(heads=heads, kv_heads=kv_heads, head_dim=head_dim, context=1024, precision=Type.Q8_0).write(path)
    reference = ReferenceExecutor(load_weights(str(path)))
    exact = all_logits(sized(reference, 2 * BLOCKS), count)
    errors = {}
    for kv_precision in PRECISIONS:
        ours = all_logits(opened(path, ISAS[0], kv_precision), count)
        errors[kv_precision] = float(np.linalg.norm(ours - exact) / np.linalg.norm(exact))
    assert errors["fp32"] < errors["int8"] < ERROR["int8"]
    assert errors["fp32"] < ERROR["fp32"]


def test_bytes_of_a_block(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    TinyLlama(layers=3, heads=6, kv_heads=2, head_dim=32).write(path)
    per_head = {"int8": 2 * 32 + 2 * 4, "fp32": 2 * 32 * 4}
    for kv_precision, size in per_head.items():
        assert opened(path, ISAS[0], kv_precision).bytes_per_block == BLOCK * 3 * 2 * size


def test_precisions_that_are_not_there(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    TinyLlama(head_dim=32).write(path)
    with pytest.raises(ExecutorError, match="--kv-precision is 'int4'; the cpu executor has int8, fp32; choose one"):
        create_executor("cpu", str(path), "int4")
    with pytest.raises(ExecutorError, match="--kv-precision is 'int8'; the reference executor has fp32 only"):
        create_executor("reference", str(path), "int8")
    chosen = create_executor("cpu", str(path), "fp32")
    assert chosen.bytes_per_block == BLOCK * 2 * 2 * 2 * 32 * 4
