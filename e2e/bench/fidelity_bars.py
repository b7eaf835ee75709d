"""What `simulator_fidelity` compares of a real run and of the simulated one, and how far off each may be."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from busload_operator.simulate.hardware import Hardware
from busload_operator.simulate.policy import Static
from busload_operator.simulate.run import Setup, simulate
from busload_operator.simulate.workload import Arrival
from busload_operator.tuning import Bounds, Objectives, Range
from busload_runtime.contract import Limits

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
        Timing(job.arrival.at, job.first + job.front_end, job.last + job.front_end, job.output)
        for job in jobs
        if job.first is not None and job.last is not None
    ]
