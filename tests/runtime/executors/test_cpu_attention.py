"""Attention of the C++ engine over several segments of keys, which are summed apart by whichever thread is free."""

from pathlib import Path

import numpy as np
import pytest
import quantised_llama
from generating import GREEDY, sized
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray
from tiny_llama import TinyLlama
from tiny_models import VOCABULARY, TinyModel

from busload_kernels.cpu import library
from busload_runtime.engine.plan import Chunk
from busload_runtime.executors.cpu import CpuExecutor
from busload_runtime.model.load import load_weights

ISAS = library.usable_isas()
BLOCK = library.BLOCK_TOKENS
BLOCKS = 192
TOKENS = np.random.default_rng(5).integers(0, len(VOCABULARY), 1300).tolist()
# More than one segment, ends on and beside the borders of blocks, spans and segments.
LENGTHS = (513, 640, 1025)


def opened(path: Path, isa: str, threads: int = 2) -> CpuExecutor:
    executor = sized(CpuExecutor(load_weights(str(path)), threads=threads, isa=isa), BLOCKS)
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


@pytest.mark.parametrize("isa", ISAS)
def test_a_long_context_gives_the_same_bits_however_it_is_computed(model: Path, isa: str) -> None:
    executor = opened(model, isa, threads=1)
    expected = np.array([at_once(executor, length) for length in LENGTHS])
    for threads in (1, 3):
        executor = opened(model, isa, threads)
        np.testing.assert_array_equal(decoded(executor, LENGTHS), expected)
        np.testing.assert_array_equal(decoded(executor, LENGTHS[-1:])[0], expected[-1])


def test_more_segments_than_are_kept_apart(model: Path) -> None:
    """100 requests that share all blocks but the last: some have their segments summed apart, some not."""
    executor = opened(model, ISAS[0])
    length, shared = 1300, 1300 // BLOCK
    expected = at_once(executor, length)
    tables = [(*range(shared), shared + name) for name in range(100)]
    for table in tables:
        executor.logits([Chunk(1, tuple(TOKENS[shared * BLOCK : -1]), shared * BLOCK, table, None)], [0])
    chunks = [Chunk(name, (TOKENS[-1],), length - 1, table, GREEDY) for name, table in enumerate(tables)]
    for logits in executor.logits(chunks, range(100)):
        np.testing.assert_array_equal(logits, expected)


@pytest.mark.parametrize("isa", ISAS)
def test_nothing_but_rounding_differs_over_several_segments(tmp_path: Path, isa: str) -> None:
    """To fp64, except after a value that lies so close to a step that it is rounded the other way."""
    path, count, medians = tmp_path / "tiny.gguf", 1100, []
    for seed in range(4):
        TinyLlama(heads=6, layers=1, head_dim=32, context=2048, precision=Type.Q8_0, seed=seed).write(path)
        exact = quantised_llama.logits(load_weights(str(path)), TOKENS[:count])
        chunk = Chunk(1, tuple(TOKENS[:count]), 0, tuple(range(-(-count // BLOCK))), GREEDY)
        ours = opened(path, isa).logits([chunk], range(count))
        errors = np.linalg.norm(ours - exact, axis=1) / np.linalg.norm(exact, axis=1)
        assert errors.max() < 0.1
        medians.append(np.median(errors[512:]))
        if medians[-1] < 1e-5:
            break
    assert min(medians) < 1e-5
