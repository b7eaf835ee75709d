"""What every server has to do, and what a peer is."""

import asyncio
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

from busload_runtime.bench.client import Target
from busload_runtime.bench.lengths import Lengths
from busload_runtime.bench.options import BenchOptions
from busload_runtime.bench.outcome import Level
from busload_runtime.bench.run import measure
from busload_runtime.bench.workload import Workload
from e2e.cluster.shell import Failure, last_lines


@dataclass(frozen=True)
class Work:
    """Closed loop of random prompts that nobody has seen, greedy, end-of-text ignored."""

    concurrency: int
    requests: int
    input_tokens: int
    output_tokens: int
    seed: int
    first_id: int = 1000
    last_id: int = 40000


Measure = Callable[[Work], Level]


class Peer(Protocol):
    """A server to compare with. Each session is a fresh process."""

    name: str
    what: str
    """Precision and way of asking, for the table."""

    def install(self) -> str:
        """Makes it startable and returns its version. Raises `Failure` with the reason where that cannot be."""

    def session(self, most: int) -> AbstractContextManager[Measure]:
        """Started, for at most `most` requests at a time; ended with the context. Raises `Failure`."""


def measure_http(url: str, model: str, work: Work) -> Level:
    """Measures a server by its API, with one connection per request. Raises `Failure` when a request failed."""
    options = BenchOptions(
        Target(url, model, fresh_connections=True),
        Lengths(work.input_tokens, work.input_tokens),
        Lengths(work.output_tokens, work.output_tokens),
        concurrencies=(work.concurrency,),
        requests=work.requests,
        warmup=1,
        seed=work.seed,
        first_id=work.first_id,
        last_id=work.last_id,
    )
    (level,) = asyncio.run(measure(options, Workload(options)))
    if level.errors:
        raise Failure(f"{len(level.errors)} of {len(level.outcomes)} requests failed: {level.errors[0]}")
    return level


def wait_until_healthy(name: str, process: subprocess.Popen[bytes], url: str, log: int, seconds: float) -> None:
    """Until /health answers 200. Raises `Failure` with the end of its log when it ended or was not ready in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.2)
    text = os.pread(log, 1 << 20, 0).decode(errors="replace")
    raise Failure(f"{name} was not ready (exit code {process.poll()}):\n{last_lines(text)}")


@contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Ends the process with the context, by SIGKILL when SIGTERM does not within 20 s."""
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
