"""`python -m e2e.bench.connections`: 1,000 connections, half of them with a stream, against one server.

Every stream must end with [DONE] or have been refused with 429, a reason and Retry-After; the connections that are idle
must still be served at the end, and nothing may remain. Prints memory, and how long health and scrape took meanwhile.
"""

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from e2e.bench.server import serve
from e2e.soak.report import spread
from e2e.soak.watch import HEALTH, Watch
from e2e.soak.wire import BrokenAnswer, Connection

_LOOK_SECONDS = 0.2
_QUIET_SECONDS = 30.0


def main() -> int:
    options = _parse()
    flags = (f"--batch-size={options.batch}", f"--max-queued-requests={options.queue}")
    with serve(*flags) as server:
        url = urlsplit(server.url)
        watch = Watch(url.hostname or "", url.port or 0, server.processes())
        report = asyncio.run(_Bench(options, watch).go())
    report["exit_code"] = server.exit_code
    if server.exit_code:
        report["problems"].append(f"SIGTERM ended the server with exit code {server.exit_code}")
    print(_render(report))
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(report, indent=2) + "\n")
    return 1 if report["problems"] else 0


class _Bench:
    """One run against one server."""

    def __init__(self, options: argparse.Namespace, watch: Watch) -> None:
        self._options, self._watch = options, watch
        self._statuses: Counter[int] = Counter()
        self._problems: list[str] = []
        self._first_answer: list[float] = []
        self._refused_after: list[float] = []

    async def go(self) -> dict[str, Any]:
        options, watch = self._options, self._watch
        await watch.look()
        idle = [await Connection.open(watch.host, watch.port) for _ in range(options.connections - options.streams)]
        watching = asyncio.create_task(self._look_on())
        began = time.perf_counter()
        await asyncio.gather(*(self._stream(place) for place in range(options.streams)))
        seconds = time.perf_counter() - began
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        for connection in idle:
            await self._still_served(connection)
        last = await self._quiet()
        return self._report(seconds, last)

    async def _stream(self, place: int) -> None:
        watch, began = self._watch, time.perf_counter()
        try:
            connection = await Connection.open(watch.host, watch.port)
            body = {"prompt": f"{place} green bottles", "max_tokens": self._options.tokens, "stream": True}
            connection.post("/v1/completions", json.dumps(body).encode())
            status = await connection.head()
            self._statuses[status] += 1
            took = time.perf_counter() - began
            if status == 200:
                self._first_answer.append(took)
                last = [event async for event in connection.events()][-1]
                if last != "[DONE]":
                    self._problems.append(f"a stream ended with {str(last)[:200]}")
            else:
                self._refused_after.append(took)
                error = (await connection.json())["error"]
                if status != 429 or not connection.headers.get("retry-after", "").isdigit():
                    self._problems.append(
                        f"status {status}, Retry-After {connection.headers.get('retry-after')}: {error}"
                    )
            connection.close()
        except (BrokenAnswer, OSError) as error:
            self._problems.append(f"{type(error).__name__}: {error}")

    async def _still_served(self, connection: Connection) -> None:
        try:
            connection.get(HEALTH[0])
            if await connection.head() != 200:
                self._problems.append(f"an idle connection was answered with {connection.status}")
            connection.close()
        except (BrokenAnswer, OSError) as error:
            self._problems.append(f"an idle connection is gone: {error}")

    async def _look_on(self) -> None:
        while True:
            await self._watch.look()
            await asyncio.sleep(_LOOK_SECONDS)

    async def _quiet(self) -> dict[str, float]:
        deadline = time.monotonic() + _QUIET_SECONDS
        while True:
            metrics = await self._watch.look()
            if not any(value for name, value in metrics.items() if name.startswith("vllm:num_requests_")):
                break
            if time.monotonic() > deadline:
                self._problems.append(f"requests run or wait {_QUIET_SECONDS:g} s after the last client has left")
                break
            await asyncio.sleep(_LOOK_SECONDS)
        if metrics["busload_kv_blocks_free"] != metrics["busload_kv_blocks"]:
            self._problems.append("KV blocks are not free though nobody is there")
        return metrics

    def _report(self, seconds: float, last: dict[str, float]) -> dict[str, Any]:
        watch, options = self._watch, self._options
        return {
            "connections": options.connections,
            "streams": options.streams,
            "batch_size": options.batch,
            "queue": options.queue,
            "seconds": seconds,
            "tokens": last["busload_generated_tokens_total"],
            "statuses": {str(status): count for status, count in sorted(self._statuses.items())},
            "first_answer_seconds": spread(self._first_answer),
            "refused_after_seconds": spread(self._refused_after),
            "health_seconds": spread(watch.health_seconds),
            "scrape_seconds": spread(watch.scrape_seconds) | {"bytes": watch.scrape_bytes},
            "memory_mib": {
                name: {
                    "before": watch.samples[0].rss[name] / (1 << 20),
                    "most": max(sample.rss[name] for sample in watch.samples) / (1 << 20),
                    "after": watch.samples[-1].rss[name] / (1 << 20),
                }
                for name in watch.processes
            },
            "open_files": max(sample.files["http"] for sample in watch.samples),
            "problems": self._problems + watch.problems,
        }


def _render(report: dict[str, Any]) -> str:
    lines = [
        f"{report['connections']} connections, {report['streams']} streams; batch {report['batch_size']}, queue "
        f"{report['queue']}: {report['tokens']:.0f} tokens in {report['seconds']:.1f} s, "
        f"at most {report['open_files']} open files",
        "statuses: " + ", ".join(f"{status} ({count})" for status, count in report["statuses"].items()),
    ]
    for name in ("first_answer", "refused_after", "health", "scrape"):
        times = report[f"{name}_seconds"]
        shown = ", ".join(f"{key} {times[key]:.4f} s" for key in ("median", "p99", "max"))
        lines.append(f"{name.replace('_', ' ')}: {shown}" + (f", {times['bytes']} bytes" if "bytes" in times else ""))
    for name, memory in report["memory_mib"].items():
        lines.append(
            f"memory of {name}: {memory['before']:.0f} MiB before, {memory['most']:.0f} MiB at most, "
            f"{memory['after']:.0f} MiB after"
        )
    problems = report["problems"]
    return "\n".join([*lines, f"{len(problems)} problems" if problems else "no problem", *problems[:20]])


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m e2e.bench.connections", description=__doc__)
    parser.add_argument("--connections", type=int, default=1000, help="in all (default: %(default)s)")
    parser.add_argument("--streams", type=int, default=500, help="of them with a request (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=8, help="of each stream (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="batch limit (default: %(default)s)")
    parser.add_argument("--queue", type=int, default=256, help="requests that may wait (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="where to write the report as JSON")
    options = parser.parse_args()
    if not 1 <= options.streams <= options.connections <= 20_000:
        parser.error("give 1 to 20000 connections, and at least as many of them as streams")
    return options


if __name__ == "__main__":
    sys.exit(main())
