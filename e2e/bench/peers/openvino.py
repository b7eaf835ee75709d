"""OpenVINO GenAI's continuous batching, in process, so without the cost of HTTP. An environment of its own."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from busload_runtime.bench.outcome import Level, outcomes_from_json
from busload_runtime.model.bundled import resolve_source
from e2e.bench.peers.busload import MODEL
from e2e.bench.peers.work import Measure, Work
from e2e.cluster.shell import Failure, last_lines, run

_DRIVER = Path(__file__).with_name("openvino_driver.py")
_PACKAGES = ("openvino-genai>=2026.4,<2027", "openvino-tokenizers>=2026.4,<2027", "numpy>=2,<3")
_INSTALL_SECONDS = 900


class OpenVino:
    name = "openvino"
    what = "Q4_1, in process"

    def __init__(self, cache: Path) -> None:
        self._venv = cache / "openvino"
        self._python = self._venv / "bin/python"

    def install(self) -> str:
        """An environment that cannot import it (none there, or made halfway) is filled."""
        try:
            return self._version()
        except Failure:
            run([sys.executable, "-m", "venv", self._venv])
            pip = [str(self._python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
            run([*pip, *_PACKAGES], timeout=_INSTALL_SECONDS)
            return self._version()

    def _version(self) -> str:
        return run([self._python, "-c", "import openvino_genai; print(openvino_genai.__version__)"]).stdout.strip()

    @contextmanager
    def session(self, most: int) -> Iterator[Measure]:
        # -P: modules beside the driver, of which this one is named like the peer, must not be found.
        command = [str(self._python), "-P", str(_DRIVER), resolve_source(MODEL), str(most)]
        with (
            tempfile.TemporaryFile("w+") as log,
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True) as process,
        ):

            def measure(work: Work) -> Level:
                assert process.stdin is not None
                assert process.stdout is not None
                try:
                    process.stdin.write(json.dumps(asdict(work)) + "\n")
                    process.stdin.flush()
                    answer = json.loads(process.stdout.readline())
                except (BrokenPipeError, json.JSONDecodeError):
                    log.seek(0)
                    raise Failure(f"the driver ended:\n{last_lines(log.read())}") from None
                outcomes = outcomes_from_json(answer["outcomes"])
                return Level(f"concurrency {work.concurrency}", answer["began"], outcomes, work.concurrency)

            try:
                yield measure
            finally:
                process.terminate()
