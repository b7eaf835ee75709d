"""Compiles the C++ engine into one shared library, once.

The library's name holds a key of sources, flags and architecture. It is looked for beside this package (built with the
wheel or image: `python -m busload_kernels.cpu.build`), then in the user's cache, and built there when missing. Several
processes that start at once wait for one build; a library appears under its name only when it is whole.
"""

import argparse
import fcntl
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

from busload_kernels.cpu.errors import KernelError

SOURCES = Path(__file__).parent / "csrc"
PREBUILT = Path(__file__).parent / "prebuilt"

_COMMON = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=default", "-Wall", "-Wextra", "-pthread")
# BUSLOAD_CPU_PROFILE=1 counts the time of each phase of a step (csrc/profile.h). Flags are in the key: another library.
_PROFILE = ("-DBL_PROFILE",)
# The whole of a group is meant to be in registers; re-association makes gcc spill it (simd_avx2.h).
_KERNEL = ("-fno-tree-reassoc",) if sys.platform.startswith("linux") else ()
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni")
# gcc 12 takes the deliberately undefined operands inside its own AVX-512 header for mistakes.
_QUIET = ("-Wno-uninitialized", "-Wno-maybe-uninitialized")

_COMPILERS = ("c++", "g++", "clang++")
_TIMEOUT_SECONDS = 300


def _flags(name: str, machine: str) -> tuple[str, ...]:
    profile = _PROFILE if os.environ.get("BUSLOAD_CPU_PROFILE") == "1" else ()
    return (*_COMMON, *profile, *_file_flags(name, machine))


def _file_flags(name: str, machine: str) -> tuple[str, ...]:
    x86 = machine in ("x86_64", "AMD64")
    match name:
        case "kernels_avx2.cpp":
            return (*_KERNEL, *_AVX2) if x86 else ()
        case "kernels_avx512.cpp":
            return (*_KERNEL, *_QUIET, *_AVX512) if x86 else ()
        case "kernels_portable.cpp":
            return ("-O2",)  # -O3 unrolls the sixteen lanes of everything: 37 seconds instead of 3
        case _:
            return ()


def library_name() -> str:
    """File name of the library for the present sources, flags and architecture."""
    machine = platform.machine()
    digest = sha256(machine.encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
        digest.update(" ".join(_flags(path.name, machine)).encode())
    return f"busload_cpu-{digest.hexdigest()[:20]}.so"


def cache_directory() -> Path:
    """`BUSLOAD_CACHE`, else `busload` in the user's cache directory."""
    if named := os.environ.get("BUSLOAD_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "busload"


def library_path() -> Path:
    """The built library, built now if it is nowhere. Raises `KernelError`."""
    name = library_name()
    for directory in (PREBUILT, cache_directory()):
        if (path := directory / name).is_file():
            return path
    return build(cache_directory())


def build(directory: Path) -> Path:
    """Builds the library in `directory` unless it is there. Raises `KernelError`."""
    target = directory / library_name()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with open(directory / "build.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.is_file():
                _compile(target)
    except OSError as error:
        raise KernelError(
            f"cannot write the CPU engine to {directory} ({error}); set BUSLOAD_CACHE to a writable one, or build "
            "it into the image with python -m busload_kernels.cpu.build"
        ) from None
    return target


def _compile(target: Path) -> None:
    compiler = _compiler()
    machine = platform.machine()
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as work:

        def compile_one(source: Path) -> Path:
            out = Path(work) / f"{source.stem}.o"
            _run(compiler, *_flags(source.name, machine), "-c", str(source), "-o", str(out))
            return out

        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            objects = list(pool.map(compile_one, sorted(SOURCES.glob("*.cpp"))))
        whole = Path(work) / target.name
        # The C++ runtime goes in: the image that loads the library need not have one.
        linking = ("-shared", "-pthread", "-static-libstdc++", "-static-libgcc")
        _run(compiler, *linking, *map(str, objects), "-o", str(whole))
        whole.rename(target)


def _compiler() -> str:
    for name in filter(None, (os.environ.get("CXX"), *_COMPILERS)):
        if path := shutil.which(name):
            return path
    raise KernelError(
        f"no C++ compiler found (tried CXX, {', '.join(_COMPILERS)}) and the CPU engine is not built for this version; "
        "install g++ (Debian, Ubuntu: apt-get install g++), or choose --executor reference"
    )


def _run(*command: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise KernelError(f"compiling the CPU engine took over {_TIMEOUT_SECONDS} s: {' '.join(command)}") from None
    if done.returncode:
        raise KernelError(f"compiling the CPU engine failed: {' '.join(command)}\n{done.stderr[-4000:]}")
    if done.stderr:
        print(done.stderr, file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description="Builds the CPU engine, for wheels and images.")
    parser.add_argument("--out", type=Path, default=PREBUILT, help="directory of the library (default: in the package)")
    print(build(parser.parse_args().out))


if __name__ == "__main__":
    main()
