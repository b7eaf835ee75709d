"""This project's server, as a user starts it."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version

from busload_runtime.model.bundled import resolve_source
from e2e.bench.peers.work import Measure, measure_http
from e2e.bench.server import DidNotStart, serve
from e2e.cluster.shell import Failure, run

MODEL = "bundled:smollm2-135m-instruct"


class Busload:
    name = "busload"
    what = "Q4_1, over HTTP"

    def install(self) -> str:
        """Nothing is to be installed; compiles the engine if need be."""
        resolve_source(MODEL)
        try:
            with serve():
                pass
        except DidNotStart as error:
            raise Failure(str(error)) from None
        commit = run(["git", "rev-parse", "--short", "HEAD"], check=False).stdout.strip()
        return f"{version('busload')}, commit {commit or 'unknown'}"

    @contextmanager
    def session(self, most: int) -> Iterator[Measure]:
        try:
            with serve(f"--batch-size={most}") as server:
                yield lambda work: measure_http(server.url, server.model, work)
        except DidNotStart as error:
            raise Failure(str(error)) from None
