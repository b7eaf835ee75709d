"""The GPU executor's model on torch operations in fp32: against transformers and the reference, and what it refuses."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requantised
import torch
from generating import generate, sized
from tiny_models import VOCABULARY, TinyModel, logits_of

from busload_runtime.engine.plan import Chunk
from busload_runtime.executors.create import create_executor
from busload_runtime.executors.cuda import CudaExecutor, CudaOptions
from busload_runtime.executors.errors import ExecutorError
from busload_runtime.executors.reference import ReferenceExecutor
from busload_runtime.executors.torch_model.loading import GgufCheckpoint
from busload_runtime.model.load import load_weights
from busload_runtime.model.text import load_text_model

TOKENS = np.random.default_rng(7).integers(0, len(VOCABULARY), 100).tolist()
FAMILY = {
    "llama": TinyModel("llama", layers=2, theta=500_000.0),
    "llama wide heads": TinyModel("llama", layers=2, heads=2, kv_heads=1, head_dim=128, tied=False),
    "mistral": TinyModel("mistral", layers=2, tied=False),
    "qwen2": TinyModel("qwen2", layers=2, theta=1e6),
    "qwen3": TinyModel("qwen3", layers=2, heads=8, theta=1e6),
}


def on_cpu(path: Path | str, **options: Any) -> CudaExecutor:
    return CudaExecutor(GgufCheckpoint(load_weights(str(path))), CudaOptions("cpu", **options))


def all_logits(executor: CudaExecutor, tokens: list[int]) -> Any:
    sized(executor, 8)
    blocks = tuple(range(-(-len(tokens) // executor.block_size)))
    return executor.logits([Chunk(1, tuple(tokens), 0, blocks, None)], range(len(tokens)))


def relative_error(ours: Any, exact: Any) -> float:
    return float(np.linalg.norm(ours - exact) / np.linalg.norm(exact))


@pytest.mark.parametrize("case", FAMILY)
def test_logits_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    model = FAMILY[case].write(tmp_path / "tiny.gguf")
    executor = on_cpu(tmp_path / "tiny.gguf")
    # Up to the window, a model with one is a model without.
    assert executor.context_length == (21 if case == "mistral" else 512)
    tokens = TOKENS[: executor.context_length]
    assert relative_error(all_logits(executor, tokens), logits_of(model, tokens)) < 2e-5


@pytest.mark.parametrize(
    ("options", "bound"),
    [
        ({"weight_precision": "int8"}, 0.03),
        ({"weight_precision": "fp8"}, 0.15),
        ({"kv_precision": "int8"}, 0.02),
        ({"kv_precision": "fp8"}, 0.08),
        ({"weight_precision": "int8", "kv_precision": "int8"}, 0.04),
    ],
    ids=str,
)
def test_eight_bits_cost_little_and_take_less(options: dict[str, str], bound: float, tmp_path: Path) -> None:
    FAMILY["qwen3"].write(tmp_path / "tiny.gguf")
    exact, rounded = on_cpu(tmp_path / "tiny.gguf"), on_cpu(tmp_path / "tiny.gguf", **options)
    error = relative_error(all_logits(rounded, TOKENS), all_logits(exact, TOKENS))
    assert 1e-4 < error < bound
    if "weight_precision" in options:
        assert rounded.weight_bytes < 0.6 * exact.weight_bytes
    if "kv_precision" in options:
        assert rounded.bytes_per_block / exact.bytes_per_block == (64 + 4) / (4 * 64)


def test_greedy_texts_of_smollm2_are_the_references() -> None:
    text = load_text_model(requantised.SOURCE)
    questions = ("What is the capital of France?", "Write a haiku about the sea.", "Was ist 12 + 30?")
    prompts = [text.encode_chat([{"role": "user", "content": question}]) for question in questions]
    reference = sized(ReferenceExecutor(load_weights(requantised.SOURCE)), 64)
    ours = sized(on_cpu(requantised.SOURCE), 16)
    found = generate(ours, prompts, 12)
    assert found == generate(reference, prompts, 12)
    assert text.tokenizer.decode(found[0]).startswith("The capital of France is Paris")


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    TinyModel("gemma3", kv_heads=1, head_dim=128).write(tmp_path / "tiny.gguf")
    with pytest.raises(ExecutorError, match=r"architecture is 'gemma3'; the cuda executor computes the Llama family"):
        on_cpu(tmp_path / "tiny.gguf")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "tpu"}, "--device is 'tpu'; the cuda executor has cuda, cpu; choose one"),
        (
            {"device": "cpu", "weight_precision": "int3"},
            "--weight-precision is 'int3'; the cuda executor on device cpu has int8, fp8, fp32; choose one",
        ),
        (
            {"device": "cpu", "kv_precision": "bf16"},
            "--kv-precision is 'bf16'; the cuda executor on device cpu has int8, fp8, fp32; choose one",
        ),
    ],
)
def test_choices_that_are_not_there_are_named(options: dict[str, str], message: str, tmp_path: Path) -> None:
    FAMILY["llama"].write(tmp_path / "tiny.gguf")
    with pytest.raises(ExecutorError, match=f"^{re.escape(message)}$"):
        create_executor("cuda", str(tmp_path / "tiny.gguf"), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["cpu", "reference"])
@pytest.mark.parametrize("choice", ["device", "weight_precision"])
def test_other_executors_take_no_choice_of_cudas(name: str, choice: str) -> None:
    flag = "--" + choice.replace("_", "-")
    with pytest.raises(ExecutorError, match=f"^{flag} is 'cuda'; the {name} executor has no such choice"):
        create_executor(name, "m.gguf", **{choice: "cuda"})  # type: ignore[arg-type]


def test_without_a_gpu_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FAMILY["llama"].write(tmp_path / "tiny.gguf")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ExecutorError, match=r"^no CUDA GPU is visible .* nvidia.com/gpu: 1, .* or choose --executor"):
        create_executor("cuda", str(tmp_path / "tiny.gguf"))
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ExecutorError, match=r"^torch \S+ is built without CUDA; install a CUDA build"):
        create_executor("cuda", str(tmp_path / "tiny.gguf"))


def test_an_old_gpu_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FAMILY["llama"].write(tmp_path / "tiny.gguf")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    with pytest.raises(ExecutorError, match=r"^Tesla T4 has compute capability 7.5; the kernels need 8.0 \(A100\)"):
        create_executor("cuda", str(tmp_path / "tiny.gguf"))


def test_without_torch_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "triton", None)
    with pytest.raises(ExecutorError, match=r"^--executor cuda needs torch and Triton \(.*\): use the GPU image, or"):
        create_executor("cuda", "m.gguf")


def test_a_model_that_is_too_large_is_refused_before_it_is_read(tmp_path: Path) -> None:
    FAMILY["llama"].write(tmp_path / "tiny.gguf")
    needed = on_cpu(tmp_path / "tiny.gguf").weight_bytes
    on_cpu(tmp_path / "tiny.gguf", room=needed)
    with pytest.raises(ExecutorError, match=r"takes 5 MiB as weights and the memory limit leaves 3 MiB for it; choose"):
        on_cpu(tmp_path / "tiny.gguf", room=3 << 20)
