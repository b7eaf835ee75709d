"""Whole runs against closed forms, determinism, and what faults and scaling do to requests and cost."""

import json
import random
import statistics
from dataclasses import replace

import pytest
from simulate_helpers import BOUNDS, LIMITS, hardware, setup

from busload_operator.simulate.fleet import Fault, FaultKind, Router
from busload_operator.simulate.hardware import SetupError
from busload_operator.simulate.policy import Action, Static, Tuner
from busload_operator.simulate.report import as_json, summarise
from busload_operator.simulate.run import Outcome, Setup, simulate
from busload_operator.simulate.workload import Arrival, Lengths, flat
from busload_operator.tuning import Inputs, Range
from busload_runtime.contract import StepLaw


def poisson(rate: float, count: int, lengths: list[tuple[int, int]], seed: int = 1) -> list[Arrival]:
    source = random.Random(seed)
    now, load = 0.0, []
    for index in range(count):
        now += source.expovariate(rate)
        load.append(Arrival(now, *lengths[index % len(lengths)]))
    return load


def test_one_place_is_a_single_server_queue() -> None:
    """Batch limit 1, steps of constant time: waits by Lindley's recursion W' = max(0, W + S - A), one by one; and their
    mean near what Pollaczek and Khinchine say, lambda E[S^2] / (2 (1 - rho))."""
    step = 0.01
    source = random.Random(5)
    outputs = [(1, 1 + int(source.expovariate(1 / 19))) for _ in range(4007)]
    service = [step * output for _, output in outputs]
    rate = 0.6 / statistics.mean(service)
    load = poisson(rate, 8_000, outputs)
    outcome = simulate(load, setup(hardware(StepLaw(step, 0.0, 0.0, 0.0)), replace(LIMITS, batch_size=1)), Static(1))
    waits = [job.first - job.arrival.at - step for job in outcome.jobs if job.first is not None]
    expected, wait = [], 0.0
    for before, after in zip([load[0], *load], load, strict=False):
        wait = max(0.0, wait + (step * before.output if expected else 0.0) - (after.at - before.at))
        expected.append(wait)
    assert waits == pytest.approx(expected, abs=1e-6)
    mean = rate * statistics.mean(s * s for s in service) / (2 * (1 - 0.6))
    assert statistics.mean(waits) == pytest.approx(mean, rel=0.15)


def mean_in_batch(offered: float, law: StepLaw) -> float:
    """Mean number in a processor-sharing queue whose n requests each get a token every a + b*n seconds, `offered`
    tokens arriving per second: p(n) ~ product of offered * (a + b*i) / i (birth and death, insensitive to lengths)."""
    weights, weight = [], 1.0
    for n in range(1, 2000):
        weight *= offered * (law.a + law.b * n) / n
        weights.append(weight)
    return sum(n * w for n, w in enumerate(weights, 1)) / (1 + sum(weights))


@pytest.mark.parametrize("rho", [0.3, 0.6, 0.85])
def test_a_batch_is_a_processor_sharing_queue(rho: float) -> None:
    """Little: the mean gap between tokens is the mean batch over the tokens offered per second."""
    law, output = StepLaw(0.01, 0.001, 0.0, 0.0), 150
    offered = rho / law.b
    load = poisson(offered / output, 2500, [(1, output)])
    outcome = simulate(load, setup(hardware(law), replace(LIMITS, batch_size=512, token_budget=512)), Static(1))
    gaps = [job.time_per_output_token for job in outcome.jobs if 60 < job.arrival.at < load[-1].at - 30]
    # The fuller the queue, the longer it remembers chance: fewer independent samples.
    assert statistics.mean(gaps) == pytest.approx(mean_in_batch(offered, law) / offered, rel=0.1 * rho)


def outcome_text(seed: int, policy_seed_load: int = 3) -> str:
    load = flat(6.0, 300, Lengths.lognormal(200, 60), seed=policy_seed_load)
    machine = hardware(noise=0.15)
    outcome = simulate(load, setup(machine, replicas=2, seed=seed), Tuner())
    jobs = [(job.pod, job.first, job.last, job.output, job.failed) for job in outcome.jobs]
    return json.dumps([as_json(summarise("tuner", outcome), outcome), jobs])


def test_equal_seeds_give_equal_outcomes_and_others_do_not() -> None:
    assert outcome_text(1) == outcome_text(1)
    assert outcome_text(1) != outcome_text(2)


def test_progress_ends_at_one_and_never_goes_back() -> None:
    told: list[float] = []
    simulate(flat(2.0, 100, Lengths(((10, 10),)), 1), setup(), Static(1), told.append)
    assert told == sorted(told)
    assert told[-1] == 1.0


class Steps:
    """Replicas by time."""

    def __init__(self, *steps: tuple[float, int]) -> None:
        self._steps = steps

    def __call__(self, look: Inputs) -> Action:
        return Action(look.limits, [n for at, n in self._steps if look.now >= at][-1])


def test_a_new_pod_costs_from_the_start_and_serves_when_ready() -> None:
    load = [Arrival(t / 10, 10, 5) for t in range(1200)]
    outcome = simulate(load, setup(scrape=1.0), Steps((0, 1), (20, 2)))
    second = [job.arrival.at for job in outcome.jobs if job.pod == "pod-2"]
    assert min(second) == pytest.approx(50.0, abs=0.2)
    assert outcome.replica_seconds == pytest.approx(119.9 + (119.9 - 20))
    assert outcome.replica_changes == [(20.0, 1, 2)]


def test_a_leaving_pod_finishes_what_it_runs_and_costs_until_then() -> None:
    load = [Arrival(0.0, 10, 1000), Arrival(0.01, 10, 1000), *(Arrival(5.0 + t, 10, 2) for t in range(60))]
    outcome = simulate(load, setup(replicas=2, scrape=1.0), Steps((0, 2), (3, 1)))
    assert not [job.failed for job in outcome.jobs if job.failed]
    pods = {job.pod: job for job in outcome.jobs[:2]}
    assert pods.keys() == {"pod-1", "pod-2"}
    left = next(name for name in pods if name not in {job.pod for job in outcome.jobs[2:]})
    ended = pods[left].last
    assert ended is not None
    assert outcome.replica_seconds == pytest.approx(64.0 + ended, abs=0.01)


def test_pods_that_are_not_ready_leave_first() -> None:
    load = [Arrival(float(t), 10, 5) for t in range(60)]
    outcome = simulate(load, setup(scrape=1.0), Steps((0, 1), (5, 3), (10, 1)))
    assert {job.pod for job in outcome.jobs} == {"pod-1"}
    assert outcome.replica_seconds == pytest.approx(59.0 + 2 * 5.0)


@pytest.mark.parametrize("router", list(Router))
def test_routers_share_the_work(router: Router) -> None:
    load = flat(20.0, 120, Lengths.lognormal(100, 40), 1)
    outcome = simulate(load, setup(replicas=4, router=router), Static(4))
    shares = [sum(job.pod == f"pod-{i}" for job in outcome.jobs) / len(load) for i in range(1, 5)]
    assert all(share == pytest.approx(0.25, abs=0.05) for share in shares)


def test_least_tokens_avoids_the_pod_with_the_long_prompt() -> None:
    load = [Arrival(0.0, 2000, 40), *(Arrival(0.01 + 0.001 * i, 10, 40) for i in range(10))]
    outcome = simulate(load, setup(replicas=2, router=Router.LEAST_TOKENS), Static(2))
    assert [job.pod for job in outcome.jobs[1:]] == ["pod-2"] * 10


def test_a_restart_loses_requests_and_the_pod_comes_back() -> None:
    load = [Arrival(0.2 * t, 10, 100) for t in range(600)]
    fault = Fault(FaultKind.RESTART, 0, 20.0, 0.0)
    outcome = simulate(load, setup(replicas=2, faults=(fault,)), Static(2))
    lost = [job for job in outcome.jobs if job.failed]
    assert lost
    assert {job.failed for job in lost} == {"pod_lost"}
    assert all(job.arrival.at <= 20.0 for job in lost)
    served = [job.arrival.at for job in outcome.jobs if job.pod == "pod-1"]
    assert not [at for at in served if 20.0 < at < 50.0]
    assert [at for at in served if at >= 50.0]


def test_without_a_ready_pod_requests_fail_at_once() -> None:
    load = [Arrival(float(t), 10, 10) for t in range(60)]
    outcome = simulate(load, setup(faults=(Fault(FaultKind.RESTART, 0, 10.5, 0.0),)), Static(1))
    failed = {job.failed: job.arrival.at for job in reversed(outcome.jobs) if job.failed}
    assert failed == {"no_pod": 11.0}
    assert [job.arrival.at for job in outcome.jobs if job.pod][11:] == [float(t) for t in range(41, 60)]


class Watch:
    """Keeps what it is shown."""

    def __init__(self) -> None:
        self.looks: list[Inputs] = []

    def __call__(self, look: Inputs) -> Action:
        self.looks.append(look)
        return Action(look.limits, look.replicas)


def watch(kind: FaultKind, **changes: float) -> list[Inputs]:
    load = [Arrival(0.5 * t, 20, 20) for t in range(240)]
    watcher = Watch()
    simulate(load, setup(replicas=2, faults=(Fault(kind, 1, 30.0, 40.0),), **changes), watcher)
    return watcher.looks


def test_a_silent_pod_gives_no_counters_for_its_time() -> None:
    silent = [look.now for look in watch(FaultKind.SILENT) if look.pods[1].counters is None]
    assert silent == [30.0 + 5 * i for i in range(8)]


def test_a_frozen_pod_shows_old_counters_and_a_reset_one_falls_back() -> None:
    frozen = {look.now: look.pods[1].counters for look in watch(FaultKind.FROZEN)}
    assert frozen[35.0] == frozen[65.0] != frozen[75.0]
    reset = {look.now: look.pods[1].counters for look in watch(FaultKind.RESET)}
    before, after = reset[25.0], reset[35.0]
    assert before is not None
    assert after is not None
    assert 0 < after.steps < before.steps
    assert after.clock == pytest.approx(before.clock + 10, abs=0.5)


def test_the_scrape_delay_ages_samples() -> None:
    assert {round(look.now - look.pods[0].at, 6) for look in watch(FaultKind.SILENT, scrape_delay=0.7)} == {0.7}


def test_the_tuner_changes_nothing_while_most_pods_are_silent() -> None:
    """Overload from the start, but nobody speaks until 60 s."""
    load = [Arrival(0.05 * t, 100, 60) for t in range(3000)]
    faults = tuple(Fault(FaultKind.SILENT, pod, 0.0, 60.0) for pod in range(2))
    tuner = Tuner()
    simulate(load, setup(replicas=2, limits=replace(LIMITS, batch_size=2), faults=faults), tuner)
    assert tuner.decisions
    assert min(decision.at for decision in tuner.decisions) > 60.0


def test_settings_before_replicas_in_the_loop() -> None:
    """A batch limit of 2 on a load that 20 places carry easily: the tuner raises the limit, and most requests meet the
    objectives afterwards."""
    load = flat(4.0, 600, Lengths(((100, 100),)), 1)
    tuner = Tuner()
    outcome = simulate(load, setup(limits=replace(LIMITS, batch_size=2)), tuner)
    assert tuner.decisions[0].knob == "batchSize"
    assert outcome.limits_changes[0][2].batch_size > 2
    late = [job for job in outcome.jobs if job.arrival.at > 300]
    inside = [job for job in late if job.time_to_first_token is not None and job.time_to_first_token <= 1.0]
    assert len(inside) >= 0.99 * len(late)


def test_limits_reach_the_pods_after_the_delay() -> None:
    class Once(Watch):
        def __call__(self, look: Inputs) -> Action:
            super().__call__(look)
            return Action(replace(look.limits, batch_size=8), look.replicas)

    once = Once()
    load = [Arrival(float(t), 10, 10) for t in range(30)]
    outcome = simulate(load, setup(scrape=1.0, apply_delay=2.5), once)
    assert [(at, new.batch_size) for at, _, new in outcome.limits_changes] == [(1.0, 8)]
    shown = [look.pods[0].counters.batch_size for look in once.looks if look.pods[0].counters is not None]
    assert shown[:5] == [16, 16, 16, 8, 8]


def check_refused(text: str, load: list[Arrival] | None = None, **changes: object) -> None:
    with pytest.raises(SetupError, match=text):
        simulate([Arrival(0.0, 1, 1)] if load is None else load, setup(**changes), Static(1))  # type: ignore[arg-type]


def test_what_cannot_be_run_is_refused() -> None:
    check_refused("no requests", [])
    check_refused("sorted by time", [Arrival(2.0, 1, 1), Arrival(1.0, 1, 1)])
    check_refused("start at 0 or later", [Arrival(-1.0, 1, 1)])
    check_refused("scrape: 0.0 must be", scrape=0.0)
    check_refused("startup: nan must be", startup=float("nan"))
    check_refused("replicas: 9 is outside the bounds 1 to 8", replicas=9)
    check_refused("holds 384, less than one sequence", machine=hardware(kv_tokens=440))


@pytest.mark.parametrize(
    "text", ["", "silent", "silent:0", "silent:x@1", "melted:0@1+2", "silent:0@-1+2", "silent:-1@1+2"]
)
def test_faults_that_cannot_be_read_are_told(text: str) -> None:
    with pytest.raises(SetupError, match="fault"):
        Fault.parse(text)


def test_a_fault_is_read() -> None:
    assert Fault.parse("silent:1@600+120.5") == Fault(FaultKind.SILENT, 1, 600.0, 120.5)


def test_unfinished_requests_are_told() -> None:
    outcome: Outcome = simulate([Arrival(0.0, 10, 2000)], setup(tail=5.0), Static(1))
    assert [job.failed for job in outcome.jobs] == ["unfinished"]


def test_bounds_hold_whatever_a_policy_says() -> None:
    limited: Setup = setup(bounds=replace(BOUNDS, replicas=Range(1, 3)))
    outcome = simulate([Arrival(float(t), 1, 1) for t in range(30)], limited, Static(50))
    assert outcome.replica_changes == [(5.0, 1, 3)]
