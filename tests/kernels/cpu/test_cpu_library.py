"""The compiled engine by itself: packing against the gguf library, the draw against numpy, the build."""

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
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


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("exit 3", "exit code 3"),
        ("kill -9 $$", "the compiler was killed by SIGKILL"),
        ("echo 'In file included from x' >&2; echo 'x.h:1:2: error: no' >&2; exit 1", "x.h:1:2: error: no"),
        (
            "echo 'x.o: final close failed: No space left on device' >&2; exit 1",
            "No space left on device (set BUSLOAD_CACHE",
        ),
    ],
)
def test_a_failed_build_says_why_and_leaves_nothing(
    body: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(script(tmp_path / "c++", body)))
    with pytest.raises(KernelError) as caught:
        build.build(tmp_path / "cache")
    message = str(caught.value)
    assert reason in message
    assert f"the command was: {tmp_path / 'c++'} -std" in message
    assert "\n" not in message
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["build.lock"]


def test_the_command_says_it_in_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "busload_kernels.cpu.build", "--out", str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, "CXX": "no-such-compiler"}, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "CXX is 'no-such-compiler', which is no program here" in done.stderr


def script(path: Path, body: str) -> Path:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def damage_nothing(path: Path) -> None: ...


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def change(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[2] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize("damage", [damage_nothing, cut, change, Path.unlink], ids=lambda damage: damage.__name__)
def test_a_damaged_library_is_built_again(
    damage: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loaded, it would end the process with a bus error or worse."""
    monkeypatch.setenv("CXX", str(script(tmp_path / "c++", FAKE_COMPILER)))
    (tmp_path / "cache" / "build-killed").mkdir(parents=True)
    path = build.build(tmp_path / "cache")
    assert not (tmp_path / "cache" / "build-killed").exists()  # nobody else would ever remove it
    whole, runs = path.read_bytes(), (tmp_path / "runs").read_text()
    assert whole.startswith(b"built\n")
    damage(path)
    assert build.build(tmp_path / "cache").read_bytes() == whole
    assert (tmp_path / "runs").read_text() == (runs if damage is damage_nothing else 2 * runs)


def test_the_compiler_may_have_arguments_and_writes_to_one_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapper = f'echo "$1 $TMPDIR" >> {tmp_path}/wrapped; shift; exec "$@"'
    script(tmp_path / "wrapper", wrapper)
    script(tmp_path / "c++", FAKE_COMPILER)
    monkeypatch.setenv("CXX", f"{tmp_path / 'wrapper'} 'an argument' {tmp_path / 'c++'}")
    build.build(tmp_path / "cache")
    lines = set((tmp_path / "wrapped").read_text().splitlines())
    assert len(lines) == 1
    assert lines.pop().startswith(f"an argument {tmp_path / 'cache' / 'build-'}")


@pytest.mark.parametrize("wanted", ["no-such-compiler", "/nowhere/g++ -O2", "'g++"])
def test_a_compiler_that_was_asked_for_and_is_not_there_is_an_error(
    wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", wanted)
    with pytest.raises(KernelError, match=r"^CXX is .*which is no program here; correct it, or unset it"):
        build.build(tmp_path)


def test_a_user_without_a_home_needs_no_cache_when_it_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "BUSLOAD_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def no_home() -> Path:  # what Path.home does for a user id that is not in passwd
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr(build, "PREBUILT", tmp_path)
    with pytest.raises(KernelError, match=r"user \d+ has no home directory .*; set BUSLOAD_CACHE"):
        build.library_path()
    monkeypatch.setenv("CXX", str(script(tmp_path / "c++", FAKE_COMPILER)))
    build.build(tmp_path)
    assert build.library_path() == tmp_path / build.library_name()


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
