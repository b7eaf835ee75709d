"""A pod of the simulator: skipping ahead changes nothing, nothing is lost, and the counters say what happened."""

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings

from busload_operator.simulate.hardware import HARDWARE, Hardware, SetupError
from busload_operator.simulate.replica import Job, Replica
from busload_operator.simulate.workload import Arrival
from busload_operator.tuning.counters import CUMULATIVE
from busload_runtime.contract import Limits, Pace, StepLaw
from busload_runtime.engine.scheduler import Scheduler

SMALL = Limits(400, 4, 100, 64, 1000, 1_000_000)
LAW = StepLaw(a=0.01, b=0.001, c=1e-5, d=2e-4)


def hardware(kv_tokens: int = 1600, noise: float = 0.15, law: StepLaw = LAW) -> Hardware:
    drift = 0.04 if noise else 0.0
    return replace(HARDWARE["cpu"], law=law, kv_tokens=kv_tokens, limits=SMALL, noise=noise, drift=drift, block_size=16)


def pod(machine: Hardware, limits: Limits = SMALL, pace: Pace = Pace()) -> Replica:
    return Replica("pod-1", machine, limits, 1, 0.0, 0.0, 3, pace)


arrivals = st.lists(
    st.builds(
        lambda gap, prompt, output, shared: (gap, prompt, output, shared),
        st.floats(0, 0.6),
        st.integers(1, 120),
        st.integers(1, 90),
        st.booleans(),
    ),
    min_size=1,
    max_size=14,
)


def drive(
    replica: Replica, load: list[tuple[float, int, int, bool]], changes: dict[int, Limits], scrape: float
) -> list[object]:
    """Submits the load with scrapes in between; everything anybody could see, in order."""
    seen: list[object] = []
    now, due = 0.0, scrape
    jobs = []
    for index, (gap, prompt, output, shared) in enumerate(load):
        now += gap
        while due <= now:
            seen.append(replica.counters(due))
            due += scrape
        if index in changes:
            replica.apply(changes[index], index + 2, now)
        job = Job(index, Arrival(now, prompt, output, (1,) if shared else ()))
        replica.submit(job, now)
        jobs.append(job)
        seen.append((replica.requests, replica.outstanding_tokens(now)))
    while replica.requests:
        seen.append(replica.counters(due))
        due += scrape
    seen.append(replica.counters(due + 100))
    seen += [(job.failed, job.first, job.last, job.output) for job in jobs]
    return seen


def test_time_outside_the_engine_is_part_of_the_first_token_and_of_no_gap() -> None:
    seen = []
    for front_end in (0.0, 0.25):
        machine = replace(hardware(noise=0.0), front_end=front_end)
        replica = pod(machine, pace=Pace(time_to_first_token=0.2))
        job = Job(1, Arrival(0.0, 40, 10))
        replica.submit(job, 0.0)
        replica.advance(100.0)
        seen.append((job, replica.counters(100.0)))
    (bare, counted), (late, counted_late) = seen
    assert bare.time_to_first_token == pytest.approx(LAW.seconds(0, 40, 40))
    assert late.time_to_first_token == pytest.approx(0.25 + LAW.seconds(0, 40, 40))
    assert late.time_per_output_token == bare.time_per_output_token
    assert counted_late.ttft_sum == pytest.approx(late.time_to_first_token)
    assert (counted.ttft_missed, counted_late.ttft_missed) == (0, 1)
    assert counted_late.itl_sum == counted.itl_sum


@settings(max_examples=120, deadline=None)
@given(
    load=arrivals,
    kv_tokens=st.integers(400, 1600),
    changes=st.dictionaries(
        st.integers(0, 13),
        st.builds(
            lambda batch, percent, budget: replace(
                SMALL, batch_size=batch, kv_cache_percent=percent, token_budget=budget, max_sequence_length=200
            ),
            st.integers(1, 8),
            st.integers(50, 100),
            st.integers(16, 128),
        ),
        max_size=3,
    ),
    scrape=st.floats(0.05, 3.0),
    noise=st.sampled_from([0.0, 0.15]),
    late_after=st.none() | st.floats(0.05, 20.0),
    token_gap=st.none() | st.floats(0.005, 0.1),
)
# A preempted request whose recomputation ended one token short: its next token is a plain decode, its gap is not.
@example([(0.0, 97, 81, False), (0.5, 25, 42, False), (0.0, 112, 34, False)], 400, {}, 1.0, 0.0, None, 1 / 64)
def test_skipping_ahead_equals_stepping_one_by_one(
    load: list[tuple[float, int, int, bool]],
    kv_tokens: int,
    changes: dict[int, Limits],
    scrape: float,
    noise: float,
    late_after: float | None,
    token_gap: float | None,
) -> None:
    machine = hardware(kv_tokens, noise)
    pace = Pace(late_after, token_gap, LAW)
    fast = drive(pod(machine, pace=pace), load, changes, scrape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "decode_steps", lambda self, most, now: 0)
        slow = drive(pod(machine, pace=pace), load, changes, scrape)
    assert fast == slow


@settings(max_examples=80, deadline=None)
@given(load=arrivals, kv_tokens=st.integers(400, 1600))
def test_tokens_and_blocks_are_conserved(load: list[tuple[float, int, int, bool]], kv_tokens: int) -> None:
    replica = pod(hardware(kv_tokens))
    drive(replica, load, {}, 1.0)
    counters = replica.counters(1000.0)
    done = replica.finished
    assert len(done) == len(load)
    assert counters.generated_tokens == sum(job.output for job in done) == counters.output_tokens_sum
    assert counters.arrived == counters.finished == counters.ttft_count == len(load)
    assert counters.itl_count == counters.generated_tokens - len(load)
    assert counters.kv_blocks_free == counters.kv_blocks
    assert (counters.running, counters.waiting) == (0, 0)
    gaps = sum(job.last - job.first for job in done if job.last is not None and job.first is not None)
    assert counters.itl_sum == pytest.approx(gaps)
    assert counters.ttft_sum == pytest.approx(sum(job.time_to_first_token or 0.0 for job in done))
    # Little's law, exactly: the time integrals of both queues are the time that requests were here.
    stayed = sum(job.last - job.arrival.at for job in done if job.last is not None)
    assert counters.batch_seconds + counters.queue_seconds == pytest.approx(stayed)


def test_objectives_are_judged_as_clients_feel_them() -> None:
    load = [(0.05, 100, 1 + 7 * (n % 4), False) for n in range(14)]
    replica = pod(hardware(), pace=Pace(0.1, 0.02, None))
    drive(replica, load, {}, 1.0)
    found, jobs = replica.counters(1000.0), replica.finished
    assert len(jobs) == len(load)
    gaps = [job.time_per_output_token for job in jobs if job.output > 1]
    late = [job for job in jobs if (job.time_to_first_token or 0.0) > 0.1]
    assert (found.ttft_judged, found.ttft_missed) == (len(jobs), len(late))
    assert (found.itl_judged, found.itl_missed) == (len(gaps), sum(gap > 0.02 for gap in gaps))
    assert 0 < found.ttft_missed < found.ttft_judged
    assert 0 < found.itl_missed <= found.itl_judged < len(jobs)
    assert found.prompt_tokens_arrived == found.finished_prompt_tokens == 1400
    assert found.finished_kv_token_steps == sum(job.output * (100 + job.output / 2) for job in jobs)
    assert pod(hardware()).counters(1.0).ttft_judged == 0


def test_a_scrape_changes_nothing_that_follows() -> None:
    load = [(0.1, 50, 60, False)] * 8
    often, seldom = pod(hardware()), pod(hardware())
    last = [drive(often, load, {}, 0.013)[-8:], drive(seldom, load, {}, 50.0)[-8:]]
    assert last[0] == last[1]


def test_times_of_one_request_by_hand() -> None:
    machine = hardware(noise=0.0)
    replica = pod(machine)
    job = Job(0, Arrival(1.0, 100, 3))
    replica.submit(job, 1.0)
    replica.advance(100.0)
    # Two chunks of 64 and 36 tokens, then two decodes that read 101 and 102 tokens.
    first = 1.0 + (0.01 + 64e-5 + 64 * 2e-4) + (0.01 + 100e-5 + 36 * 2e-4)
    assert job.first == pytest.approx(first)
    assert job.last == pytest.approx(first + 2 * 0.011 + 203e-5)
    assert job.output == 3
    counters = replica.counters(200.0)
    assert (counters.steps, counters.step_batch, counters.prefill_tokens) == (4, 2, 100)
    assert counters.step_kv_tokens == 64 + 100 + 101 + 102
    assert counters.busy_seconds == pytest.approx(job.last - 1.0)
    assert counters.clock == 200.0


def test_an_arrival_during_a_step_is_seen_when_it_ends() -> None:
    replica = pod(hardware(noise=0.0))
    replica.submit(Job(0, Arrival(0.0, 64, 50)), 0.0)
    second = Job(1, Arrival(0.2, 64, 2))
    replica.submit(second, 0.2)
    before = replica.counters(0.2)
    assert (before.running, before.waiting, before.arrived) == (1, 0, 2)
    replica.advance(100.0)
    # The step that runs at 0.2 ends first, then the prompt is computed beside the decode.
    boundary = 0.0 + 0.01 + 64e-5 + 64 * 2e-4
    kv = 65
    while boundary <= 0.2:
        boundary += 0.01 + 0.001 + kv * 1e-5
        kv += 1
    first_step = 0.01 + 0.001 + (kv + 63) * 1e-5 + 63 * 2e-4
    second_step = 0.01 + 0.001 + (kv + 1 + 64) * 1e-5 + 1 * 2e-4
    assert second.first == pytest.approx(boundary + first_step + second_step)


def test_a_full_queue_and_a_long_prompt_are_refused() -> None:
    limits = replace(SMALL, batch_size=1, max_queued_requests=1)
    replica = pod(hardware(), limits)
    jobs = [Job(i, Arrival(0.0, 50, 50)) for i in range(3)] + [Job(3, Arrival(0.0, 400, 1))]
    for job in jobs:
        replica.submit(job, 0.0)
    assert [job.failed for job in jobs] == ["", "", "queue_full", "too_long"]
    assert replica.counters(0.0).arrived == 2


def test_an_answer_that_a_limit_cuts_short_is_told() -> None:
    replica = pod(hardware(), replace(SMALL, max_sequence_length=60))
    job = Job(0, Arrival(0.0, 50, 50))
    replica.submit(job, 0.0)
    replica.advance(100.0)
    assert (job.output, job.failed) == (10, "cut_short")


def test_a_restart_loses_requests_and_counts_from_zero() -> None:
    replica = pod(hardware())
    job = Job(0, Arrival(0.0, 50, 300))
    replica.submit(job, 0.0)
    assert replica.counters(1.0).steps > 0
    assert replica.restart(1.0, 21.0) == [job]
    assert job.failed == "pod_lost"
    assert replica.ready_at == 21.0
    fresh = replica.counters(22.0)
    assert all(getattr(fresh, name) == 0 for name in CUMULATIVE if name != "clock")


def test_limits_that_memory_cannot_hold_are_refused_and_change_nothing() -> None:
    replica = pod(hardware(1600))
    replica.apply(replace(SMALL, kv_cache_percent=20), 2, 1.0)
    counters = replica.counters(2.0)
    assert (counters.generation, counters.kv_cache_percent) == (1, 100)
    assert "kvCachePercent 20 of 1600 tokens holds 320" in replica.refused_limits
    with pytest.raises(SetupError, match="less than one sequence of maxSequenceLength 400"):
        pod(hardware(1600), replace(SMALL, kv_cache_percent=20))
