"""Every architecture on both executors against transformers: the same random weights, windows shorter than the text."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray
from tiny_models import VOCABULARY, TinyModel, logits_of

from busload_kernels.cpu import library
from busload_runtime.engine.plan import Chunk, SamplingParams
from busload_runtime.executors.cpu import CpuExecutor
from busload_runtime.executors.reference import ReferenceExecutor
from busload_runtime.model.config import config_from_metadata
from busload_runtime.model.errors import ModelError
from busload_runtime.model.load import load_weights

GREEDY = SamplingParams(temperature=0)
TOKENS = np.random.default_rng(7).integers(0, len(VOCABULARY), 100).tolist()
# fp32 on both sides: what differs is the order of sums.
REFERENCE_ERROR = 2e-5
# Activations, cache and weights rounded to 8 bits. Random weights with sharp softmax are harder than real ones; norms
# of queries and keys make it milder. A window one token too wide or SiLU for GELU costs three times as much and more.
CPU_ERROR = {"llama": 0.12, "mistral": 0.12, "qwen2": 0.08, "qwen3": 0.06, "gemma3": 0.04}


def opened(path: Path, kind: type[Any], **options: Any) -> Any:
    executor = kind(load_weights(str(path)), **options)
    executor.reserve(64)
    executor.resize(64)
    return executor


def whole(executor: Any, tokens: list[int]) -> Chunk:
    return Chunk(1, tuple(tokens), 0, tuple(range(-(-len(tokens) // executor.block_size))), GREEDY)


def all_logits(executor: Any, tokens: list[int] = TOKENS) -> NDArray[np.float32]:
    logits: NDArray[np.float32] = executor.logits([whole(executor, tokens)], range(len(tokens)))
    return logits


def relative_error(ours: Any, exact: Any) -> float:
    return float(np.linalg.norm(ours - exact) / np.linalg.norm(exact))


CASES = {
    "llama": TinyModel("llama", layers=2, theta=500_000.0),
    "llama wide heads": TinyModel("llama", layers=2, heads=2, kv_heads=1, head_dim=128, tied=False),
    "mistral": TinyModel("mistral", layers=2, tied=False),
    "mistral by name": TinyModel("mistral", layers=2, written_as="mistral"),
    "qwen2": TinyModel("qwen2", layers=2, theta=1e6),
    "qwen2 untied": TinyModel("qwen2", layers=2, theta=1e6, tied=False),
    "qwen3": TinyModel("qwen3", layers=2, heads=8, theta=1e6),
    "qwen3 head_dim 128": TinyModel("qwen3", layers=2, kv_heads=1, head_dim=128),
    "gemma3": TinyModel("gemma3", kv_heads=1, head_dim=128),
    "gemma3 head_dim 256": TinyModel("gemma3", heads=2, kv_heads=1, head_dim=256),
    "gemma3 4b rope": TinyModel(
        "gemma3",
        options={
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 20_000.0},
            }
        },
        metadata={
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
            "rope.freq_base": 1e6,
            "rope.freq_base_swa": 20_000.0,
        },
    ),
    "gemma3 pattern": TinyModel(
        "gemma3",
        layers=4,
        options={"layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]},
        metadata={"attention.sliding_window_pattern": [False, True, True, False]},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    exact = logits_of(CASES[case].write(tmp_path / "tiny.gguf"), TOKENS)
    assert relative_error(all_logits(opened(tmp_path / "tiny.gguf", ReferenceExecutor)), exact) < REFERENCE_ERROR
    for isa in library.usable_isas():
        ours = all_logits(opened(tmp_path / "tiny.gguf", CpuExecutor, threads=2, isa=isa))
        assert relative_error(ours, exact) < CPU_ERROR[CASES[case].architecture]


@pytest.mark.parametrize(
    "precision", [Type.Q4_K, Type.Q5_K, Type.Q6_K, Type.Q5_0, Type.Q8_0], ids=lambda kind: kind.name
)
@pytest.mark.parametrize("case", ["qwen2", "gemma3 pattern"])
def test_quantised_files(case: str, precision: Type, tmp_path: Path) -> None:
    """transformers with the weights as the gguf library dequantises them."""
    model = replace(CASES[case], precision=precision)
    exact = logits_of(model.write(tmp_path / "tiny.gguf"), TOKENS)
    assert relative_error(all_logits(opened(tmp_path / "tiny.gguf", ReferenceExecutor)), exact) < REFERENCE_ERROR
    ours = all_logits(opened(tmp_path / "tiny.gguf", CpuExecutor, threads=2))
    assert relative_error(ours, exact) < CPU_ERROR[model.architecture]


@pytest.mark.parametrize("case", ["mistral", "qwen2", "qwen3", "gemma3"])
def test_prompt_pieces_and_decodes_across_windows(case: str, tmp_path: Path) -> None:
    """What a query no longer sees may lie in the middle of a block, in another piece, or in a block before."""
    exact = logits_of(CASES[case].write(tmp_path / "tiny.gguf"), TOKENS)
    reference = opened(tmp_path / "tiny.gguf", ReferenceExecutor)
    cpu = opened(tmp_path / "tiny.gguf", CpuExecutor, threads=2)
    at_once = all_logits(cpu)
    start = 0
    for length in (3, 40, 1, 1, 30, 1, 24):
        for executor, expected, error in ((reference, exact, REFERENCE_ERROR), (cpu, at_once, 0)):
            blocks = tuple(range(63, 63 - -(-(start + length) // executor.block_size), -1))
            piece = Chunk(1, tuple(TOKENS[start : start + length]), start, blocks, GREEDY)
            ours = executor.logits([piece], range(length))
            assert relative_error(ours, expected[start : start + length]) <= error
        start += length
    assert start == len(TOKENS)


WRONG = {
    "architecture": (TinyModel("qwen3", written_as="gemma2"), "general.architecture is 'gemma2'; supported: 'llama' ("),
    "no bias": (TinyModel("qwen2", layers=1, without=("blk.0.attn_k.bias",)), "tensor blk.0.attn_k.bias is missing"),
    "no norm": (
        TinyModel("gemma3", layers=1, without=("blk.0.post_ffw_norm.weight",)),
        "tensor blk.0.post_ffw_norm.weight is missing",
    ),
    "no query norm": (
        TinyModel("qwen3", layers=1, without=("blk.0.attn_q_norm.weight",)),
        "tensor blk.0.attn_q_norm.weight is missing",
    ),
    "a norm too many": (
        TinyModel("qwen3", layers=1, written_as="llama"),
        "tensor 'blk.0.attn_k_norm.weight' is not part of a plain 1-layer llama model; a layer has attn_norm.weight,",
    ),
    "window": (
        TinyModel("qwen2", layers=1, metadata={"attention.sliding_window": 32}),
        "qwen2.attention.sliding_window is 32; must be 0 or missing (not computed for qwen2)",
    ),
    "negative window": (
        TinyModel("mistral", layers=1, metadata={"attention.sliding_window": "all"}),
        "llama.attention.sliding_window is 'all'; must be an integer from 0 to",
    ),
    "pattern": (
        TinyModel("gemma3", layers=2, metadata={"attention.sliding_window_pattern": [True]}),
        "gemma3.attention.sliding_window_pattern is [True]; must be a number or one flag per layer (2)",
    ),
    "soft cap": (
        TinyModel("gemma3", layers=1, metadata={"final_logit_softcapping": 30.0}),
        "gemma3.final_logit_softcapping is 30.0; must be 0 or missing (not computed for gemma3)",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_not_part_of_an_architecture_is_named(case: str, tmp_path: Path) -> None:
    model, message = WRONG[case]
    model.write(tmp_path / "tiny.gguf")
    with pytest.raises(ModelError, match=re.escape(f"{tmp_path / 'tiny.gguf'}: {message}")):
        load_weights(str(tmp_path / "tiny.gguf"))


def test_the_largest_gemma_scales_its_queries_by_hidden_size() -> None:
    """62 layers are the 27B model, as in llama.cpp; the config of all others says head_dim."""
    metadata = {
        "general.architecture": "gemma3",
        "gemma3.block_count": 62,
        "gemma3.embedding_length": 5376,
        "gemma3.attention.head_count": 32,
        "gemma3.attention.head_count_kv": 16,
        "gemma3.attention.key_length": 128,
        "gemma3.attention.value_length": 128,
        "gemma3.feed_forward_length": 21504,
        "gemma3.context_length": 131072,
        "gemma3.attention.sliding_window": 1024,
        "gemma3.attention.layer_norm_rms_epsilon": 1e-6,
    }
    large = config_from_metadata("m.gguf", metadata, 262208, tied=True)
    assert large.attention_scale == 168**-0.5  # query_pre_attn_scalar of google/gemma-3-27b-it
    other = config_from_metadata("m.gguf", metadata | {"gemma3.block_count": 48}, 262208, tied=True)
    assert other.attention_scale == 128**-0.5
    assert [layer.window for layer in other.layers[:7]] == [1024] * 5 + [0, 1024]
    assert [other.ropes[layer.rope].theta for layer in other.layers[4:7]] == [1e4, 1e6, 1e4]
