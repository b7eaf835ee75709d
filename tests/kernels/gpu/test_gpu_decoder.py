"""The whole decoder with the kernels as its operations, in the interpreter, against plain torch operations."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "..", "runtime"))
from tiny_models import VOCABULARY, TinyModel

from busload_runtime.engine.plan import Chunk, Plan, SamplingParams
from busload_runtime.executors.cuda import CudaExecutor, CudaOptions
from busload_runtime.executors.torch_model.loading import GgufCheckpoint, Int4, LayerTensors
from busload_runtime.executors.torch_model.triton_ops import TritonOps
from busload_runtime.model.load import load_weights

GREEDY = SamplingParams(temperature=0)
SMALL = {"layers": 1, "heads": 4, "kv_heads": 2, "head_dim": 16, "hidden": 64, "ffn": 96}
MODELS = {
    "llama": TinyModel("llama", **SMALL),
    "qwen2": TinyModel("qwen2", **SMALL, tied=False),
    "qwen3": TinyModel("qwen3", **SMALL),
}


def tokens(count: int, seed: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, len(VOCABULARY), count).tolist())


def both(path: Path, kind: type[GgufCheckpoint] = GgufCheckpoint, **options: Any) -> tuple[CudaExecutor, CudaExecutor]:
    """With torch operations, and with kernels."""
    made = []
    for kernels in (False, True):
        executor = CudaExecutor(kind(load_weights(str(path))), CudaOptions("cpu", **options))
        if kernels:
            executor._ops = TritonOps("interpreter", executor._config, executor._cache_shape.dtype)
        executor.reserve(16)
        executor.resize(16)
        made.append(executor)
    return made[0], made[1]


@pytest.mark.parametrize(
    ("model", "options", "bound"),
    [
        ("llama", {}, 1e-5),
        ("qwen2", {}, 1e-5),
        ("qwen3", {"kv_precision": "int8", "weight_precision": "int8"}, 5e-3),
        ("qwen3", {"kv_precision": "fp8"}, 0.1),
    ],
    ids=str,
)
def test_kernels_compute_what_torch_does(model: str, options: dict[str, str], bound: float, tmp_path: Path) -> None:
    """Prompts in pieces, a piece beside a decode, decodes alone: every path through attention."""
    MODELS[model].write(tmp_path / "tiny.gguf")
    exact, ours = both(tmp_path / "tiny.gguf", **options)
    long, short = tokens(70, 1), tokens(7, 2)
    steps = [
        [Chunk(1, long[:40], 0, (3,), None), Chunk(2, short[:6], 0, (5,), GREEDY)],
        [Chunk(1, long[40:68], 40, (3, 9), GREEDY), Chunk(2, short[6:], 6, (5,), GREEDY)],
        [Chunk(1, long[68:69], 68, (3, 9), GREEDY), Chunk(2, (7,), 7, (5,), GREEDY)],
    ]
    for chunks in steps:
        rows = np.cumsum([len(chunk.tokens) for chunk in chunks]) - 1
        expected, found = (executor.logits(chunks, rows.tolist()) for executor in (exact, ours))
        assert np.linalg.norm(found - expected) / np.linalg.norm(expected) < bound


class FourBits(GgufCheckpoint):
    """The matrices of a file in 4 bits, in groups of 32."""

    def layer(self, index: int) -> LayerTensors:
        layer = super().layer(index)
        return replace(
            layer,
            qkv=tuple(four_bits(part) for part in layer.qkv),
            **{name: four_bits(getattr(layer, name)) for name in ("attention_output", "gate", "up", "down")},
        )


def four_bits(matrix: Any) -> Int4:
    groups = matrix.unflatten(1, (-1, 32))
    scales = groups.abs().amax(-1) / 7
    return Int4((groups / scales[..., None]).round().to(torch.int8).flatten(1), scales)


def test_four_bits(tmp_path: Path) -> None:
    MODELS["llama"].write(tmp_path / "tiny.gguf")
    exact, ours = both(tmp_path / "tiny.gguf", FourBits)
    assert ours._model.layers[0].gate_up.values.dtype == torch.uint8
    chunk = Chunk(1, tokens(9, 4), 0, (3,), None)
    expected, found = (executor.logits([chunk], range(9)) for executor in (exact, ours))
    assert np.linalg.norm(found - expected) / np.linalg.norm(expected) < 1e-5


def test_draws_of_the_kernels(tmp_path: Path) -> None:
    MODELS["llama"].write(tmp_path / "tiny.gguf")
    exact, ours = both(tmp_path / "tiny.gguf")
    prompts = [tokens(5, seed) for seed in range(3)]

    def drawn(executor: CudaExecutor, params: SamplingParams) -> list[int]:
        chunks = tuple(Chunk(index, prompt, 0, (index,), params) for index, prompt in enumerate(prompts))
        return [sampled.token for sampled in executor.run(Plan(chunks))]

    assert drawn(ours, GREEDY) == drawn(exact, GREEDY)
    # Of the two likeliest, whatever the generator.
    two = SamplingParams(temperature=2.0, top_k=2, seed=2**64 - 3)
    logits = exact.logits([Chunk(0, prompts[0], 0, (0,), None)], [4])[0]
    assert drawn(ours, two)[0] in np.argsort(-logits)[:2]
    assert drawn(ours, two) == drawn(ours, two)
    assert torch.equal(ours._model.embedding, exact._model.embedding)
