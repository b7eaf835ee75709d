"""`python -m e2e.soak --minutes 10 --seed 1`: a server under everything that clients do, and what is left behind.

Ends with exit code 0 when nothing remained and nothing happened that cannot be explained, else with 1. What clients do
is drawn from the seed; when they do it depends on the machine.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

from e2e.bench.server import serve
from e2e.soak.acts import CANARY, COMPLETIONS, Client, Outcome, choose, perform
from e2e.soak.report import Run, render, summarise
from e2e.soak.settings import CLIENTS, MEMORY, LimitsFile
from e2e.soak.watch import Watch
from e2e.soak.wire import Connection

_LOOK_SECONDS = 0.5
_PROGRESS_SECONDS = 10.0
_REFUSED_PAUSE = 1.0
_QUIET_SECONDS = 30.0
_CALM_SHARE = 0.15
"""Of the time, at the end, in which four streams run and nothing else."""
_CALM_STREAMS = 4
_TICK_SECONDS = 0.005


def main() -> int:
    options = _parse()
    draw = random.Random(options.seed)
    run = Run(options.minutes, options.seed)
    with tempfile.TemporaryDirectory() as folder:
        limits = LimitsFile(Path(folder) / "limits.json", draw)
        flags = (f"--memory={MEMORY}", f"--limits-file={folder}/limits.json")
        with serve(*flags) as server:
            url = urlsplit(server.url)
            watch = Watch(url.hostname or "", url.port or 0, server.processes())
            asyncio.run(_Soak(run, watch, limits, draw).go(options.minutes * 60))
        run.exit_code = server.exit_code
    report = summarise(run, watch)
    print(render(report))
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(report, indent=2) + "\n")
    return 1 if report["problems"] else 0


class _Soak:
    """One run against one server."""

    def __init__(self, run: Run, watch: Watch, limits: LimitsFile, draw: random.Random) -> None:
        self._run, self._watch, self._limits, self._draw = run, watch, limits, draw
        self._began = time.monotonic()
        self._told = 0.0

    async def go(self, seconds: float) -> None:
        await self._watch.look()
        until = self._began + seconds * (1 - _CALM_SHARE)
        watching = asyncio.create_task(self._look_on())
        changing = asyncio.create_task(self._change_limits())
        await asyncio.gather(*(self._work(random.Random(self._draw.getrandbits(64)), until) for _ in range(CLIENTS)))
        changing.cancel()
        await self._quiet()
        await self._calm(seconds * _CALM_SHARE)
        watching.cancel()
        await asyncio.gather(watching, changing, return_exceptions=True)
        await self._quiet()
        self._run.refused_documents = self._limits.refusals

    async def _work(self, draw: random.Random, until: float) -> None:
        """One client after another."""
        client = Client(self._watch.host, self._watch.port, draw)
        while time.monotonic() < until:
            outcome = await perform(choose(draw), client)
            self._run.outcomes.append(outcome)
            if outcome.problem:
                print(f"{self._at()} {outcome.act}: {outcome.problem}", flush=True)
            if outcome.status == 429:
                await asyncio.sleep(_REFUSED_PAUSE)

    async def _change_limits(self) -> None:
        while True:
            await asyncio.sleep(self._draw.uniform(1, 4))
            self._limits.change()

    async def _look_on(self) -> None:
        while True:
            metrics = await self._watch.look()
            if time.monotonic() - self._told >= _PROGRESS_SECONDS:
                self._told = time.monotonic()
                self._tell(metrics)
            await asyncio.sleep(_LOOK_SECONDS)

    async def _quiet(self) -> None:
        """Waits until the first limits are in force again and nothing runs; notes what the server says then."""
        generation = self._limits.rest()
        deadline = time.monotonic() + _QUIET_SECONDS
        while True:
            idle = self._run.idle = await self._watch.look()
            busy = [value for name, value in idle.items() if name.startswith("vllm:num_requests_")] != [0, 0]
            if not busy and idle["busload_limits_generation"] == generation:
                return
            if time.monotonic() > deadline:
                self._run.problems.append(f"not idle {_QUIET_SECONDS:g} s after the last client has left")
                return
            await asyncio.sleep(0.2)

    async def _calm(self, seconds: float) -> None:
        """Streams that fit the memory, one behind the other in each of four lanes: their gaps are the server's own."""
        until = time.monotonic() + seconds

        async def lane() -> None:
            while time.monotonic() < until:
                outcome = Outcome("calm")
                connection = await Connection.open(self._watch.host, self._watch.port)
                body = CANARY | {"max_tokens": 120, "stream": True}
                connection.post(COMPLETIONS, json.dumps(body).encode())
                outcome.status = await connection.head()
                last = 0.0
                async for _ in connection.events():
                    now = time.perf_counter()
                    if last:
                        self._run.calm_gaps.append(now - last)
                    last = now
                connection.close()
                self._run.outcomes.append(outcome)

        lateness = asyncio.create_task(self._note_lateness())
        await asyncio.gather(*(lane() for _ in range(_CALM_STREAMS)))
        lateness.cancel()

    async def _note_lateness(self) -> None:
        """How late this process itself wakes up: gaps as long as that tell of the machine, not of the server."""
        while True:
            begin = time.perf_counter()
            await asyncio.sleep(_TICK_SECONDS)
            self._run.own_lateness.append(time.perf_counter() - begin - _TICK_SECONDS)

    def _tell(self, metrics: dict[str, float]) -> None:
        outcomes = self._run.outcomes
        statuses = Counter(outcome.status for outcome in outcomes)
        levels = " ".join(
            f"{name} {sum(v for k, v in metrics.items() if k.startswith(f'vllm:num_requests_{name}')):.0f}"
            for name in ("running", "waiting")
        )
        memory = " ".join(f"{name} {rss >> 20} MiB" for name, rss in self._watch.samples[-1].rss.items())
        problems = sum(bool(outcome.problem) for outcome in outcomes) + len(self._watch.problems)
        answers = ", ".join(f"{status or 'left'}: {count}" for status, count in sorted(statuses.items()))
        print(
            f"{self._at()} {len(outcomes)} acts ({answers}), {levels}, "
            f"preemptions {metrics.get('busload_preemptions_total', 0):.0f}, {memory}, {problems} problems",
            flush=True,
        )

    def _at(self) -> str:
        return f"[{time.monotonic() - self._began:5.0f} s]"


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m e2e.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long it runs (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of all that is drawn (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="where to write the report as JSON")
    options = parser.parse_args()
    if not 0.1 <= options.minutes <= 24 * 60:
        parser.error(f"--minutes must be from 0.1 to 1440, got {options.minutes:g}")
    return options


if __name__ == "__main__":
    sys.exit(main())
