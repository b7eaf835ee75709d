"""A `busload serve` process to measure: starts it on a free port, waits until it is ready, ends it."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

MODEL = "smollm2-135m-instruct"
_START_SECONDS = 180.0


@dataclass
class BusloadServer:
    """A running server. `url` ends with /v1."""

    url: str
    model: str
    pid: int
    started_in: float
    """Seconds from the start of the process until it said that it is ready, which takes a first token."""
    exit_code: int | None = None
    """None while it runs."""

    def processes(self) -> dict[str, int]:
        """Process ids: of the HTTP process and of the engine, its child."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        engines = [int(c) for c in children if b"engine.process" in Path(f"/proc/{c}/cmdline").read_bytes()]
        return {"http": self.pid, "engine": engines[0]}


class DidNotStart(RuntimeError):
    """The server ended or was not ready in time; the message ends with what it wrote."""


@contextmanager
def serve(
    *flags: str,
    model: str = f"bundled:{MODEL}",
    executor: str = "cpu",
    environment: Mapping[str, str] | None = None,
    module: str = "busload_operator.cli",
) -> Iterator[BusloadServer]:
    """Serves `model` on 127.0.0.1 with further flags of `busload serve` and, beside this process's environment, further
    variables; by another `module` than busload's own where something is to be measured in it. Raises `DidNotStart`."""
    command = [sys.executable, "-m", module, "serve", "--port=0", f"--served-model-name={MODEL}"]
    with tempfile.TemporaryFile("w+") as log:
        begin = time.monotonic()
        process = subprocess.Popen(
            [*command, f"--model={model}", f"--executor={executor}", *flags],
            stdout=subprocess.DEVNULL,
            stderr=log,
            env=with_byte_code() | dict(environment or {}),
        )
        try:
            url = _wait_for_url(process, log.fileno())
            server = BusloadServer(url, MODEL, process.pid, time.monotonic() - begin)
            yield server
            server.exit_code = _end(process)
        finally:
            _end(process)


def with_byte_code() -> dict[str, str]:
    """This process's environment, for a server with byte code of all modules, as an image has it. A checkout may have
    none, and its Python be told not to write any (PYTHONDONTWRITEBYTECODE): then each start compiles a thousand files.
    So only the first of this process does."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return inherited | {"PYTHONPYCACHEPREFIX": _byte_code().name}


@cache
def _byte_code() -> "tempfile.TemporaryDirectory[str]":
    """Of all servers that this process starts; removed at its end."""
    return tempfile.TemporaryDirectory(prefix="busload-byte-code-")


def spare_one_core() -> dict[str, str]:
    """Environment of a server whose steps are compared with a law: its threads leave a core to HTTP and the client.

    With a thread on every core, whoever else runs holds up a step as a whole.
    """
    return {"BUSLOAD_THREADS": str(max(1, len(os.sched_getaffinity(0)) - 1))}


def _end(process: subprocess.Popen[bytes]) -> int:
    """Its exit code after a SIGTERM, or a SIGKILL if that does not help."""
    process.send_signal(signal.SIGTERM)
    try:
        return process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _wait_for_url(process: subprocess.Popen[bytes], log: int) -> str:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        if found := re.search(r"is ready after .* at (http://\S+/v1)", _read(log)):
            return found[1]
        time.sleep(0.01)
    raise DidNotStart(f"`busload serve` was not ready (exit code {process.poll()}):\n{_read(log)[-2000:]}")


def _read(log: int) -> str:
    # By position: the process writes to the same open file, whose offset must not move.
    return os.pread(log, 1 << 20, 0).decode(errors="replace")
