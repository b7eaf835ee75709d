from collections.abc import Iterator
from pathlib import Path

import pytest
from live_server import LiveServer, running
from tiny_gguf import write_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="session")
def tiny(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Serves the tiny random model; shared, so tests leave it as idle as they found it."""
    flags = ("--served-model-name=tiny", "--batch-size=4", "--max-sequence-length=4096", "--max-queued-requests=8")
    with running(tmp_path_factory.mktemp("tiny"), f"--model={tiny_model}", *flags) as server:
        yield server


@pytest.fixture(scope="session")
def smol(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Serves SmolLM2-135M-Instruct."""
    with running(tmp_path_factory.mktemp("smol")) as server:
        yield server
