"""What a file's header says a model needs is what the engine says once it has loaded it."""

import pytest

from busload_operator.api.v1alpha1 import BUNDLED_CONTEXTS
from busload_operator.plan.gguf_facts import GpuElements, cpu_facts, gpu_facts, read_header
from busload_operator.tuning.models import BUNDLED, BUNDLED_ON_GPU
from busload_runtime.executors.cpu import CpuExecutor
from busload_runtime.model.load import load_weights

MODEL = "bundled:smollm2-135m-instruct"


def test_the_figures_are_the_engines() -> None:
    facts = cpu_facts(*read_header(MODEL))
    engine = CpuExecutor(load_weights(MODEL), threads=3)
    assert facts.weight_bytes == facts.step_weight_bytes == engine.weight_bytes
    assert facts.block_tokens == engine.block_size
    assert facts.kv_bytes_per_token * facts.block_tokens == engine.bytes_per_block
    assert facts.context_length == engine.context_length
    for tokens, requests in ((1, 1), (7, 64), (512, 8), (513, 64), (682, 4), (683, 4), (2048, 256)):
        exact = engine.activation_bytes(tokens, requests)
        planned = facts.step_memory.of(tokens, requests, threads=3)
        assert exact <= planned <= 1.01 * exact


@pytest.mark.parametrize("name", BUNDLED_CONTEXTS)
def test_every_bundled_model_is_in_the_table_as_its_file_says(name: str) -> None:
    assert BUNDLED[name] == cpu_facts(*read_header(f"bundled:{name}"))
    assert BUNDLED[name].context_length == BUNDLED_CONTEXTS[name]
    assert BUNDLED_ON_GPU[name] == gpu_facts(*read_header(f"bundled:{name}"), GpuElements())


def test_gpu_figures_follow_from_element_sizes() -> None:
    header = read_header(MODEL)
    half, default = gpu_facts(*header, GpuElements(weight_bits=16, kv_bits=16)), gpu_facts(*header, GpuElements())
    # 9 heads of queries: a sum of 64 and two more numbers each, fp32, for every 512 tokens.
    partial = -(-4 * 9 * 66 // 512)
    # 30 layers, keys and values of 3 heads of 64; by default a scale of 4 bytes for each head.
    assert half.kv_bytes_per_token == 30 * 2 * 3 * 64 * 2 + partial
    assert default.kv_bytes_per_token == 30 * 2 * 3 * (64 + 4) + partial
    # 134.5 million parameters; by default a scale of 4 bytes for each row.
    assert half.weight_bytes == pytest.approx(2 * 134.5e6, rel=0.001)
    assert half.weight_bytes / 2 < default.weight_bytes < half.weight_bytes / 2 * 1.01
