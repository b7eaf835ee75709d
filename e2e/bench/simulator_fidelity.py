"""Is the simulator believed? The same requests through a real server and through `busload simulate`'s pods.

    python -m e2e.bench.simulator_fidelity                     # this runtime on this machine, about 15 minutes
    python -m e2e.bench.simulator_fidelity --measured FOLDER   # also a vLLM run that was recorded elsewhere

- runtime: the step law is fitted from the server's own counters under closed loops of three other mixes; then three
  open loads (light, knee, overload) of two length mixes, none of which the fit has seen, are served and simulated.
- measured: files NAME_requests.jsonl, NAME_timeseries.csv, NAME_meta.json of LLMServingSim's examples; the law comes
  from the run's own gauges, one a second.

Bars: means within 10% and 95th percentiles within 20% of the real run, peak batch within 5%; measured: means within
12%.
Nothing else may run on the machine: a step that is slowed down by a neighbour is not what the law describes. For
the same reason the engine leaves a core to HTTP and to the client. A law that fits its own windows worse than 15% is
not compared with anything (exit code 2).

A shared machine is a quarter faster in one ten seconds than in the next, and a queue near its limit shows that many
times over. So the speed that it had during a load is taken from that load's counters (busy seconds against what the law
says for those steps, over five seconds), and the load is simulated at that speed: a, b, c and d are from the other
mixes alone. Such a speed also takes up what the law itself misses at that load's batch and mix: scheduling, queues and
HTTP are judged, not the law. With `--steady` the speed is taken to be that of the fit, and the law is judged too.

A lighter load lasts longer, so that as many requests come: of few, a percentile is one of three.
"""

import argparse
import asyncio
import csv
import json
import random
import statistics
import sys
import threading
import time
import urllib.request
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from busload_operator.simulate.hardware import HARDWARE, Hardware
from busload_operator.simulate.policy import Static
from busload_operator.simulate.run import Setup, simulate
from busload_operator.simulate.workload import Arrival, Lengths, flat
from busload_operator.tuning import Bounds, Law, Objectives, PodSample, Range, counters_from_samples
from busload_operator.tuning.fit import Fit, Workload, add, solve, step_seconds
from busload_operator.tuning.window import Base, PodWindow, read
from busload_runtime.bench.client import Client, Request, Target
from busload_runtime.bench.loops import Ending, closed_loop, open_loop
from busload_runtime.bench.outcome import Outcome
from busload_runtime.bench.prompts import PromptMaker
from busload_runtime.contract import Limits, StepLaw
from e2e.bench.server import BusloadServer, serve, spare_one_core

MIXES = {"chat": (100, 60), "long prompts": (400, 30)}
"""Medians of lognormal prompt and output lengths."""
FIT_MIXES = ((60, 80), (500, 20), (300, 200))
"""Three, since under one mix KV tokens and prompts grow with the batch alike, and no fit can tell them apart; under
long prompts with short answers the prompts hide what their KV tokens cost."""
LOADS = {"light": 0.3, "knee": 0.8, "overload": 1.5}
"""Shares of the capacity that the fitted law gives."""
_LONGEST = 1024
_FIT_LEVELS = (1, 2, 4, 8, 12, 16, 24)
_FIT_ROUNDS = 2
_SCRAPE_SECONDS = 1.0
_WORST_LAW = 0.15
"""Error of a law that describes nothing; the tuner does not use such a one either."""
_OBJECTIVES = Objectives(1.0, 1.0)  # nothing here is judged by objectives


@dataclass(frozen=True, slots=True)
class Timing:
    """One answered request; seconds from the start of the load."""

    arrived: float
    first: float
    last: float
    output: int


@dataclass(frozen=True, slots=True)
class Bar:
    """How far a simulated figure may be from the real one, as a share of it."""

    figure: str
    allowed: float
    of: Callable[[Sequence[Timing]], float]


def _mean(of: Callable[[Timing], float]) -> Callable[[Sequence[Timing]], float]:
    return lambda timings: statistics.mean(map(of, timings))


def _p95(of: Callable[[Timing], float]) -> Callable[[Sequence[Timing]], float]:
    return lambda timings: sorted(map(of, timings))[max(0, -(-len(timings) * 95 // 100) - 1)]


def _ttft(timing: Timing) -> float:
    return timing.first - timing.arrived


def _gap(timing: Timing) -> float:
    return (timing.last - timing.first) / max(1, timing.output - 1)


def _whole(timing: Timing) -> float:
    return timing.last - timing.arrived


def _makespan(timings: Sequence[Timing]) -> float:
    return max(timing.last for timing in timings)


def _peak(timings: Sequence[Timing]) -> float:
    """Most requests between their first and last token at once."""
    changes = sorted([(t.first, 1) for t in timings] + [(t.last, -1) for t in timings])
    running = peak = 0
    for _, change in changes:
        running += change
        peak = max(peak, running)
    return peak


MEANS = (Bar("TTFT", 0.10, _mean(_ttft)), Bar("ITL", 0.10, _mean(_gap)), Bar("E2E", 0.10, _mean(_whole)))
BARS = (
    *MEANS,
    Bar("makespan", 0.10, _makespan),
    Bar("TTFT p95", 0.20, _p95(_ttft)),
    Bar("ITL p95", 0.20, _p95(_gap)),
    Bar("E2E p95", 0.20, _p95(_whole)),
    Bar("peak batch", 0.05, _peak),
)
MEASURED_BARS = tuple(replace(bar, allowed=0.12) for bar in (*MEANS, Bar("makespan", 0.12, _makespan)))


def compare(name: str, bars: Sequence[Bar], real: Sequence[Timing], simulated: Sequence[Timing]) -> bool:
    """Prints one line per figure; True when all are within their bars."""
    print(f"{name}: {len(real)} requests")
    good = True
    for bar in bars:
        there, here = bar.of(real), bar.of(simulated)
        off = here / there - 1 if there else 0.0
        within = abs(off) <= bar.allowed
        good = good and within
        verdict = "ok" if within else "MISSED"
        figures = f"real {there:9.4f}  simulated {here:9.4f}  {off:+7.1%}  of {bar.allowed:.0%}"
        print(f"  {bar.figure:<10}  {figures}  {verdict}")
    return good


def simulated(load: Sequence[Arrival], hardware: Hardware, limits: Limits) -> list[Timing]:
    bounds = Bounds(Range(16, limits.max_sequence_length), Range(1, 100), Range(1, limits.batch_size), 1, Range(1, 1))
    setup = Setup(hardware, limits, bounds, _OBJECTIVES, replicas=1, tail=1e6)
    jobs = simulate(load, setup, Static(1)).jobs
    assert not [job.failed for job in jobs if job.failed], "a request was refused or cut in the simulation alone"
    return [
        Timing(job.arrival.at, job.first, job.last, job.output)
        for job in jobs
        if job.first is not None and job.last is not None
    ]


# This runtime.


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
class Fitted:
    law: Law
    between: float
    """Seconds per busy second while requests run: the time between two steps belongs to a step here, as what clients
    wait for is the wall clock."""

    def predicted(self, w: PodWindow) -> float:
        law = self.law
        return law.a * w.steps + law.b * w.step_batch + law.c * w.step_kv_tokens + law.d * w.prefill_tokens


def fit_law(server: BusloadServer, levels: Sequence[int], seconds: float) -> Fitted:
    """The step law from the server's counters, of windows in which the engine never idled. All levels twice, so that a
    machine whose speed moves does not give each its own."""
    loads = [flat(1000.0, 60.0, Lengths.lognormal(*mix, longest=_LONGEST // 2), seed=99) for mix in FIT_MIXES]
    sources = [(request for _, request in requests(load, seed=99)) for load in loads]
    fit, busy, whole = Fit(), 0.0, 0.0
    for source, level in [(s, level) for _ in range(_FIT_ROUNDS) for s in sources for level in levels]:
        with scraped(server) as found:
            asyncio.run(_closed(server, source, level, seconds))
        for window in found.windows[1:-1]:
            if window.running > 0 and window.running_peak >= level / 2:
                fit = add(fit, replace(window, busy_seconds=window.seconds))
                busy, whole = busy + window.busy_seconds, whole + window.seconds
    law = solve(fit)
    assert law is not None, "no window under load"
    return Fitted(law, whole / busy)


class Speed:
    """How fast the machine was during a load: maps its seconds to those that the machine of the fit would need."""

    def __init__(self, fitted: Fitted, windows: Sequence[PodWindow], began: float) -> None:
        paces = []
        for i in range(len(windows)):
            around = windows[max(0, i - 2) : i + 3]
            expected = sum(map(fitted.predicted, around))
            paces.append(fitted.between * sum(w.busy_seconds for w in around) / expected if expected > 0 else 1.0)
        self.slowest, self.fastest = max(paces, default=1.0), min(paces, default=1.0)
        self._wall, self._machine = [0.0], [0.0]
        for window, pace in zip(windows, paces, strict=True):
            seconds = window.end - began - self._wall[-1]
            self._machine.append(self._machine[-1] + seconds / pace)
            self._wall.append(self._wall[-1] + seconds)
        self._last = paces[-1] if paces else 1.0

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
    good = True
    with serve(*flags, environment=spare_one_core()) as server:
        levels = [level for level in _FIT_LEVELS if level <= 1.5 * limits.batch_size]
        fitted = fit_law(server, levels, options.fit_seconds)
        law = fitted.law
        print(
            f"law: a {1e3 * law.a:.3f} ms, b {1e3 * law.b:.4f} ms, c {1e9 * law.c:.1f} ns, d {1e6 * law.d:.2f} us, "
            f"error {law.error:.1%} over {law.samples} windows"
        )
        if law.error > _WORST_LAW:
            print(
                f"nothing is compared: the law's error is over {_WORST_LAW:.0%}; is the machine quiet?", file=sys.stderr
            )
            sys.exit(2)
        with scraped(server) as found:
            pass
        assert found.samples is not None
        hardware = replace(
            HARDWARE["cpu"],
            law=StepLaw(law.a, law.b, law.c, law.d),
            kv_tokens=round(found.samples["busload_kv_blocks"] * found.samples["busload_kv_block_size_tokens"]),
            block_size=round(found.samples["busload_kv_block_size_tokens"]),
            noise=0.0,
            drift=0.0,
        )
        for mix, medians in MIXES.items():
            for load_name, share in LOADS.items():
                lengths = Lengths.lognormal(*medians, longest=_LONGEST // 2)
                rate = share * requests_per_second(law, lengths, limits.batch_size)
                seconds = options.seconds * LOADS["overload"] / share
                load = flat(rate, seconds, lengths, seed=options.seed)
                texts = zlib.crc32(f"{mix} {load_name} {options.seed}".encode())
                with scraped(server) as seen:
                    began = time.monotonic()
                    outcomes = asyncio.run(_open(server, requests(load, seed=texts)))
                if bad := [outcome for outcome in outcomes if not outcome.ok]:
                    print(f"{mix}, {load_name}: {len(bad)} requests failed, first: {bad[0].error}", file=sys.stderr)
                    return False
                real = [Timing(o.intended, o.chunks[0], o.chunks[-1], o.output_tokens) for o in outcomes]
                speed = Speed(fitted, [] if options.steady else seen.windows, began)
                here = at_speed(load, hardware, replace(limits, kv_cache_percent=100), speed)
                moved = f"steps took {speed.fastest:.2f} to {speed.slowest:.2f} times what they took in the fit"
                good &= compare(f"{mix}, {load_name} ({rate:.1f}/s), {moved}", BARS, real, here)
    return good


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


# Runs that were measured elsewhere.


def check_measured(folder: Path) -> bool:
    names = sorted(path.name.removesuffix("_requests.jsonl") for path in folder.glob("*_requests.jsonl"))
    if not names:
        raise SystemExit(f"--measured {folder}: there is no file NAME_requests.jsonl")
    good = [_check_measured(folder, name) for name in names]  # all of them, also after one that missed
    return all(good)


def _check_measured(folder: Path, name: str) -> bool:
    meta = json.loads((folder / f"{name}_meta.json").read_text())
    engine, cache = meta["engine_kwargs"], meta.get("kv_cache", {})
    with (folder / f"{name}_timeseries.csv").open(newline="") as file:
        gauges = [{key: float(value) for key, value in row.items()} for row in csv.DictReader(file)]
    recorded = [json.loads(line) for line in (folder / f"{name}_requests.jsonl").read_text().splitlines()]
    recorded.sort(key=lambda request: request["queued_ts"])
    start = recorded[0]["queued_ts"]
    # Without a size the run never came near its pool's end.
    kv_tokens = cache.get("num_kv_tokens") or 8 * sum(r["input_toks"] + r["output_toks"] for r in recorded)
    law = gauge_law(gauges, kv_tokens)
    longest = max(r["input_toks"] + r["output_toks"] for r in recorded) + 1
    limits = Limits(longest, engine["max_num_seqs"], 100, engine["max_num_batched_tokens"], 100_000, 2_000_000_000)
    hardware = replace(
        HARDWARE["tight"],
        law=StepLaw(law.a, law.b, law.c, law.d),
        kv_tokens=kv_tokens,
        block_size=cache.get("block_size", 16),
        noise=0.0,
        drift=0.0,
    )
    load = [Arrival(r["queued_ts"] - start, r["input_toks"], r["output_toks"]) for r in recorded]
    real = [
        Timing(r["queued_ts"] - start, r["first_token_ts"] - start, r["last_token_ts"] - start, r["output_toks"])
        for r in recorded
    ]
    return compare(f"{name} (law error {law.error:.0%})", MEASURED_BARS, real, simulated(load, hardware, limits))


def gauge_law(gauges: Sequence[dict[str, float]], kv_tokens: int) -> Law:
    """The law from gauges once a second: steps = generated tokens / running, the engine taken to be always busy."""
    fit = Fit()
    nothing = {field.name: 0.0 for field in fields(PodWindow)}
    for row in gauges:
        if row["running"] < 2 or row["gen_throughput"] <= 0:
            continue  # the mean of a second in which the run began or ended says little
        steps = row["gen_throughput"] / row["running"]
        values = {
            "seconds": 1.0,
            "busy_seconds": 1.0,
            "steps": steps,
            "step_batch": row["gen_throughput"],
            "step_kv_tokens": steps * row["kv_cache_pct"] / 100 * kv_tokens,
            "prefill_tokens": row["prompt_throughput"],
        }
        fit = add(fit, PodWindow(**(nothing | values | {"pod": "run", "waiting_throughout": True})))  # type: ignore[arg-type]
    law = solve(fit)
    if law is None:
        raise SystemExit("the time series has no second with at least two running requests")
    return law


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0, help="length of overload (default: %(default)s)")
    parser.add_argument(
        "--fit-seconds", type=float, default=5.0, help="per level, mix and round of the fit (default: %(default)s)"
    )
    parser.add_argument("--batch-size", type=int, default=16, help="of the server (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steady", action="store_true", help="the machine is taken to be as fast as in the fit")
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
