"""llama.cpp's server: Debian sid's build in a chroot, so that the machine keeps its own packages. Needs root."""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from busload_runtime.model.bundled import resolve_source
from e2e.access import free_port
from e2e.bench.peers.busload import MODEL
from e2e.bench.peers.work import Measure, ended, measure_http, wait_until_healthy
from e2e.cluster.shell import Failure, run

_TOKENS_PER_REQUEST = 512
_START_SECONDS = 120
_INSTALL_SECONDS = 900


class LlamaCpp:
    name = "llama.cpp"
    what = "Q8_0, over HTTP"

    def __init__(self, cache: Path) -> None:
        self._root = cache / "llama.cpp"
        self._model = self._root / "models/smollm2-q8_0.gguf"

    def install(self) -> str:
        if os.geteuid() != 0:
            raise Failure("it needs root: it runs in a chroot that debootstrap makes")
        if not (self._root / "usr/bin/llama-server").exists():
            self._make_chroot()
        if not self._model.exists():
            self._quantise()
        text = run(["chroot", self._root, "llama-server", "--version"])
        found = re.search(r"version: (.+)", text.stdout + text.stderr)
        return found[1] if found else "of unknown version"

    def _make_chroot(self) -> None:
        """Built beside its place and moved there, so that what was interrupted is not taken for a whole one."""
        if shutil.which("debootstrap") is None:
            run(["apt-get", "install", "-y", "-q", "debootstrap"], timeout=_INSTALL_SECONDS)
        building = self._root.with_name(self._root.name + ".building")
        shutil.rmtree(building, ignore_errors=True)
        building.parent.mkdir(parents=True, exist_ok=True)
        # The machine's keyring may be older than sid's keys; apt inside the chroot checks signatures with its own.
        run(
            ["debootstrap", "--variant=minbase", "--no-check-gpg", "sid", building, *_mirror()],
            timeout=_INSTALL_SECONDS,
        )
        for path in ("/etc/resolv.conf", "/etc/ssl/certs/ca-certificates.crt"):
            if Path(path).exists():
                target = building / path[1:]
                target.parent.mkdir(parents=True, exist_ok=True)
                target.unlink(missing_ok=True)
                shutil.copy(path, target)
        for settings in Path("/etc/apt/apt.conf.d").glob("*"):  # proxies and the like
            if not (building / "etc/apt/apt.conf.d" / settings.name).exists() and "docker" not in settings.name:
                shutil.copy(settings, building / "etc/apt/apt.conf.d" / settings.name)
        run(["chroot", building, "apt-get", "update", "-q"], timeout=_INSTALL_SECONDS)
        packages = ("llama.cpp", "llama.cpp-tools")
        install = ["env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "install", "-y", "-q", "--no-install-recommends"]
        run(["chroot", building, *install, *packages], timeout=_INSTALL_SECONDS)
        building.rename(self._root)

    def _quantise(self) -> None:
        """8 bits from the 4-bit file that busload serves: as fast as that build serves the model."""
        self._model.parent.mkdir(exist_ok=True)
        source = self._model.with_name("smollm2-q4_1.gguf")
        shutil.copy(resolve_source(MODEL), source)
        partial = self._model.with_suffix(".partial")
        paths = [f"/models/{path.name}" for path in (source, partial)]
        run(["chroot", self._root, "llama-quantize", "--allow-requantize", *paths, "Q8_0"], timeout=300)
        partial.rename(self._model)

    @contextmanager
    def session(self, most: int) -> Iterator[Measure]:
        port = free_port()
        threads = len(os.sched_getaffinity(0))
        server = f"llama-server -m /models/{self._model.name} --host 127.0.0.1 --port {port} -t {threads} -cb"
        server += f" --parallel {most} -c {most * _TOKENS_PER_REQUEST}"
        # /proc in a mount namespace of its own: nothing stays mounted. Each program replaces the one before it, so the
        # process id is the server's.
        script = f'mount -t proc proc "$1/proc" && exec chroot "$1" {server}'
        with tempfile.TemporaryFile("w+") as log:
            process = subprocess.Popen(
                ["unshare", "--mount", "sh", "-c", script, "sh", str(self._root)], stdout=log, stderr=log
            )
            with ended(process):
                url = f"http://127.0.0.1:{port}"
                wait_until_healthy("llama-server", process, url, log.fileno(), _START_SECONDS)
                yield lambda work: measure_http(f"{url}/v1", "smollm2", work)


def _mirror() -> list[str]:
    """The Debian mirror this machine uses, so that a local one or a proxy serves the chroot too."""
    folder = Path("/etc/apt")
    sources = [folder / "sources.list", *(folder / "sources.list.d").glob("*")]
    texts = [path.read_text() for path in sources if path.is_file()]
    found = re.search(r"https?://[^\s/]+/debian/?(?=\s|$)", "\n".join(texts))
    return [found[0]] if found else []
