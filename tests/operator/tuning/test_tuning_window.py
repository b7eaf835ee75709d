from dataclasses import fields, replace

import pytest

from busload_operator.tuning import Counters, PodSample
from busload_operator.tuning.window import Base, read, view

ZERO = Counters(**{f.name: 0.0 for f in fields(Counters) if f.name != "sequence_lengths"})
START = replace(
    ZERO, clock=50.0, kv_blocks=100.0, kv_blocks_free=90.0, kv_block_size=16.0, generation=2.0, batch_size=4.0
)
NEXT = replace(
    START,
    clock=52.0,
    steps=40.0,
    busy_seconds=1.9,
    step_batch=156.0,
    step_kv_tokens=12_000.0,
    prefill_tokens=32.0,
    generated_tokens=157.0,
    batch_seconds=7.8,
    queue_seconds=56.0,
    kv_token_seconds=600.0,
    itl_sum=7.5,
    itl_count=150.0,
    running=4.0,
    waiting=28.0,
    kv_blocks_free=60.0,
)
BASE = Base(100.0, START)


def sample(counters: Counters | None, at: float = 102.0) -> PodSample:
    return PodSample("chat-1", at, counters, ready=True)


def test_differences_are_on_the_engine_clock() -> None:
    # The scrape came 0.4 s late, the engine says 2 s: the mean must be over 2 s.
    window = read(BASE, sample(NEXT, 102.4), 102.4).window
    assert window is not None
    assert window.seconds == 2.0
    assert window.batch == pytest.approx(3.9)
    assert window.queue == pytest.approx(28.0)
    assert window.kv_used == pytest.approx(0.4)
    assert window.at_limit
    assert not window.waiting_throughout


def test_first_scrape_gives_a_base_and_no_complaint() -> None:
    reading = read(None, sample(START), 102.0)
    assert (reading.window, reading.problem) == (None, None)
    assert reading.base == Base(102.0, START)


@pytest.mark.parametrize(
    ("counters", "says"),
    [
        (None, "no usable answer"),
        (replace(NEXT, steps=float("nan")), "busload_engine_steps_total is nan"),
        (replace(NEXT, queue_seconds=float("inf")), "busload_queue_seconds_total is inf"),
        (replace(NEXT, waiting=-1.0), "vllm:num_requests_waiting is -1"),
        (replace(NEXT, kv_blocks_free=101.0), "101 KV blocks are free of 100"),
        (replace(NEXT, batch_size=0.0), "busload_limit_batch_size is 0"),
        (replace(NEXT, sequence_lengths=(2.0, 1.0)), "busload_sequence_length_tokens counts fewer"),
        (replace(NEXT, sequence_lengths=(0.0, float("nan"))), "busload_sequence_length_tokens counts fewer"),
        (replace(NEXT, clock=50.0), "engine clock stands"),
    ],
)
def test_bad_samples_are_named_and_the_old_base_is_kept(counters: Counters | None, says: str) -> None:
    reading = read(BASE, sample(counters), 102.0)
    assert reading.window is None
    assert says in (reading.problem or "")
    assert reading.base == BASE


@pytest.mark.parametrize(
    ("counters", "says"),
    [
        (replace(NEXT, clock=3.0, steps=1.0), "engine restarted"),
        (replace(NEXT, clock=90.0), "clock moved 40.0 s in 2.0 s"),
        (replace(NEXT, busy_seconds=30.0), "30.0 busy seconds in 2.0 s"),
        (replace(NEXT, batch_seconds=80.0), "40.0 running requests at a limit of 4"),
        (replace(NEXT, generated_tokens=9999.0), "9999 tokens from 156 decodes"),
    ],
)
def test_resets_and_lies_skip_one_window(counters: Counters, says: str) -> None:
    reading = read(BASE, sample(counters), 102.0)
    assert reading.window is None
    assert says in (reading.problem or "")
    assert reading.base == Base(102.0, counters)


def test_no_step_while_work_waits_is_stuck_but_an_idle_engine_is_not() -> None:
    busy = replace(START, running=1.0)
    assert "no step finished" in (read(Base(100.0, busy), sample(replace(busy, clock=52.0)), 102.0).problem or "")
    idle = read(BASE, sample(replace(START, clock=52.0)), 102.0)
    assert idle.window is not None
    assert idle.window.batch == 0


def test_a_stuck_spell_is_bridged_by_the_next_good_window() -> None:
    stuck = read(BASE, sample(replace(START, clock=50.0)), 102.0)
    later = read(stuck.base, sample(replace(NEXT, clock=54.0), 104.0), 104.0)
    assert later.window is not None
    assert later.window.seconds == 4.0


def test_old_samples_and_long_gaps_say_nothing_about_now() -> None:
    assert "20 s old" in (read(BASE, sample(NEXT, 102.0), 122.0).problem or "")
    gap = read(BASE, sample(replace(NEXT, clock=150.0), 200.0), 200.0)
    assert gap.window is None
    assert "100 s" in (gap.problem or "")
    assert gap.base is not None
    assert gap.base.at == 200.0


def test_the_same_scrape_twice_counts_once() -> None:
    reading = read(Base(102.0, NEXT), sample(NEXT), 103.0)
    assert reading.window is None
    assert reading.problem == "no scrape since the last look"


def test_means_weigh_windows_by_time_and_sum_over_pods() -> None:
    one = read(BASE, sample(NEXT), 102.0).window
    assert one is not None
    long = replace(one, pod="chat-2", seconds=6.0, batch_seconds=6.0, queue_seconds=0.0, generated_tokens=60.0)
    both = view([one, replace(one, seconds=6.0, batch_seconds=0.2, start=102.0, end=108.0), long])
    assert both is not None
    assert both.pods == 2
    # chat-1: (7.8 + 0.2) / 8 = 1; chat-2: 6 / 6 = 1.
    assert both.batch == pytest.approx(1.0)
    # Rates add up: (157 + 157) / 8 + 60 / 6.
    assert both.tokens_per_second == pytest.approx(314 / 8 + 10)
    assert both.queue == pytest.approx(112 / 8)
    assert view([]) is None


def test_full_is_said_of_the_pods_that_hold_the_queue() -> None:
    full = read(BASE, sample(NEXT), 102.0).window
    assert full is not None
    empty = replace(full, pod="chat-2", batch_seconds=0.1, queue_seconds=0.0)
    seen = view([full, empty])
    assert seen is not None
    assert seen.full
    assert seen.batch < 0.9 * seen.batch_limit


def test_a_burst_that_begins_in_the_window_still_fills_the_places() -> None:
    # Seen on a slow machine: the burst came half way through the window, and its first steps were all prompts.
    began = replace(NEXT, batch_seconds=2.4, queue_seconds=12.0)
    first = read(BASE, sample(began), 102.0).window
    assert first is not None
    assert first.batch == pytest.approx(1.2)
    assert first.full
    assert not replace(first, running=2.0).full
    # Later a queue beside free places is something else.
    assert not replace(first, waiting_throughout=True).full
    later = replace(first, start=102.0, end=104.0, batch_seconds=8.0, queue_seconds=56.0, waiting_throughout=True)
    together = view([first, later])
    assert together is not None
    assert together.full
    beside = view([replace(first, running=2.0), replace(later, batch_seconds=2.0)])
    assert beside is not None
    assert not beside.full
