"""The reference executor against transformers' LlamaForCausalLM with the same weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from tiny_llama import TinyLlama
from transformers import LlamaConfig, LlamaForCausalLM

from busload_runtime.engine.plan import Chunk, Plan, SamplingParams
from busload_runtime.executors.reference import ReferenceExecutor
from busload_runtime.model.load import load_weights

GREEDY = SamplingParams(temperature=0)
# fp32 on both sides, so what differs is the order of sums. Logits are of the order of 10.
TOLERANCE = 2e-4


def make_executor(model: TinyLlama, folder: Path) -> tuple[ReferenceExecutor, dict[str, Any]]:
    weights = model.write(folder / "tiny.gguf")
    executor = ReferenceExecutor(load_weights(str(folder / "tiny.gguf")))
    executor.reserve(64)
    executor.resize(64)
    return executor, weights


def make_oracle(model: TinyLlama, weights: dict[str, Any], **rope: Any) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(model.tokens),
        hidden_size=model.hidden,
        intermediate_size=model.ffn,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        head_dim=model.head_dim,
        max_position_embeddings=model.context,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": model.theta} | rope,
        tie_word_embeddings=model.tied,
        attn_implementation="eager",
    )
    oracle = LlamaForCausalLM(config).eval()
    missing, unexpected = oracle.load_state_dict({k: torch.tensor(v) for k, v in weights.items()}, strict=False)
    assert set(missing) <= ({"lm_head.weight"} if model.tied else set())
    assert not unexpected
    oracle.tie_weights()
    return oracle


@torch.no_grad()
def oracle_logits(oracle: LlamaForCausalLM, tokens: list[int]) -> Any:
    return oracle(torch.tensor([tokens])).logits[0].float().numpy()


def chunk(
    tokens: list[int], start: int = 0, blocks: tuple[int, ...] = (7, 3, 11, 12, 0, 40, 5, 22), name: int = 1
) -> Chunk:
    needed = -(-(start + len(tokens)) // 16)
    return Chunk(name, tuple(tokens), start, blocks[:needed], GREEDY)


def random_tokens(model: TinyLlama, count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, len(model.tokens), count).tolist()


@pytest.mark.parametrize("precision", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("tied", [True, False])
def test_logits_of_every_position(precision: str, tied: bool, tmp_path: Path) -> None:
    model = TinyLlama(layers=3, precision=GGMLQuantizationType[precision], tied=tied)
    executor, weights = make_executor(model, tmp_path)
    tokens = random_tokens(model, 75)
    ours = executor.logits([chunk(tokens)], range(75))
    np.testing.assert_allclose(ours, oracle_logits(make_oracle(model, weights), tokens), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 16), (6, 2, 16), (4, 1, 32), (3, 3, 64)])
def test_head_layouts(heads: int, kv_heads: int, head_dim: int, tmp_path: Path) -> None:
    model = TinyLlama(heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    executor, weights = make_executor(model, tmp_path)
    tokens = random_tokens(model, 40)
    ours = executor.logits([chunk(tokens)], range(40))
    np.testing.assert_allclose(ours, oracle_logits(make_oracle(model, weights), tokens), atol=TOLERANCE, rtol=0)


def test_linear_rope_scaling(tmp_path: Path) -> None:
    model = TinyLlama(metadata={"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0})
    executor, weights = make_executor(model, tmp_path)
    oracle = make_oracle(model, weights, rope_type="linear", factor=4.0)
    tokens = random_tokens(model, 90)
    np.testing.assert_allclose(
        executor.logits([chunk(tokens)], range(90)), oracle_logits(oracle, tokens), atol=TOLERANCE, rtol=0
    )


def test_llama3_rope_scaling(tmp_path: Path) -> None:
    rope = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    model = TinyLlama(theta=500000.0)
    weights = model.write(tmp_path / "plain.gguf")
    oracle = make_oracle(model, weights, rope_type="llama3", **rope)
    plain = model.theta ** (-np.arange(8) / 8)
    factors = (plain / oracle.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    assert factors.max() > 7.9  # the scaling does something at these sizes
    model.extra_tensors = {"rope_freqs.weight": factors}
    executor, _ = make_executor(model, tmp_path)
    tokens = random_tokens(model, 90)
    np.testing.assert_allclose(
        executor.logits([chunk(tokens)], range(90)), oracle_logits(oracle, tokens), atol=TOLERANCE, rtol=0
    )


@pytest.mark.parametrize("cuts", [[70], [16, 54], [1, 2, 3, 17, 47], [33, 1, 36], [1] * 70])
def test_prompt_pieces_and_decodes(cuts: list[int], tmp_path: Path) -> None:
    model = TinyLlama()
    executor, weights = make_executor(model, tmp_path)
    tokens = random_tokens(model, 70)
    expected = oracle_logits(make_oracle(model, weights), tokens)
    start = 0
    for length in cuts:
        ours = executor.logits([chunk(tokens[start : start + length], start)], range(length))
        np.testing.assert_allclose(ours, expected[start : start + length], atol=TOLERANCE, rtol=0)
        start += length


def test_ragged_batch_of_prompts_and_decodes(tmp_path: Path) -> None:
    model = TinyLlama()
    executor, weights = make_executor(model, tmp_path)
    oracle = make_oracle(model, weights)
    lengths = [1, 16, 17, 33, 5, 40]
    prompts = [random_tokens(model, length + 1, seed) for seed, length in enumerate(lengths)]
    order = np.random.default_rng(3).permutation(64).tolist()
    tables = [tuple(order[4 * i : 4 * i + 4]) for i in range(len(prompts))]
    first = [chunk(p[:-1], 0, t, i) for i, (p, t) in enumerate(zip(prompts[:4], tables, strict=False))]
    executor.run(Plan(tuple(first)))
    # Four requests decode one token while two prompts come in, in mixed order.
    mixed = [
        chunk(prompts[4], 0, tables[4], 4),
        *[chunk(p[-1:], len(p) - 1, t, i) for i, (p, t) in enumerate(zip(prompts[:4], tables, strict=False))],
        chunk(prompts[5], 0, tables[5], 5),
    ]
    drawn = executor.run(Plan(tuple(mixed)))
    assert [s.request_id for s in drawn] == [4, 0, 1, 2, 3, 5]
    for sampled in drawn:
        assert sampled.token == oracle_logits(oracle, prompts[sampled.request_id])[-1].argmax()


def test_long_prompt_is_attended_in_parts(tmp_path: Path) -> None:
    model = TinyLlama(context=512)
    executor, weights = make_executor(model, tmp_path)
    tokens = random_tokens(model, 400)
    ours = executor.logits([chunk(tokens, 0, tuple(range(63, 38, -1)))], range(400))
    np.testing.assert_allclose(ours, oracle_logits(make_oracle(model, weights), tokens), atol=5 * TOLERANCE, rtol=0)
