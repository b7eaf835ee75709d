"""A `busload serve` process for tests: starts it, waits until it answers, reads its metrics and log."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

START = "from busload_operator.cli import main; main()"
# Enough for the tiny model's pool, little for the machine.
MEMORY = 2_000_000_000
PATIENCE = 120.0
"""Seconds until what must happen counts as failed: no machine that is slow or busy needs them."""
BUNDLED = "smollm2-135m-instruct"
"""The model that `busload serve` has with it, by the name it is served under."""


class LiveServer:
    """One process. `log` is all it wrote on stderr so far."""

    def __init__(self, directory: Path, *flags: str) -> None:
        self._log = directory / f"serve-{time.monotonic_ns()}.log"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", START, "serve", "--port=0", f"--memory={MEMORY}", *flags],
                stderr=log,
                stdout=subprocess.DEVNULL,
            )
        self.url = self._wait_for_url()
        self.http = httpx.Client(base_url=self.url, timeout=PATIENCE)

    @property
    def log(self) -> str:
        return self._log.read_text()

    def lines(self) -> list[dict[str, Any]]:
        """The access log."""
        return [json.loads(line) for line in self.log.splitlines() if line.startswith("{")]

    def metrics(self) -> dict[str, float]:
        """Series (name with labels) to value."""
        text = self.http.get("/metrics").text
        return {k: float(v) for k, _, v in (s.rpartition(" ") for s in text.splitlines() if not s.startswith("#"))}

    def level(self, name: str) -> float:
        """Value of a family with one series."""
        (value,) = [value for key, value in self.metrics().items() if key.partition("{")[0] == name]
        return value

    def complete(self, **body: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json=body)

    def stream(self, path: str = "/v1/completions", **body: Any) -> list[dict[str, Any] | str]:
        """All events of a stream; the last one is usually "[DONE]"."""
        with self.http.stream("POST", path, json={**body, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            return list(events(response))

    def engine_pid(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        (pid,) = [int(c) for c in children if "engine.process" in Path(f"/proc/{c}/cmdline").read_text()]
        return pid

    def wait(self, seconds: float = PATIENCE) -> int:
        return self.process.wait(seconds)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait(PATIENCE)
        self.http.close()

    def _wait_for_url(self) -> str:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            if found := re.search(r"is ready after .* at (http://\S+)/v1", self.log):
                return found[1]
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        self.process.kill()
        raise AssertionError(f"busload serve did not start (exit code {self.process.wait()}):\n{self.log}")


def events(response: httpx.Response) -> Iterator[dict[str, Any] | str]:
    """Server-sent events, parsed. Not by `iter_lines`: that takes U+2028, which a model may well say, for the end of a
    line, and in this format it is none."""
    rest = b""
    for chunk in response.iter_bytes():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data: "):
                data = line.removeprefix(b"data: ").strip()
                yield "[DONE]" if data == b"[DONE]" else json.loads(data)


def text_of(stream: list[dict[str, Any] | str], index: int = 0) -> str:
    """The text of one choice of a completions stream."""
    choices = [choice for event in stream if isinstance(event, dict) for choice in event.get("choices", [])]
    return "".join(choice["text"] for choice in choices if choice["index"] == index)


def eventually(check: Any, seconds: float = PATIENCE) -> None:
    """Repeats `check` until it returns something true."""
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.05)


@contextmanager
def running(directory: Path, *flags: str) -> Iterator[LiveServer]:
    server = LiveServer(directory, *flags)
    try:
        yield server
    finally:
        server.close()
