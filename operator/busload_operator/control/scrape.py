"""Reads the /metrics of runtime pods: bounded in time, size and concurrency, because a pod may be stuck or lying."""

import asyncio
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from busload_operator.control import metrics
from busload_operator.resources.service import PORT
from busload_operator.tuning.counters import LENGTH_SAMPLES, OPTIONAL_SAMPLES, PROBED_BATCH, PROBED_LAW, SAMPLES
from busload_operator.tuning.feasible import FACT_SAMPLES

Values = dict[str, float]
"""Sample name -> value, summed over the labels of a name; `name{label="value"}` -> value of that series."""


@dataclass(frozen=True, slots=True)
class Scrape:
    """The outcome for one pod: `values`, or None and `error`, one clause that says why."""

    values: Values | None
    error: str = ""


class Scraper:
    """Scrapes pods over its own connections. Use as an async context manager."""

    def __init__(
        self,
        timeout: float = 1.5,
        max_bytes: int = 1 << 18,
        concurrency: int = 32,
        port: int = PORT,
        wanted: Collection[str] = frozenset(SAMPLES.values()).union(
            OPTIONAL_SAMPLES.values(), LENGTH_SAMPLES, FACT_SAMPLES, PROBED_LAW, [PROBED_BATCH]
        ),
    ):
        self._wanted = wanted
        self._timeout, self._max_bytes, self._port = timeout, max_bytes, port
        self._slots = asyncio.Semaphore(concurrency)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "Scraper":
        # Pod addresses are never reached through a proxy.
        self._session = aiohttp.ClientSession(trust_env=False, connector=aiohttp.TCPConnector(limit=0))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session:
            await self._session.close()

    async def scrape(self, address: str) -> Scrape:
        """One pod, by its IP address. Never raises for what a pod does."""
        assert self._session is not None, "use the scraper as a context manager"
        host = f"[{address}]" if ":" in address else address
        url = f"http://{host}:{self._port}/metrics"
        try:
            async with self._slots, asyncio.timeout(self._timeout):
                result = Scrape(parse(await self._read(self._session, url), self._wanted))
        except TimeoutError:
            result = Scrape(None, f"{url} did not answer within {self._timeout:g} s")
        except (aiohttp.ClientError, OSError) as error:
            result = Scrape(None, f"{url} failed: {error}")
        except ValueError as error:
            result = Scrape(None, f"{url} sent no usable metrics: {error}")
        metrics.SCRAPES.labels("failure" if result.values is None else "success").inc()
        return result

    async def _read(self, session: aiohttp.ClientSession, url: str) -> str:
        async with session.get(url, allow_redirects=False) as response:
            if response.status != 200:
                raise ValueError(f"status {response.status}")
            body = bytearray()
            async for chunk in response.content.iter_chunked(65536):
                body += chunk
                if len(body) > self._max_bytes:
                    raise ValueError(f"more than {self._max_bytes} bytes")
            return body.decode("utf-8")


def parse(text: str, wanted: Collection[str]) -> Values:
    """Parses the wanted samples of a text in the exposition format; samples that are not numbers count as missing.

    Raises ValueError for text that is not in that format, that names a series twice, or that holds nothing wanted.
    A body cut off in the middle of a line is refused too: its last number may lack digits.
    """
    if not text.endswith("\n"):
        raise ValueError("the text ends in the middle of a line")
    # The parser takes 50 microseconds a line, in the event loop: it must not see the hundreds nobody needs.
    names = {_sample_name(series) for series in wanted}
    lines = [line for line in text.splitlines() if _sample_name(line) in names]
    if not lines:
        raise ValueError("it holds none of the metrics of a busload runtime")
    values: Values = {}
    seen: set[tuple[str, frozenset[tuple[str, str]]]] = set()
    for family in text_string_to_metric_families("\n".join(lines)):
        for sample in family.samples:
            series = (sample.name, frozenset(sample.labels.items()))
            if series in seen:
                raise ValueError(f"{sample.name} is there twice with the same labels")
            seen.add(series)
            values[sample.name] = values.get(sample.name, 0.0) + float(sample.value)
            if sample.labels and (name := _series_name(sample.name, sample.labels)) in wanted:
                values[name] = float(sample.value)
    return {name: value for name, value in values.items() if math.isfinite(value)}


def _series_name(name: str, labels: Mapping[str, str]) -> str:
    return name + "{" + ",".join(f'{label}="{value}"' for label, value in sorted(labels.items())) + "}"


def _sample_name(line: str) -> str:
    return line.partition("{")[0].split(maxsplit=1)[0] if line and not line.isspace() and line[0] != "{" else ""
