"""safetensors folders on the cuda executor's torch operations: transformers' logits, 4-bit packings, broken files."""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from generating import sized
from safetensors.torch import load_file, save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "model"))
from test_model_folder import VOCABULARY, edited, write_folder

from busload_runtime.engine.plan import Chunk
from busload_runtime.executors.create import create_executor
from busload_runtime.executors.cuda import CudaExecutor, CudaOptions
from busload_runtime.executors.torch_model.int4_checkpoint import packing_of
from busload_runtime.executors.torch_model.loading import Int4
from busload_runtime.executors.torch_model.open import open_checkpoint
from busload_runtime.model.errors import ModelError

TOKENS = np.random.default_rng(3).integers(0, VOCABULARY, 90).tolist()
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama tied": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
    "llama 3.1": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": LLAMA3_ROPE}),
    "llama linear": (
        LlamaConfig,
        LlamaForCausalLM,
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}},
    ),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None, "head_dim": 32}),
    "mistral window": (MistralConfig, MistralForCausalLM, {"sliding_window": 90}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 32, "tie_word_embeddings": True}),
}


def saved(path: Path, kind: str = "llama", **how: Any) -> Any:
    """Writes a folder with random weights; returns the transformers model."""
    write_folder(path)
    config, model, options = KINDS[kind]
    torch.manual_seed(1)
    made = model(config(**SHAPE, **options)).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.ndim > 1:
                parameter.mul_(6)
            elif name.endswith("bias"):
                parameter.normal_()
    made.save_pretrained(path, **how)
    return made


def logits(executor: CudaExecutor) -> Any:
    sized(executor, 4)
    return executor.logits([Chunk(1, tuple(TOKENS), 0, (0, 1), None)], range(len(TOKENS)))


def error_of(path: Path, model: Any, allow_int4: bool = False) -> float:
    with torch.no_grad():
        exact = model.float()(torch.tensor([TOKENS])).logits[0].numpy()
    ours = logits(CudaExecutor(open_checkpoint(str(path), allow_int4), CudaOptions("cpu")))
    return float(np.linalg.norm(ours - exact) / np.linalg.norm(exact))


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    model = saved(tmp_path, kind)
    assert error_of(tmp_path, model) < 2e-5


def test_shards_and_half_precision(tmp_path: Path) -> None:
    model = saved(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    assert error_of(tmp_path, model) < 2e-5
    for file in tmp_path.glob("*.safetensors*"):
        file.unlink()
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    assert error_of(tmp_path, LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)) < 2e-5


def test_a_folder_serves_through_the_front_door(tmp_path: Path) -> None:
    saved(tmp_path)
    executor = create_executor("cuda", str(tmp_path), device="cpu", weight_precision="int8")
    assert executor.vocab_size == VOCABULARY


# Broken files.


def rewritten(path: Path, change: Any) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def q(layer: int = 0) -> str:
    return f"model.layers.{layer}.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(q(1)), f"tensor {q(1)} is missing; the folder is incomplete, download it again"),
        (lambda t: t.update({q(): t[q()][:32].clone()}), f"tensor {q()} has shape (32, 64); config.json says (64, 64)"),
        (lambda t: t.update({q(): t[q()].to(torch.float16)}), f"is F32 and {q()} is F16; the matrices of a"),
        (
            lambda t: t.update({q(): t[q()].to(torch.float8_e4m3fn)}),
            f"tensor {q()} is F8_E4M3; supported: F32, F16, BF16",
        ),
        (
            lambda t: t.update({"model.layers.0.mlp.router.weight": t[q()].clone()}),
            "mlp.router.weight' is not part of a",
        ),
        (
            lambda t: t.update({"model.layers.2" + q()[14:]: t[q()].clone()}),
            "is not part of a plain 2-layer llama model",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(change: Any, message: str, tmp_path: Path) -> None:
    saved(tmp_path)
    rewritten(tmp_path, change)
    with pytest.raises(ModelError, match=f"^{re.escape(str(tmp_path))}: .*{re.escape(message)}"):
        open_checkpoint(str(tmp_path))


def test_values_that_are_not_finite_are_named(tmp_path: Path) -> None:
    saved(tmp_path)
    rewritten(tmp_path, lambda tensors: tensors[q(1)].fill_(torch.inf))
    with pytest.raises(ModelError, match=r"layer 1 has qkv weights that are not finite as torch.float32"):
        create_executor("cuda", str(tmp_path), device="cpu")


def test_files_that_are_broken_or_missing(tmp_path: Path) -> None:
    write_folder(tmp_path)
    with pytest.raises(ModelError, match=r"model.safetensors: no such file; the folder is incomplete"):
        open_checkpoint(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0nonsense")
    with pytest.raises(ModelError, match=r"model.safetensors: is not a safetensors file: .*; download it again"):
        open_checkpoint(str(tmp_path))
    index = tmp_path / "model.safetensors.index.json"
    for names, message in (
        ({"a": "../other.safetensors"}, "names the file '../other.safetensors'; must be NAME.safetensors"),
        ({}, "weight_map must name a file for each tensor"),
        ({"a": "b.safetensors"}, "b.safetensors: no such file"),
    ):
        index.write_text(json.dumps({"weight_map": names}))
        with pytest.raises(ModelError, match=re.escape(message)):
            open_checkpoint(str(tmp_path))


# Four bits.


def pack(numbers: torch.Tensor, order: list[int], along_rows: bool) -> torch.Tensor:
    """Eight numbers 0 to 15 in an int32, number order[i] in bits 4 i and up."""
    if along_rows:
        return pack(numbers.t(), order, False).t().contiguous()
    eights = numbers.long().unflatten(1, (-1, 8))
    words = sum(eights[..., number] << 4 * place for place, number in enumerate(order))
    return (words & 0xFFFFFFFF).to(torch.int64).where(words < 2**31, words - 2**32).to(torch.int32)


def four_bits(path: Path, model: Any, method: str, symmetric: bool, version: str = "gptq") -> None:
    """Packs the matrices of a saved folder, group 32, and gives `model` the values that they then have."""
    gptq = method == "gptq"
    order = list(range(8)) if gptq else [0, 2, 4, 6, 1, 3, 5, 7]  # AutoAWQ's order_map
    generator = torch.Generator().manual_seed(5)
    stored = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim < 2 or "layers" not in name:
                stored[name] = parameter.clone()
                continue
            outputs, inputs = parameter.shape
            numbers = torch.randint(0, 16, (inputs, outputs), generator=generator)
            shape = (inputs // 32, outputs)
            zeros = torch.full(shape, 8) if symmetric else torch.randint(1, 16, shape, generator=generator)
            scales = (torch.rand(shape, generator=generator) * 0.05 + 0.01).half()
            value = (numbers - zeros.repeat_interleave(32, 0)) * scales.float().repeat_interleave(32, 0)
            parameter.copy_(value.t())
            prefix = name.removesuffix("weight")
            stored[prefix + "qweight"] = pack(numbers, order, along_rows=gptq)
            stored[prefix + "qzeros"] = pack(zeros - int(version == "gptq"), order, along_rows=False)
            stored[prefix + "scales"] = scales
            if gptq:
                stored[prefix + "g_idx"] = (torch.arange(inputs) // 32).int()
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, path / "model.safetensors")
    told = {"quant_method": method, "bits": 4, "group_size": 32}
    edited(path, "config.json", {"quantization_config": told | ({"checkpoint_format": version} if gptq else {})})


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("method", "version"), [("gptq", "gptq"), ("gptq", "gptq_v2"), ("awq", "")])
def test_four_bit_checkpoints_are_read(method: str, version: str, symmetric: bool, tmp_path: Path) -> None:
    model = saved(tmp_path)
    four_bits(tmp_path, model, method, symmetric, version)
    assert error_of(tmp_path, model, allow_int4=True) < 2e-5
    matrix = open_checkpoint(str(tmp_path), True).layer(0).down
    assert isinstance(matrix, Int4) == symmetric
    executor = CudaExecutor(open_checkpoint(str(tmp_path), True), CudaOptions("cpu"))
    kept = executor._model.layers[0].qkv
    assert (kept.values.dtype == torch.uint8) == symmetric
    assert kept.values.shape == (128, 32 if symmetric else 64)


def test_four_bits_are_refused_unless_told(tmp_path: Path) -> None:
    four_bits(tmp_path, saved(tmp_path), "awq", True)
    with pytest.raises(ModelError, match=r"the weights are INT4 \(awq, groups of 32\).* evaluation passed: give --a"):
        create_executor("cuda", str(tmp_path), device="cpu")
    assert create_executor("cuda", str(tmp_path), device="cpu", allow_int4=True).weight_bytes > 0


def test_another_order_of_inputs_is_refused(tmp_path: Path) -> None:
    four_bits(tmp_path, saved(tmp_path), "gptq", True)
    name = "model.layers.0.self_attn.q_proj.g_idx"
    rewritten(tmp_path, lambda tensors: tensors.update({name: tensors[name].flip(0).contiguous()}))
    with pytest.raises(ModelError, match=r"q_proj is quantised in another order of inputs \(desc_act with g_idx\)"):
        create_executor("cuda", str(tmp_path), device="cpu", allow_int4=True)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method is 'bitsandbytes'; supported: gptq, awq"),
        ({"quant_method": "gptq", "bits": 3}, "bits is 3; gptq is read with 4"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size is 0; must be a number above 0, or -1"),
        ({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemv"}, "version is 'gemv'; awq is read in"),
    ],
)
def test_packings_that_are_not_read_are_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=re.escape(message)):
        packing_of("config.json", config, True)
