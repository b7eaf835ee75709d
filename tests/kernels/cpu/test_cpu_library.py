"""The compiled engine by itself: packing against the gguf library, the draw against numpy, the build."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize
from numpy.typing import NDArray

from busload_kernels.cpu import build, library
from busload_kernels.cpu.errors import KernelError

ROWS, COLS = 40, 512
# Relative error (root mean square) that packing adds to what the file says; 0: none at all.
PACKING_ERROR = {
    Type.Q4_0: 0.0,
    Type.Q4_1: 0.0,
    Type.Q8_0: 0.0,
    Type.Q4_K: 3e-4,
    Type.Q5_0: 5e-3,
    Type.Q5_1: 5e-3,
    Type.Q5_K: 5e-3,
    Type.Q6_K: 5e-3,
    Type.F16: 6e-3,
    Type.BF16: 6e-3,
    Type.F32: 6e-3,
}


def random_rows(kind: Type) -> NDArray[np.uint8]:
    """Rows of a tensor type with random content: every bit pattern is a valid block once its fp16 scales are sane."""
    rng = np.random.default_rng(int(kind))
    values = rng.standard_normal((ROWS, COLS)).astype(np.float32)
    if kind == Type.F32:
        return values.view(np.uint8)
    if kind == Type.F16:
        return values.astype(np.float16).view(np.uint8)
    if kind == Type.BF16:
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    elements, size = GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (ROWS * COLS // elements, size), dtype=np.uint8)
    scales = {Type.Q6_K: (208,), Type.Q4_0: (0,), Type.Q5_0: (0,), Type.Q8_0: (0,)}.get(kind, (0, 2))
    for at in scales:
        # Whole multiples of 2^-9: eight times a Q4_0 scale is then exact in fp32 arithmetic, too.
        scale = (rng.integers(1, 200, len(blocks)) / 512).astype(np.float16)
        blocks[:, at : at + 2] = scale.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(ROWS, -1)


def pack(kind: Type, raw: NDArray[np.uint8], rows: NDArray[np.int32], packed_format: int) -> NDArray[np.float32]:
    """`rows` of a tensor packed and read back."""
    lib = library.load()
    memory = np.zeros(lib.bl_packed_bytes(packed_format, len(rows), COLS), np.uint8)
    half = len(rows) // 2
    for first, part in ((0, rows[:half]), (half, rows[half:])):
        code = lib.bl_pack_rows(
            int(kind), raw.ctypes.data, COLS, part.ctypes.data, len(part), first, packed_format, memory.ctypes.data
        )
        assert code == 0
    matrix = library.Matrix(memory.ctypes.data, -(-len(rows) // 32) * 32, COLS, packed_format)
    result = np.empty((len(rows), COLS), np.float32)
    for row in range(len(rows)):
        lib.bl_unpack_row(ctypes.byref(matrix), row, result[row].ctypes.data)
    return result


@pytest.mark.parametrize("kind", PACKING_ERROR, ids=lambda kind: kind.name)
def test_packing_keeps_the_weights(kind: Type) -> None:
    raw = random_rows(kind)
    exact = dequantize(raw, kind).reshape(ROWS, COLS)
    rows = np.random.default_rng(0).permutation(ROWS).astype(np.int32)
    formats = {library.load().bl_packed_format(int(kind)), library.W8}
    for packed_format in formats:
        ours = pack(kind, raw, rows, packed_format)
        error = np.linalg.norm(ours - exact[rows]) / np.linalg.norm(exact)
        # Four bits made eight, for a matrix whose other rows are not four bits.
        allowed = 5e-3 if packed_format == library.W8 and kind.name.startswith("Q4") else PACKING_ERROR[kind]
        assert error <= allowed


def test_small_weights_keep_their_scale() -> None:
    """A scale that fp16 holds with few bits must not turn into a bias: values are rounded with the scale as stored."""
    raw = (np.random.default_rng(0).standard_normal((ROWS, COLS)) * 2e-4).astype(np.float32)
    ours = pack(Type.F32, raw.view(np.uint8), np.arange(ROWS, dtype=np.int32), library.W8)
    assert np.linalg.norm(ours - raw) / np.linalg.norm(raw) < 0.02
    assert abs((ours * raw).sum() / (raw * raw).sum() - 1) < 0.002


def test_unknown_types_are_refused() -> None:
    lib = library.load()
    assert lib.bl_packed_format(9999) == -1
    nothing = np.zeros(4096, np.uint8)
    assert lib.bl_pack_rows(9999, nothing.ctypes.data, 32, nothing.ctypes.data, 1, 0, 1, nothing.ctypes.data) == -1
    floats = int(Type.F32), nothing.ctypes.data, 32, nothing.ctypes.data, 1, 0, library.W4, nothing.ctypes.data
    assert lib.bl_pack_rows(*floats) == -1


@pytest.mark.parametrize(("seed", "index"), [(0, 0), (1, 0), (0, 1), (7, 123_456), (2**64 - 1, 2**40)])
def test_the_draw_is_numpys_philox(seed: int, index: int) -> None:
    expected = np.random.Generator(np.random.Philox(key=seed, counter=index)).random()
    assert library.load().bl_uniform(seed, index) == expected


def test_the_path_for_any_cpu_is_there() -> None:
    isas = library.usable_isas()
    assert isas[-1] == "portable"
    flags = set(Path("/proc/cpuinfo").read_text().split())
    assert ("avx2" in isas) == ({"avx2", "fma", "f16c"} <= flags)
    assert ("avx512" in isas) == (
        {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"} <= flags
    )


FAKE_COMPILER = """#!/bin/sh
echo run >> "$(dirname "$0")/runs"
while [ "$1" != -o ]; do shift; done
sleep 0.05
echo built > "$2"
"""


def test_processes_that_start_at_once_build_once(tmp_path: Path) -> None:
    compiler = tmp_path / "fake-c++"
    compiler.write_text(FAKE_COMPILER)
    compiler.chmod(0o755)
    cache = tmp_path / "cache"
    command = [sys.executable, "-m", "busload_kernels.cpu.build", "--out", str(cache)]
    environment = {**os.environ, "CXX": str(compiler)}
    processes = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    paths = {process.communicate(timeout=60)[0].strip() for process in processes}
    assert paths == {str(cache / build.library_name())}
    compiled = (tmp_path / "runs").read_text().splitlines()
    assert len(compiled) == len(list(build.SOURCES.glob("*.cpp"))) + 1
    assert {path.name for path in cache.iterdir()} == {build.library_name(), "build.lock"}


def test_a_failed_build_says_why_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/bin/false")
    with pytest.raises(KernelError, match="compiling the CPU engine failed: /bin/false"):
        build.build(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["build.lock"]


def test_no_compiler_and_no_place_are_clear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(KernelError, match="set BUSLOAD_CACHE to a writable one"):
        build.build(tmp_path / "file" / "below")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(KernelError, match=r"no C\+\+ compiler found .* install g\+\+"):
        build.build(tmp_path)


def test_the_name_follows_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = build.library_name()
    for path in build.SOURCES.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    assert build.library_name() == before
    (tmp_path / "abi.h").write_text("// changed\n")
    assert build.library_name() != before


def test_the_cache_directory_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUSLOAD_CACHE", "/somewhere")
    assert build.cache_directory() == Path("/somewhere")
    monkeypatch.delenv("BUSLOAD_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert build.cache_directory() == Path("/xdg/busload")
