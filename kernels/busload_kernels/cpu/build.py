"""Compiles the C++ engine into one shared library, once.

The library's name holds a key of sources, flags and architecture. It is looked for beside this package (built with the
wheel or image: `python -m busload_kernels.cpu.build`), then in the user's cache, and built there when missing. Several
processes that start at once wait for one build. Behind the library lies its digest: a file that a full disk, a crash or
a copy has cut or changed would end the process that loads it with a signal, so it is built again instead.
"""

import argparse
import fcntl
import os
import platform
import shlex
import shutil
import signal
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
_WORK_PREFIX = "build-"
_DIGEST_BYTES = 32
_LONGEST_OUTPUT = 4000


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
            return ("-O2",)  # its vectors are written out: -O3 finds nothing more
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
    """`BUSLOAD_CACHE`, else `busload` in the user's cache directory. Raises `KernelError` for a user without a home."""
    if named := os.environ.get("BUSLOAD_CACHE"):
        return Path(named)
    if named := os.environ.get("XDG_CACHE_HOME"):
        return Path(named) / "busload"
    try:
        return Path.home() / ".cache" / "busload"
    except RuntimeError:  # no HOME, and a user id that no passwd file knows: usual in containers
        raise KernelError(
            f"the CPU engine is not built for this version, and user {os.getuid()} has no home directory to build it "
            "in; set BUSLOAD_CACHE to a writable directory, or build it into the image with "
            "python -m busload_kernels.cpu.build"
        ) from None


def library_path() -> Path:
    """The built library, built now if it is nowhere. Raises `KernelError`."""
    name = library_name()
    if _is_whole(path := PREBUILT / name):
        return path
    return build(cache_directory())


def build(directory: Path) -> Path:
    """Builds the library in `directory` unless it is there and whole. Raises `KernelError`."""
    target = directory / library_name()
    if _is_whole(target):  # without the lock: the directory may be read-only
        return target
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with open(directory / "build.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_whole(target):
                _remove_unfinished(directory)
                _compile(target)
    except OSError as error:
        raise KernelError(
            f"cannot write the CPU engine to {directory} ({error}); set BUSLOAD_CACHE to a writable one, or build "
            "it into the image with python -m busload_kernels.cpu.build"
        ) from None
    return target


def _is_whole(library: Path) -> bool:
    try:
        raw = library.read_bytes()
    except OSError:
        return False
    return len(raw) > _DIGEST_BYTES and sha256(raw[:-_DIGEST_BYTES]).digest() == raw[-_DIGEST_BYTES:]


def _remove_unfinished(directory: Path) -> None:
    """What builds that were killed left behind. The caller holds the lock, so none is running."""
    for left in directory.glob(f"{_WORK_PREFIX}*"):
        shutil.rmtree(left, ignore_errors=True)


def _compile(target: Path) -> None:
    compiler = _compiler()
    machine = platform.machine()
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=_WORK_PREFIX) as work:

        def compile_one(source: Path) -> Path:
            out = Path(work) / f"{source.stem}.o"
            _run(work, *compiler, *_flags(source.name, machine), "-c", str(source), "-o", str(out))
            return out

        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            objects = list(pool.map(compile_one, sorted(SOURCES.glob("*.cpp"))))
        whole = Path(work) / target.name
        # The C++ runtime goes in: the image that loads the library need not have one.
        linking = ("-shared", "-pthread", "-static-libstdc++", "-static-libgcc")
        _run(work, *compiler, *linking, *map(str, objects), "-o", str(whole))
        digest = sha256(whole.read_bytes()).digest()
        with open(whole, "ab") as file:
            file.write(digest)
            file.flush()
            os.fsync(file.fileno())
        whole.rename(target)


def _compiler() -> list[str]:
    """The compiler and what stands before its own arguments: CXX may be `ccache g++`."""
    if wanted := os.environ.get("CXX", "").strip():
        try:
            words = shlex.split(wanted)
        except ValueError:  # a quote that is not closed
            words = []
        if words and shutil.which(words[0]):
            return words
        raise KernelError(
            f"CXX is {wanted!r:.200}, which is no program here; correct it, or unset it to use {_COMPILERS[0]}"
        )
    for name in _COMPILERS:
        if path := shutil.which(name):
            return [path]
    raise KernelError(
        f"no C++ compiler found (tried {', '.join(_COMPILERS)}) and the CPU engine is not built for this version; "
        "install g++ (Debian, Ubuntu: apt-get install g++), or choose --executor reference"
    )


def _run(work: str, *command: str) -> None:
    """Runs a compiler. Its own temporary files go to `work` too, so that one place has to have room.

    Raises `KernelError` with one line; all that the compiler said goes to standard error.
    """
    text = shlex.join(command)
    environment = {**os.environ, "TMPDIR": work}
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_SECONDS,
            check=False,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        raise KernelError(f"compiling the CPU engine took over {_TIMEOUT_SECONDS} s: {text}") from None
    except OSError as error:
        raise KernelError(f"cannot run the C++ compiler ({error}): {text}") from None
    if done.stderr:
        print(done.stderr[-_LONGEST_OUTPUT:], file=sys.stderr)
    if done.returncode:
        raise KernelError(f"compiling the CPU engine in {work} failed: {_reason(done)}; the command was: {text}")


def _reason(done: subprocess.CompletedProcess[str]) -> str:
    """Why a compiler failed: the line of its output that says most."""
    if done.returncode < 0:
        return f"the compiler was killed by {signal.Signals(-done.returncode).name}"
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    if full := next((line for line in lines if "No space left" in line), None):
        return f"{full[:300]} (set BUSLOAD_CACHE to a directory with 100 MB of room)"
    telling = [line for line in lines if "error" in line.lower()]
    return (telling or lines or [f"exit code {done.returncode}"])[0][:300]


def main() -> None:
    parser = argparse.ArgumentParser(description="Builds the CPU engine, for wheels and images.")
    parser.add_argument("--out", type=Path, default=PREBUILT, help="directory of the library (default: in the package)")
    try:
        print(build(parser.parse_args().out))
    except KernelError as error:
        sys.exit(f"{parser.prog}: {error}")


if __name__ == "__main__":
    main()
