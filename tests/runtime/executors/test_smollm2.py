"""The demo model, SmolLM2-135M-Instruct, against transformers with weights read by the gguf library."""

from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from busload_runtime.engine.plan import Chunk, Plan, SamplingParams
from busload_runtime.executors.reference import ReferenceExecutor
from busload_runtime.model.bundled import resolve_source
from busload_runtime.model.load import load_weights
from busload_runtime.model.text import TextModel, load_text_model

SOURCE = "bundled:smollm2-135m-instruct"
GREEDY = SamplingParams(temperature=0)
QUESTIONS = (
    "What is the capital of France? Answer in one sentence.",
    "Write a haiku about the sea.",
    "Was ist 12 + 30? 答えてください 🙂",
)
NEW_TOKENS = 16


@pytest.fixture(scope="module")
def text() -> TextModel:
    return load_text_model(SOURCE)


@pytest.fixture(scope="module")
def executor() -> ReferenceExecutor:
    executor = ReferenceExecutor(load_weights(SOURCE))
    executor.reserve(256)
    executor.resize(256)
    return executor


@pytest.fixture(scope="module")
def oracle() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.load_state_dict(oracle_weights(), strict=False, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model.tie_weights()
    return model.eval()


def oracle_weights() -> dict[str, Any]:
    parts = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    weights = {}
    for tensor in gguf.GGUFReader(resolve_source(SOURCE)).tensors:
        value = torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        prefix, *rest = tensor.name.split(".")
        if prefix == "blk":
            index, part, _ = rest
            if part in ("attn_q", "attn_k"):
                value = value.view(-1, 32, 2, 576).transpose(1, 2).reshape(-1, 576)
            weights[f"model.layers.{index}.{parts[part]}.weight"] = value
        else:
            names = {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}
            weights[names[prefix]] = value
    return weights


def generate(executor: ReferenceExecutor, prompts: list[list[int]]) -> list[list[int]]:
    """Greedy tokens of all prompts, decoded together."""
    tables = [tuple(range(index, 256, len(prompts))) for index in range(len(prompts))]  # interleaved blocks
    outputs: list[list[int]] = [[] for _ in prompts]

    def step(tokens: list[list[int]]) -> None:
        chunks = []
        for index, new in enumerate(tokens):
            start = len(prompts[index]) + len(outputs[index]) - len(new)
            blocks = tables[index][: -(-(start + len(new)) // 16)]
            chunks.append(Chunk(index, tuple(new), start, blocks, GREEDY, len(outputs[index])))
        for sampled in executor.run(Plan(tuple(chunks))):
            outputs[sampled.request_id].append(sampled.token)

    step(prompts)
    while len(outputs[0]) < NEW_TOKENS:
        step([output[-1:] for output in outputs])
    return outputs


@torch.no_grad()
def test_logits_and_greedy_tokens(executor: ReferenceExecutor, oracle: LlamaForCausalLM, text: TextModel) -> None:
    prompts = [text.encode_chat([{"role": "user", "content": question}]) for question in QUESTIONS]
    outputs = generate(executor, prompts)
    for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        tokens = prompt + output[:-1]
        expected = oracle(torch.tensor([tokens])).logits[0].numpy()
        ours = executor.logits(
            [Chunk(index, tuple(tokens), 0, tuple(range(256))[: -(-len(tokens) // 16)], None)], range(len(tokens))
        )
        # 30 layers of fp32 sums in another order; logits reach about 30.
        np.testing.assert_allclose(ours, expected, atol=5e-3, rtol=0)
        # Given the same text so far, both choose the same next token at every step.
        assert output == expected[len(prompt) - 1 :].argmax(-1).tolist()
    assert text.tokenizer.decode(outputs[0]).startswith("The capital of France is Paris.")
