"""Gemma 3 270M (base, Q4_K_M: Q4_K, Q5_0, Q6_K and Q8_0 tensors) against transformers with the dequantised weights."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from busload_runtime.engine.plan import Chunk, Plan, SamplingParams
from busload_runtime.executors.cpu import CpuExecutor
from busload_runtime.executors.reference import ReferenceExecutor
from busload_runtime.model.bundled import resolve_source
from busload_runtime.model.load import load_weights
from busload_runtime.model.text import TextModel, load_text_model

SOURCE = "bundled:gemma3-270m"
GREEDY = SamplingParams(temperature=0)
TEXTS = (
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Die Hauptstadt von Deutschland heißt",
)
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def text() -> TextModel:
    return load_text_model(SOURCE)


@pytest.fixture(scope="module")
def oracle() -> Gemma3ForCausalLM:
    """The config of google/gemma-3-270m."""
    config = Gemma3TextConfig(
        vocab_size=262144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        max_position_embeddings=32768,
        rms_norm_eps=1e-6,
        query_pre_attn_scalar=256,
        sliding_window=512,
        tie_word_embeddings=True,
        attn_implementation="eager",
    )
    with torch.device("meta"):
        model = Gemma3ForCausalLM(config)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, 18)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(resolve_source(SOURCE)).tensors}
    weights = {}
    for theirs, _ in model.named_parameters():
        tensor = tensors.pop(names.get_name(theirs, try_suffixes=(".weight",)))
        value = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        weights[theirs] = torch.tensor(value - 1 if theirs.endswith("norm.weight") else value)
    assert not tensors
    model.load_state_dict(weights, strict=False, assign=True)
    # Made on the meta device too, and in no state dict.
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model.model.embed_tokens.embed_scale = torch.tensor(640**0.5)
    model.tie_weights()
    return model.eval()


@pytest.fixture(scope="module")
def reference() -> ReferenceExecutor:
    return _ready(ReferenceExecutor(load_weights(SOURCE)))


def _ready(executor: Any) -> Any:
    executor.reserve(128)
    executor.resize(128)
    return executor


@torch.no_grad()
def exact_logits(oracle: Gemma3ForCausalLM, tokens: list[int]) -> NDArray[np.float32]:
    logits: NDArray[np.float32] = oracle(torch.tensor([tokens])).logits[0].numpy()
    return logits


def all_logits(executor: Any, tokens: list[int]) -> NDArray[np.float32]:
    blocks = tuple(range(-(-len(tokens) // executor.block_size)))
    logits: NDArray[np.float32] = executor.logits([Chunk(1, tuple(tokens), 0, blocks, None)], range(len(tokens)))
    return logits


def relative_error(ours: Any, exact: Any) -> float:
    return float(np.linalg.norm(ours - exact) / np.linalg.norm(exact))


def continued(executor: Any, tokens: list[int]) -> list[int]:
    """`tokens` and the greedy tokens that follow."""
    tokens, start = list(tokens), 0
    for _ in range(NEW_TOKENS):
        blocks = tuple(range(-(-len(tokens) // executor.block_size)))
        (drawn,) = executor.run(Plan((Chunk(1, tuple(tokens[start:]), start, blocks, GREEDY),)))
        start = len(tokens)
        tokens.append(drawn.token)
    return tokens


@pytest.fixture(scope="module")
def cpu() -> CpuExecutor:
    return _ready(CpuExecutor(load_weights(SOURCE), threads=2))


@pytest.mark.parametrize("prompt", TEXTS)
def test_logits_and_greedy_text(
    prompt: str, oracle: Gemma3ForCausalLM, reference: ReferenceExecutor, cpu: CpuExecutor, text: TextModel
) -> None:
    given = text.tokenizer.encode(prompt, special=False)
    tokens = continued(reference, given)
    exact = exact_logits(oracle, tokens)
    assert relative_error(all_logits(reference, tokens), exact) < 1e-4
    # The reference draws what transformers would, at every step.
    assert tokens[len(given) :] == exact.argmax(axis=1)[len(given) - 1 : -1].tolist()
    # 8-bit activations and cache; where the best token leads clearly, both choose alike.
    ours = all_logits(cpu, tokens)
    assert relative_error(ours, exact) < 0.06
    ranked = np.sort(exact, axis=1)
    sure = ranked[:, -1] - ranked[:, -2] > 1.0
    assert sure.sum() > 5
    assert (ours.argmax(axis=1) == exact.argmax(axis=1))[sure].all()
    assert (ours.argmax(axis=1) == exact.argmax(axis=1)).mean() > 0.8


def test_facts_of_the_file(text: TextModel, reference: ReferenceExecutor) -> None:
    assert text.tokenizer.vocab_size == reference.vocab_size == 262144
    assert not text.chat.available  # the base model
    assert "capital of" in text.tokenizer.decode(continued(reference, text.tokenizer.encode(TEXTS[0], special=False)))


def test_text_longer_than_the_window(reference: ReferenceExecutor, cpu: CpuExecutor, text: TextModel) -> None:
    """Perplexity of 700 tokens, of which most layers see 512: rounding to 8 bits costs a few percent.

    The 187 tokens behind the window are few: their mean moves by a percent or two on its own.
    """
    prose = (Path(__file__).parent / "prose.txt").read_text()
    tokens = text.tokenizer.encode(prose, special=False)[:700]
    losses = [_losses(all_logits(executor, tokens), tokens) for executor in (reference, cpu)]
    for part, bound in ((slice(None), 0.03), (slice(512, None), 0.05)):
        exact, ours = (loss[part].mean() for loss in losses)
        print(f"perplexity {np.exp(exact):.2f} -> {np.exp(ours):.2f} ({np.exp(ours - exact) - 1:+.2%})")
        assert abs(np.exp(ours - exact) - 1) < bound


def _losses(logits: NDArray[np.float32], tokens: list[int]) -> NDArray[np.float64]:
    """Of each next token. Row by row: all of them at once would take gigabytes."""
    losses = np.empty(len(tokens) - 1)
    for place, (row, following) in enumerate(zip(logits, tokens[1:], strict=False)):
        shifted = row - row.max()
        losses[place] = np.log(np.exp(shifted).sum(dtype=np.float64)) - shifted[following]
    return losses
