"""What a file's header says a model needs is what the engine says once it has loaded it."""

import pytest
import torch

from busload_operator.api.v1alpha1 import BUNDLED_CONTEXTS
from busload_operator.plan.gguf_facts import GpuElements, cpu_facts, gpu_facts, read_header
from busload_operator.tuning.models import BUNDLED, BUNDLED_ON_GPU
from busload_runtime.executors.cpu import CpuExecutor
from busload_runtime.executors.torch_model import loading
from busload_runtime.executors.torch_model.kv_cache import BLOCK_SIZE, CacheShape
from busload_runtime.executors.torch_model.open import open_checkpoint
from busload_runtime.model.load import load_weights

MODEL = "bundled:smollm2-135m-instruct"


def test_the_figures_are_the_engines() -> None:
    facts = cpu_facts(*read_header(MODEL))
    engine = CpuExecutor(load_weights(MODEL), threads=3)
    assert facts.weight_bytes == facts.step_weight_bytes == engine.weight_bytes
    assert facts.block_tokens == engine.block_size
    assert facts.kv_bytes_per_token * facts.block_tokens == engine.bytes_per_block
    assert facts.context_length == engine.context_length
    for tokens, requests in ((1, 1), (7, 64), (512, 8), (513, 64), (672, 4), (673, 4), (47, 47), (48, 48), (2048, 256)):
        exact = engine.activation_bytes(tokens, requests)
        planned = facts.step_memory.of(tokens, requests, threads=3)
        assert exact <= planned <= 1.01 * exact


@pytest.mark.parametrize("name", BUNDLED_CONTEXTS)
def test_every_bundled_model_is_in_the_table_as_its_file_says(name: str) -> None:
    assert BUNDLED[name] == cpu_facts(*read_header(f"bundled:{name}"))
    assert BUNDLED[name].context_length == BUNDLED_CONTEXTS[name]
    for bits, weight_bits in ((8, None), (16, 16)):
        known = gpu_facts(*read_header(f"bundled:{name}"), GpuElements(weight_bits=weight_bits))
        assert BUNDLED_ON_GPU[bits][name] == known


def test_gpu_figures_follow_from_element_sizes() -> None:
    header = read_header(MODEL)
    half, default = gpu_facts(*header, GpuElements(weight_bits=16, kv_bits=16)), gpu_facts(*header, GpuElements())
    # 30 layers, keys and values of 3 heads of 64; by default a scale of 4 bytes for each head.
    assert half.kv_bytes_per_token == 30 * 2 * 3 * 64 * 2
    assert default.kv_bytes_per_token == 30 * 2 * 3 * (64 + 4)
    # 134.5 million parameters; by default a scale of 4 bytes for each row.
    assert half.step_weight_bytes == pytest.approx(2 * 134.5e6, rel=0.001)
    assert half.step_weight_bytes / 2 < default.step_weight_bytes < half.step_weight_bytes / 2 * 1.01


@pytest.mark.parametrize(("precision", "bits"), [("int8", None), ("fp8", None), ("bf16", 16)])
def test_gpu_weights_are_those_of_the_executor(precision: str, bits: float | None) -> None:
    """The same model, placed as on a GPU."""
    checkpoint = open_checkpoint(MODEL)
    placement = loading.Placement(torch.device("cpu"), torch.bfloat16, precision)
    decoder = loading.load_decoder(checkpoint, placement)
    facts = gpu_facts(*read_header(MODEL), GpuElements(weight_bits=bits))
    assert facts.weight_bytes == decoder.num_bytes
    config = checkpoint.config
    shape = CacheShape(config.num_layers, config.num_kv_heads, config.head_dim, torch.int8)
    assert facts.block_tokens == BLOCK_SIZE
    assert facts.kv_bytes_per_token * facts.block_tokens == shape.bytes_per_block
