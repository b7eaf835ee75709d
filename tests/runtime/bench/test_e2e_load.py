"""The load of the demo and the end-to-end tests, on a server of this machine instead of one in a cluster."""

import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from e2e import services
from e2e.access import Cluster, NotReached, wait_for
from e2e.bench.server import BusloadServer


@dataclass(frozen=True)
class Here(Cluster):
    """No cluster: a service of any name is at `url`."""

    url: str = ""

    @contextmanager
    def reach(self, namespace: str, service: str, port: int = 8000) -> Iterator[tuple[str, list[str]]]:
        yield self.url, []


def arrived(server: BusloadServer) -> float:
    """Requests that have reached the server."""
    with urllib.request.urlopen(server.url.removesuffix("/v1") + "/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return float(next(line for line in lines if line.startswith("busload_requests_arrived_total ")).split()[1])


@pytest.mark.parametrize("connections", ["keep-alive", "fresh"])
def test_a_load_runs_until_it_is_ended_and_loses_nothing(real: BusloadServer, connections: str) -> None:
    cluster = Here("kubectl", url=real.url.removesuffix("/v1"))
    options = {"requests": 100000, "concurrency": 3, "output_tokens": 6, "connections": connections}
    load = services.Load(cluster, "default", real.model, **options)
    begin = time.time()
    before = arrived(real)
    wait_for(lambda: arrived(real) >= before + 6, 60, "the second request of each client", every=0.1)
    assert load.running()
    load.process.terminate()
    report = load.report()
    end = time.time()
    assert report.errors == []
    assert len(report.outcomes) >= 3
    assert all(outcome.ok and outcome.output_tokens == 6 for outcome in report.outcomes)
    assert begin <= report.began <= end
    assert report.rate_between(begin, end) == pytest.approx(report.output_tokens / (end - begin))


def test_a_load_that_meets_nobody_reports_each_failure() -> None:
    cluster = Here("kubectl", url="http://127.0.0.1:9")
    report = services.Load(cluster, "default", "chat", requests=3, concurrency=1).report()
    assert len(report.errors) == len(report.outcomes) == 3


def test_a_load_with_wrong_flags_says_so() -> None:
    with pytest.raises(NotReached, match="--concurrency 'many' is not a list of numbers"):
        services.Load(Here("kubectl", url="http://127.0.0.1:9"), "default", "chat", concurrency="many").report()
