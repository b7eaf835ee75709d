"""Is the simulator believed? The same requests through a real server and through `busload simulate`'s pods.

    python -m e2e.bench.simulator_fidelity                     # this runtime on this machine, about 21 minutes
    python -m e2e.bench.simulator_fidelity --measured FOLDER   # also a vLLM run that was recorded elsewhere

- runtime: the step law is fitted from the server's own counters under closed loops of three other mixes, and what a
  first token takes beyond its step (HTTP, tokenizer) from their requests that were alone; three open loads (light,
  knee, overload) of two length mixes, none of which the fit has seen, are served and simulated.
- measured: files NAME_requests.jsonl, NAME_timeseries.csv, NAME_meta.json of LLMServingSim's examples; the law comes
  from the run's own gauges, one a second.

Bars: means within 10% and 95th percentiles within 20% of the real run, peak batch within 5%; measured: means within
12%.
Nothing else may run on the machine: a step that is slowed down by a neighbour is not what the law describes. For
the same reason the engine leaves a core to HTTP and to the client. A law that fits its own windows worse than 15% is
not compared with anything (exit code 2).

A shared machine is a quarter faster in one ten seconds than in the next, and a queue near its limit shows that many
times over. So how fast it is, is measured all the time: after every fifteenth of its steps the engine runs one that is
always the same (`reference_steps`). The law is fitted to what steps would have taken on a machine of one speed, in
rounds, one before each load and one after the last; and each load is simulated twice:

- reference speed: the machine as fast as the reference steps say. Nothing of the load's own steps is used, so the law
  is judged too.
- own speed: the machine as fast as this load's counters say (busy seconds against what the law says for those steps,
  over five seconds). It also takes up what the law itself misses at that load's batch and mix: scheduling, queues and
  HTTP are judged, not the law.

`--judge` says which of the two the bars apply to; both are printed.
A lighter load lasts longer, so that as many requests come: of few, a percentile is one of three.
"""

import argparse
import asyncio
import itertools
import math
import random
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from busload_operator.simulate.hardware import HARDWARE, Hardware
from busload_operator.simulate.workload import Arrival, Lengths, flat
from busload_operator.tuning import Law, PodSample, counters_from_samples
from busload_operator.tuning.fit import Fit, Workload, add, solve, step_seconds
from busload_operator.tuning.window import Base, PodWindow, read
from busload_runtime.bench.client import Client, Request, Target
from busload_runtime.bench.loops import Ending, closed_loop, open_loop
from busload_runtime.bench.outcome import Outcome
from busload_runtime.bench.prompts import PromptMaker
from busload_runtime.contract import Limits, StepLaw
from e2e.bench import reference_steps
from e2e.bench.fidelity_bars import BARS, Timing, compare, simulated
from e2e.bench.fidelity_recorded import check_measured
from e2e.bench.reference_steps import Reference
from e2e.bench.server import BusloadServer, serve, spare_one_core

MIXES = {"chat": (100, 60), "long prompts": (400, 30)}
"""Medians of lognormal prompt and output lengths."""
FIT_MIXES = ((60, 80), (500, 20), (300, 200))
"""Three, since under one mix KV tokens and prompts grow with the batch alike, and no fit can tell them apart; under
long prompts with short answers the prompts hide what their KV tokens cost."""
LOADS = {"light": 0.3, "knee": 0.8, "overload": 1.5}
"""Shares of the capacity that the fitted law gives."""
_LONGEST = 1024
_FIT_LEVELS = ((1, 4, 12, 24), (2, 8, 16))
"""Concurrent requests, of odd and of even rounds."""
_SCRAPE_SECONDS = 1.0
_WORST_LAW = 0.15
"""Error of a law that describes nothing; the tuner does not use such a one either."""
OWN, REFERENCE = "own speed", "reference speed"
_AROUND_SECONDS = 2.0
"""Before and after a second, of reference steps that tell its speed: a single one of them scatters."""


@dataclass(slots=True)
class Windows:
    """What a scraper gathers while a load runs."""

    base: Base | None = None
    windows: list[PodWindow] = field(default_factory=list)
    samples: dict[str, float] | None = None


@contextmanager
def scraped(server: BusloadServer) -> Iterator[Windows]:
    """Scrapes once a second in a thread; the windows are there when it ends."""
    found, stop = Windows(), threading.Event()

    def scrape() -> None:
        text = urllib.request.urlopen(server.url.removesuffix("/v1") + "/metrics", timeout=5).read().decode()
        samples: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples[sample.name] = samples.get(sample.name, 0.0) + sample.value
        now = time.monotonic()
        reading = read(found.base, PodSample("server", now, counters_from_samples(samples), True), now)
        found.base, found.samples = reading.base, samples
        if reading.window is not None:
            found.windows.append(reading.window)

    def loop() -> None:
        while not stop.wait(_SCRAPE_SECONDS):
            scrape()

    scrape()
    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join()


async def _closed(
    server: BusloadServer, requests: Iterator[Request], concurrency: int, seconds: float
) -> list[Outcome]:
    client = Client(Target(server.url, server.model))
    outcomes: list[Outcome] = []
    try:
        await closed_loop(client, requests, concurrency, seconds, Ending(), outcomes)
    finally:
        await client.close()
    return outcomes


async def _open(server: BusloadServer, arrivals: Iterator[tuple[float, Request]]) -> list[Outcome]:
    client = Client(Target(server.url, server.model))
    outcomes: list[Outcome] = []
    try:
        await open_loop(client, arrivals, Ending(), outcomes)
    finally:
        await client.close()
    return outcomes


def requests(load: Sequence[Arrival], seed: int) -> Iterator[tuple[float, Request]]:
    maker = PromptMaker(seed, words=False)
    rng = random.Random(seed)
    for arrival in load:
        prompt, tokens = maker.make(rng, arrival.prompt)
        yield arrival.at, Request(prompt, tokens, arrival.output)


@dataclass(frozen=True, slots=True)
class Round:
    """Closed loops of the fit."""

    windows: Sequence[PodWindow]
    together: Sequence[PodWindow]
    """Those of several clients: one or another always has work for the engine."""
    alone: Sequence[tuple[float, Outcome]]
    """Requests of the single client, and when its loop began."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """Of a machine as fast as it was in the mean."""

    law: Law
    front_end: float
    """Seconds that the first token of a request alone in the engine takes beyond its step, in the mean."""
    gap: float
    """Seconds between two steps, which belong to a step here: what clients wait for is the wall clock."""

    def predicted(self, w: PodWindow) -> float:
        law = self.law
        return law.a * w.steps + law.b * w.step_batch + law.c * w.step_kv_tokens + law.d * w.prefill_tokens

    def pace(self, windows: Sequence[PodWindow]) -> float:
        """Seconds that steps took for each that they should have taken; 1 for windows without any."""
        expected = sum(map(self.predicted, windows))
        return sum(_in_steps(w, self.gap) for w in windows) / expected if expected > 0 else 1.0


def _in_steps(window: PodWindow, gap: float) -> float:
    """Seconds without those in which the engine had no work."""
    return window.busy_seconds + gap * window.steps


@dataclass(frozen=True, slots=True)
class Load:
    """One open load, as it was served."""

    name: str
    arrivals: Sequence[Arrival]
    real: Sequence[Timing]
    began: float
    windows: Sequence[PodWindow]


class FitSources:
    """Closed loops of the fit's mixes, which go on from round to round."""

    def __init__(self) -> None:
        loads = [flat(1000.0, 60.0, Lengths.lognormal(*mix, longest=_LONGEST // 2), seed=99) for mix in FIT_MIXES]
        self._sources = [(request for _, request in requests(load, seed=99)) for load in loads]

    def round(self, server: BusloadServer, levels: Sequence[int], seconds: float) -> Round:
        kept, together, alone = list[PodWindow](), list[PodWindow](), list[tuple[float, Outcome]]()
        for source, level in itertools.product(self._sources, levels):
            with scraped(server) as found:
                began = time.monotonic()
                outcomes = asyncio.run(_closed(server, source, level, seconds))
            windows = [w for w in found.windows[1:-1] if w.running > 0 and w.running_peak >= level / 2]
            kept += windows
            if level == 1:
                alone += [(began, outcome) for outcome in outcomes if outcome.ok]
            else:
                together += windows
        return Round(kept, together, alone)


def fit_law(rounds: Sequence[Round], reference: Reference) -> Fitted:
    together = [window for one in rounds for window in one.together]
    gap = sum(w.seconds - w.busy_seconds for w in together) / sum(w.steps for w in together)
    fit = Fit()
    for window in (window for one in rounds for window in one.windows):
        pace = reference.pace(window.start - _AROUND_SECONDS, window.end + _AROUND_SECONDS)
        fit = add(fit, replace(window, busy_seconds=_in_steps(window, gap) / pace))
    law = solve(fit)
    assert law is not None, "no window under load"
    beyond = [_beyond_its_step(began, outcome, law, reference) for one in rounds for began, outcome in one.alone]
    front_end = max(0.0, statistics.mean(beyond)) if beyond else 0.0
    return Fitted(law, front_end, gap)


def _beyond_its_step(began: float, outcome: Outcome, law: Law, reference: Reference) -> float:
    """Prompts of the fit's mixes fit one step."""
    tokens, at = outcome.input_tokens, began + outcome.intended
    assert outcome.time_to_first_token is not None
    pace = reference.pace(at - _AROUND_SECONDS, at + _AROUND_SECONDS)
    return outcome.time_to_first_token - pace * (law.a + tokens * (law.c + law.d))


class Speed:
    """How fast the machine was during a load: maps its seconds to those that the machine of the fit would need."""

    def __init__(self, paces: Sequence[tuple[float, float]]) -> None:
        """(Until when, in seconds from the start of the load; seconds for each of the fit), one after the other; the
        last goes on."""
        self.slowest, self.fastest = max(pace for _, pace in paces), min(pace for _, pace in paces)
        self._wall, self._machine = [0.0], [0.0]
        for end, pace in paces:
            seconds = end - self._wall[-1]
            self._machine.append(self._machine[-1] + seconds / pace)
            self._wall.append(end)
        self._last = paces[-1][1]

    @classmethod
    def seen(cls, fitted: Fitted, windows: Sequence[PodWindow], began: float) -> "Speed":
        """That of a load's own windows, over five of them."""
        around = [windows[max(0, i - 2) : i + 3] for i in range(len(windows))]
        return cls([(w.end - began, fitted.pace(near)) for w, near in zip(windows, around, strict=True)])

    @classmethod
    def told(cls, reference: Reference, began: float, seconds: float) -> "Speed":
        """That of the reference steps, second by second."""
        starts = [began + i for i in range(math.ceil(seconds))]
        paces = [reference.pace(at - _AROUND_SECONDS, at + 1 + _AROUND_SECONDS) for at in starts]
        return cls([(at + 1 - began, pace) for at, pace in zip(starts, paces, strict=True)])

    def machine(self, wall: float) -> float:
        return self._map(wall, self._wall, self._machine, 1 / self._last)

    def wall(self, machine: float) -> float:
        return self._map(machine, self._machine, self._wall, self._last)

    @staticmethod
    def _map(value: float, there: Sequence[float], here: Sequence[float], beyond: float) -> float:
        i = min(bisect_right(there, value), len(there) - 1)
        if value >= there[-1]:
            return here[-1] + (value - there[-1]) * beyond
        return here[i - 1] + (value - there[i - 1]) * (here[i] - here[i - 1]) / (there[i] - there[i - 1])


def check_runtime(options: argparse.Namespace) -> bool:
    limits = Limits(_LONGEST, options.batch_size, 90, 512, 100_000, 100_000_000)
    flags = (
        f"--batch-size={limits.batch_size}",
        f"--max-sequence-length={limits.max_sequence_length}",
        f"--token-budget={limits.token_budget}",
        f"--max-queued-requests={limits.max_queued_requests}",
        f"--max-queued-tokens={limits.max_queued_tokens}",
    )
    with tempfile.TemporaryDirectory() as folder:
        steps = Path(folder) / "reference"
        environment = spare_one_core() | {reference_steps.FILE: str(steps)}
        with serve(*flags, environment=environment, module=reference_steps.MODULE) as server:
            rounds, loads = measure(server, options, steps)
            with scraped(server) as found:
                pass
        reference = Reference.read(steps)
    assert found.samples is not None
    fitted = fit_law(rounds, reference)
    law = fitted.law
    print(
        f"law: a {1e3 * law.a:.3f} ms, b {1e3 * law.b:.4f} ms, c {1e9 * law.c:.1f} ns, d {1e6 * law.d:.2f} us, "
        f"error {law.error:.1%} over {law.samples} windows; {1e3 * fitted.gap:.2f} ms between steps, "
        f"a first token takes {1e3 * fitted.front_end:.2f} ms beyond its step"
    )
    if law.error > _WORST_LAW:
        print(f"nothing is compared: the law's error is over {_WORST_LAW:.0%}; is the machine quiet?", file=sys.stderr)
        sys.exit(2)
    hardware = replace(
        HARDWARE["cpu"],
        law=StepLaw(law.a, law.b, law.c, law.d),
        front_end=fitted.front_end,
        kv_tokens=round(found.samples["busload_kv_blocks"] * found.samples["busload_kv_block_size_tokens"]),
        block_size=round(found.samples["busload_kv_block_size_tokens"]),
        noise=0.0,
        drift=0.0,
    )
    pool = replace(limits, kv_cache_percent=100)
    good = True
    for load in loads:
        speeds = {
            REFERENCE: Speed.told(reference, load.began, max(timing.last for timing in load.real)),
            OWN: Speed.seen(fitted, load.windows, load.began),
        }
        for name, speed in speeds.items():
            moved = f"steps took {speed.fastest:.2f} to {speed.slowest:.2f} times what the law says"
            here = at_speed(load.arrivals, hardware, pool, speed)
            within = compare(f"{load.name}; {name}: {moved}", BARS, load.real, here)
            good = good and (within or name != options.judge)
        own, told = fitted.pace(load.windows), reference.pace(load.windows[0].start, load.windows[-1].end)
        print(f"  steps took {own / told - 1:+.1%} against the law at the reference's speed")
    return good


def measure(server: BusloadServer, options: argparse.Namespace, steps: Path) -> tuple[list[Round], list[Load]]:
    """Rounds of the fit, with the loads between them: two first, as each has half of the levels, then one after each
    load. How much load is a share of the capacity that the rounds before it tell."""
    sources, rounds, loads = FitSources(), list[Round](), list[Load]()

    def fit_round() -> None:
        levels = [level for level in _FIT_LEVELS[len(rounds) % 2] if level <= 1.5 * options.batch_size]
        rounds.append(sources.round(server, levels, options.fit_seconds))
        print(f"{time.strftime('%H:%M:%S')} fit, round {len(rounds)} of {2 + len(MIXES) * len(LOADS)}", file=sys.stderr)

    fit_round()
    for (mix, medians), (load, share) in itertools.product(MIXES.items(), LOADS.items()):
        fit_round()
        lengths = Lengths.lognormal(*medians, longest=_LONGEST // 2)
        law = fit_law(rounds, Reference.read(steps)).law
        rate = share * requests_per_second(law, lengths, options.batch_size)
        arrivals = flat(rate, options.seconds * LOADS["overload"] / share, lengths, seed=options.seed)
        loads.append(serve_load(server, f"{mix}, {load} ({rate:.1f}/s)", arrivals))
    fit_round()
    return rounds, loads


def serve_load(server: BusloadServer, name: str, arrivals: Sequence[Arrival]) -> Load:
    texts = zlib.crc32(name.encode())
    with scraped(server) as seen:
        began = time.monotonic()
        outcomes = asyncio.run(_open(server, requests(arrivals, seed=texts)))
    if bad := [outcome for outcome in outcomes if not outcome.ok]:
        raise SystemExit(f"{name}: {len(bad)} requests failed, first: {bad[0].error}")
    real = [Timing(o.intended, o.chunks[0], o.chunks[-1], o.output_tokens) for o in outcomes]
    return Load(name, arrivals, real, began, seen.windows)


def at_speed(load: Sequence[Arrival], hardware: Hardware, limits: Limits, speed: Speed) -> list[Timing]:
    """Simulated on the machine of the fit, to which the load comes as slowly as it is fast."""
    moved = [replace(arrival, at=speed.machine(arrival.at)) for arrival in load]
    wall = speed.wall
    return [Timing(wall(t.arrived), wall(t.first), wall(t.last), t.output) for t in simulated(moved, hardware, limits)]


def requests_per_second(law: Law, lengths: Lengths, batch: int) -> float:
    """lambda(B) = B / (D * t(B)): what a full batch finishes."""
    output = statistics.mean(o for _, o in lengths.pairs)
    held = sum(o * (p + o / 2) for p, o in lengths.pairs) / sum(o for _, o in lengths.pairs)
    work = Workload(held, statistics.mean(p for p, _ in lengths.pairs) / output)
    return batch / (output * step_seconds(law, work, batch))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0, help="length of overload (default: %(default)s)")
    parser.add_argument(
        "--fit-seconds", type=float, default=5.0, help="per level, mix and round of the fit (default: %(default)s)"
    )
    parser.add_argument("--batch-size", type=int, default=16, help="of the server (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--judge", choices=(OWN, REFERENCE), default=REFERENCE, help="default: %(default)s")
    parser.add_argument("--measured", type=Path, help="folder of recorded runs")
    parser.add_argument("--only", choices=("runtime", "measured"), help="one of the two parts")
    options = parser.parse_args()
    good = True
    if options.measured is not None and options.only != "runtime":
        good &= check_measured(options.measured)
    if options.only != "measured":
        good &= check_runtime(options)
    print("all within their bars" if good else "some figures are outside their bars")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
