"""What is looked at meanwhile: health, the scrape, memory and open files of both processes."""

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from e2e.soak.wire import BrokenAnswer, Connection

HEALTH = ("/health/live", "/health/ready", "/health/startup")


@dataclass(frozen=True, slots=True)
class Sample:
    """Resident bytes and open files of each process, seconds after the start."""

    at: float
    rss: dict[str, int]
    files: dict[str, int]


@dataclass(slots=True)
class Watch:
    """Asks a server for health and metrics, and the kernel for its processes."""

    host: str
    port: int
    processes: dict[str, int]
    began: float = field(default_factory=time.monotonic)
    health_seconds: list[float] = field(default_factory=list)
    scrape_seconds: list[float] = field(default_factory=list)
    scrape_bytes: int = 0
    samples: list[Sample] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    async def look(self) -> dict[str, float]:
        """One look at all of it; returns the metrics."""
        for path in HEALTH:
            begin = time.perf_counter()
            status, _ = await self._get(path)
            self.health_seconds.append(time.perf_counter() - begin)
            if status != 200:
                self.problems.append(f"{path} answered {status} after {time.monotonic() - self.began:.0f} s")
        begin = time.perf_counter()
        status, scrape = await self._get("/metrics")
        self.scrape_seconds.append(time.perf_counter() - begin)
        self.scrape_bytes = max(self.scrape_bytes, len(scrape))
        try:
            self.samples.append(
                Sample(
                    time.monotonic() - self.began,
                    {name: resident_bytes(pid) for name, pid in self.processes.items()},
                    {name: len(os.listdir(f"/proc/{pid}/fd")) for name, pid in self.processes.items()},
                )
            )
        except OSError as error:
            self.problems.append(f"a process is gone after {time.monotonic() - self.began:.0f} s: {error}")
        return parse_metrics(scrape.decode())

    async def _get(self, path: str) -> tuple[int, bytes]:
        try:
            connection = await Connection.open(self.host, self.port)
            try:
                connection.get(path)
                status = await connection.head()
                return status, await connection.body()
            finally:
                connection.close()
        except (BrokenAnswer, OSError) as error:
            self.problems.append(f"{path}: {error}")
            return 0, b""


def parse_metrics(text: str) -> dict[str, float]:
    """Series (name with labels) to value."""
    lines = (line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


def resident_bytes(pid: int) -> int:
    """Resident memory. Raises `OSError` for a process that is gone."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
