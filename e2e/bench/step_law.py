"""Does the tuner's fit hold? Step times and capacity that it predicts, against what was measured after the fit.

    python -m e2e.bench.step_law                    # simulated pods, then this runtime on this machine: 13 minutes
    python -m e2e.bench.step_law --only simulated   # seconds

The law is fitted as the tuner fits it, from counters scraped every second and, of the same run, every 15 seconds, while
the batch goes through some sizes. Then come sizes between them that the fit has not seen, and more requests than fit:

- step time: busy seconds per step of each unseen size, against the law at that size's batch, KV tokens and prompts;
- capacity: tokens per second of a full batch with requests waiting, against the law's B / t(B).

Bar: both within 10%. Nothing else may run on the machine while the runtime is measured; its engine leaves a core to
HTTP and to the client. All sizes, fitted and unseen, come in four rounds: a shared machine is a quarter faster in one
ten seconds than in the next, which no law can know.
"""

import argparse
import asyncio
import math
import random
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from prometheus_client.parser import text_string_to_metric_families

from busload_operator.simulate.hardware import HARDWARE, Hardware
from busload_operator.simulate.policy import Action
from busload_operator.simulate.run import Setup, simulate
from busload_operator.simulate.workload import Lengths, flat
from busload_operator.tuning import Bounds, Inputs, Law, Objectives, PodSample, Range, counters_from_samples
from busload_operator.tuning.fit import Fit, Workload, add, solve, tokens_per_second
from busload_operator.tuning.window import Base, PodWindow, read
from busload_runtime.bench.client import Client, Request, Target
from busload_runtime.bench.loops import Ending, closed_loop
from busload_runtime.bench.outcome import Outcome
from busload_runtime.bench.prompts import PromptMaker
from e2e.bench.server import BusloadServer, serve, spare_one_core

SCRAPES = (1.0, 15.0)
"""Seconds between two scrapes."""
BAR = 0.10
_SERVED = Lengths.lognormal(150, 40, longest=512)


@dataclass(frozen=True, slots=True)
class Run:
    """Samples of one pod, a second apart."""

    fitted: Sequence[Sequence[PodSample]]
    """One load each, of the sizes that are fitted."""
    unseen: Mapping[str, Sequence[Sequence[PodSample]]]
    """By size, each between those; one load each."""
    full: Sequence[Sequence[PodSample]]
    """While requests waited throughout."""


@dataclass(frozen=True, slots=True)
class Check:
    """A figure that the law predicts and that was measured."""

    name: str
    predicted: float
    measured: float
    unit: str

    @property
    def off(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def within(self) -> bool:
        return abs(self.off) <= BAR


def windows(samples: Sequence[PodSample], every: float) -> list[PodWindow]:
    """What a scraper sees that looks so often."""
    found: list[PodWindow] = []
    base: Base | None = None
    for sample in samples:
        if base is not None and sample.at - base.at < every - 0.5:
            continue
        reading = read(base, sample, sample.at)
        base = reading.base
        if reading.window is not None:
            found.append(reading.window)
    return found


def fit_law(run: Run, every: float) -> Law | None:
    fit = Fit()
    for samples in run.fitted:
        for window in windows(samples, every):
            fit = add(fit, window)
    return solve(fit)


def checks(run: Run, law: Law) -> list[Check]:
    """The law against what it has not seen."""
    found = []
    for name, samples in run.unseen.items():
        seen = _whole(samples)
        measured = seen.busy_seconds / seen.steps
        predicted = law.a + law.b * seen.batch + (law.c * seen.kv_tokens + law.d * seen.prefill_tokens) / seen.steps
        found.append(Check(f"step time at a batch of {seen.batch:.1f}, {name}", 1e3 * predicted, 1e3 * measured, "ms"))
    seen = _whole(run.full)
    work = Workload(seen.kv_tokens / (seen.batch * seen.steps), seen.prefill_tokens / seen.generated_tokens)
    predicted = tokens_per_second(law, work, seen.batch)
    measured = seen.generated_tokens / seen.seconds
    found.append(Check(f"capacity at a batch of {seen.batch:.1f}", predicted, measured, "tokens/s"))
    return found


@dataclass(frozen=True, slots=True)
class _Seen:
    """Between the first and the last sample of each load, summed."""

    seconds: float
    busy_seconds: float
    steps: float
    batch: float
    kv_tokens: float
    """Sum over steps."""
    prefill_tokens: float
    generated_tokens: float


def _whole(loads: Sequence[Sequence[PodSample]]) -> _Seen:
    def of(name: str) -> float:
        ends = [(samples[0].counters, samples[-1].counters) for samples in loads]
        return math.fsum(getattr(last, name) - getattr(first, name) for first, last in ends)

    steps = of("steps")
    return _Seen(
        of("clock"),
        of("busy_seconds"),
        steps,
        of("step_batch") / steps,
        of("step_kv_tokens"),
        of("prefill_tokens"),
        of("generated_tokens"),
    )


def report(name: str, run: Run) -> bool:
    """Prints all figures; True when they are within the bar."""
    good = True
    for every in SCRAPES:
        law = fit_law(run, every)
        if law is None or not law.usable:
            why = "no window" if law is None else f"{law.samples} windows, error {law.error:.0%}"
            print(f"{name}, scraped every {every:g} s: no usable law ({why}); is the machine quiet?")
            good = False
            continue
        print(
            f"{name}, scraped every {every:g} s: {law.samples} windows, batches {law.batch_min:.1f} to "
            f"{law.batch_max:.1f}, error {law.error:.1%}: a {1e3 * law.a:.3f} ms, b {1e3 * law.b:.4f} ms, "
            f"c {1e9 * law.c:.1f} ns, d {1e6 * law.d:.1f} us"
        )
        for check in checks(run, law):
            good &= check.within
            verdict = "ok" if check.within else "MISSED"
            figures = f"predicted {check.predicted:8.2f}  measured {check.measured:8.2f} {check.unit}"
            print(f"  {check.name:<38} {figures}  {check.off:+6.1%}  {verdict}")
    return good


# Simulated pods.

FITTED_SHARES = (0.15, 0.35, 0.55, 0.7, 0.8)
UNSEEN_SHARES = (0.25, 0.45, 0.65)
"""Of the rate at which a full batch would be busy all the time."""
_PIECE_SECONDS = 75.0


class _Recorder:
    """Changes nothing and keeps what pods said."""

    def __init__(self) -> None:
        self.samples: list[PodSample] = []

    def __call__(self, look: Inputs) -> Action:
        self.samples += look.pods
        return Action(look.limits, look.replicas)


def simulated(hardware: Hardware, lengths: Lengths = _SERVED, seed: int = 1) -> Run:
    """One pod under loads of one rate each; steps scatter as the hardware says."""
    limits, law = hardware.limits, hardware.law
    output = fmean(o for _, o in lengths.pairs)
    held = sum(o * (p + o / 2) for p, o in lengths.pairs) / sum(o for _, o in lengths.pairs)
    slope = law.b + law.c * held + law.d * fmean(p for p, _ in lengths.pairs) / output
    blocks = hardware.num_blocks(limits) * hardware.block_size
    batch = min(limits.batch_size, 0.8 * blocks / held)
    limits = replace(limits, batch_size=int(batch), token_budget=max(limits.token_budget, int(batch)))
    most = batch / (output * (law.a + batch * slope))

    def load(share: float, part: int) -> list[PodSample]:
        arrivals = flat(share * most, _PIECE_SECONDS, lengths, seed=seed + part)
        size = Range(limits.batch_size, limits.batch_size)
        percent = Range(limits.kv_cache_percent, limits.kv_cache_percent)
        length = Range(limits.max_sequence_length, limits.max_sequence_length)
        bounds = Bounds(length, percent, size, limits.batch_size, Range(1, 1))
        recorder = _Recorder()
        objectives = Objectives(hardware.time_to_first_token, hardware.inter_token_latency)
        setup = Setup(hardware, limits, bounds, objectives, replicas=1, scrape=1.0, seed=seed + part)
        simulate(arrivals, setup, recorder)
        return [sample for sample in recorder.samples if 10.0 <= sample.at <= _PIECE_SECONDS]

    fitted = [load(share, part) for part, share in enumerate(FITTED_SHARES)]
    unseen = {f"{share:.0%} of the capacity": [load(share, 50 + part)] for part, share in enumerate(UNSEEN_SHARES)}
    return Run(fitted, unseen, [load(2.0, 99)])


# This runtime.

FITTED_LEVELS = (1, 3, 6, 10, 14)
UNSEEN_LEVELS = (2, 4, 8, 12)
_BATCH = 16
_ROUNDS = 4


def measured(fit_seconds: float, unseen_seconds: float) -> Run:
    """A server on this machine, with so many requests under way at once as each level says."""
    flags = [f"--batch-size={_BATCH}", "--max-sequence-length=1024", "--token-budget=512"]
    flags += ["--max-queued-requests=1000", "--max-queued-tokens=1000000"]
    fitted: list[Sequence[PodSample]] = []
    unseen: dict[str, list[Sequence[PodSample]]] = {f"{level} at once": [] for level in UNSEEN_LEVELS}
    full: list[Sequence[PodSample]] = []
    with serve(*flags, environment=spare_one_core()) as server:
        source = _requests(seed=99)
        for done in range(_ROUNDS):
            fitted += [_level(server, source, level, fit_seconds / _ROUNDS) for level in FITTED_LEVELS]
            for level, name in zip(UNSEEN_LEVELS, unseen, strict=True):
                unseen[name].append(_level(server, source, level, unseen_seconds / _ROUNDS))
            full.append(_level(server, source, 2 * _BATCH, unseen_seconds / _ROUNDS))
            print(f"round {done + 1} of {_ROUNDS}", file=sys.stderr, flush=True)
    return Run(fitted, unseen, full)


def _requests(seed: int) -> Iterator[Request]:
    maker, rng = PromptMaker(seed, words=False), random.Random(seed)
    while True:
        prompt, output = _SERVED.draw(rng)
        text, tokens = maker.make(rng, prompt)
        yield Request(text, tokens, output)


def _level(server: BusloadServer, source: Iterator[Request], level: int, seconds: float) -> list[PodSample]:
    """Samples, a second apart, of the time in which so many requests were under way."""
    samples: list[PodSample] = []
    stop = threading.Event()

    def scrape() -> None:
        while not stop.wait(1.0):
            samples.append(_sample(server))

    thread = threading.Thread(target=scrape, daemon=True)
    thread.start()
    try:
        asyncio.run(_closed(server, source, level, seconds))
    finally:
        stop.set()
        thread.join()
    # While the level fills, and when the last ones end, it is not this level.
    return [s for s in samples[2:] if s.at <= samples[0].at + seconds - 2.0]


def _sample(server: BusloadServer) -> PodSample:
    text = urllib.request.urlopen(server.url.removesuffix("/v1") + "/metrics", timeout=5).read().decode()
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return PodSample("server", time.monotonic(), counters_from_samples(sums), True)


async def _closed(server: BusloadServer, source: Iterator[Request], level: int, seconds: float) -> None:
    client = Client(Target(server.url, server.model))
    outcomes: list[Outcome] = []
    try:
        await closed_loop(client, source, level, seconds, Ending(), outcomes)
    finally:
        await client.close()
    if bad := [outcome for outcome in outcomes if not outcome.ok]:
        raise SystemExit(f"{len(bad)} of {len(outcomes)} requests failed, first: {bad[0].error}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("simulated", "runtime"), help="one of the two parts")
    parser.add_argument("--fit-seconds", type=float, default=84.0, help="per fitted level (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=40.0, help="per unseen level (default: %(default)s)")
    options = parser.parse_args()
    good = True
    if options.only != "runtime":
        for name, hardware in HARDWARE.items():
            good &= report(f"simulated, {name}", simulated(hardware))
    if options.only != "simulated":
        good &= report("this runtime", measured(options.fit_seconds, options.seconds))
    print("all within 10%" if good else "some figures are outside 10%")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
