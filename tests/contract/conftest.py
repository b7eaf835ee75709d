"""One live `busload serve` for all contract tests."""

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from live_server import BUNDLED, LiveServer, running
from tiny_gguf import write_tiny_model


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """The bundled model on the CPU engine; shared, so tests leave it as idle as they found it."""
    flags = ("--executor=cpu", f"--served-model-name={BUNDLED}", "--batch-size=8", "--max-sequence-length=4096")
    with running(tmp_path_factory.mktemp("contract"), *flags) as live:
        yield live


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose steps take about a millisecond, for what would take the bundled one minutes."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(scope="session")
def tight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """The bundled model with a KV cache for less than two sequences of full length, and a batch of 8."""
    length = 288
    flags = (f"--max-sequence-length={length}", "--kv-cache-percent=1", "--memory=830000000")
    with running(tmp_path_factory.mktemp("tight"), f"--served-model-name={BUNDLED}", *flags) as live:
        capacity = live.level("busload_kv_blocks") * live.level("busload_kv_block_size_tokens")
        assert length <= capacity < 2 * length, "choose another --memory"
        yield live


@pytest.fixture(scope="session")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    """The official client, which sees each answer once: it retries nothing."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=60) as official:
        yield official
