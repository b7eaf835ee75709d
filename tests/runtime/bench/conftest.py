from collections.abc import Iterator

import pytest

from e2e.bench.server import BusloadServer, serve


@pytest.fixture(scope="session")
def real() -> Iterator[BusloadServer]:
    """A real server on the CPU executor; four requests run, one more may wait."""
    limits = ("--batch-size=4", "--max-sequence-length=1024", "--max-queued-requests=1")
    with serve(*limits, "--memory=1500000000") as server:
        yield server
