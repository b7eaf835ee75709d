"""maxSequenceLength by the observed tail: lowered where that frees what requests wait for, raised when it refuses."""

from dataclasses import replace
from random import Random

import pytest
from fluid_service import BOUNDS, LIMITS, Service, StepLaw

from busload_operator.tuning import Decision, Knob, Objectives, Range, Reason, Verdict
from busload_operator.tuning.tail import Tail
from busload_runtime.contract import SEQUENCE_LENGTHS

FIXED = {"kv_cache_percent": Range(20, 50), "replicas": Range(1, 1)}


def service(least: int = 512, most: int = 8192, now: int = 8192, blocks: int = 1300) -> Service:
    """Its KV cache is at the most that bounds allow."""
    return Service(
        law=StepLaw(a=0.04, b=0.001, d=0.0002),
        limits=replace(LIMITS, batch_size=64, max_sequence_length=now),
        bounds=replace(BOUNDS, **FIXED, max_sequence_length=Range(least, most)),
        objectives=Objectives(2.0, 0.5),
        noise=0.05,
        blocks=blocks,
    )


def load(s: Service, seconds: int, tail: float, clients: int = 80, longest: int = 2500) -> None:
    """So many clients, of whose requests a share is long."""
    draw = Random(3)
    for _ in range(seconds):
        for _ in range(max(0, clients - s.open_requests)):
            s.send(1, *((100, longest) if draw.random() < tail else (64, 40)))
        s.run(1)


def moved(s: Service) -> list[Decision]:
    return [d for d in s.decisions if d.knob is Knob.MAX_SEQUENCE_LENGTH]


def test_few_long_requests_that_hold_much_memory_are_kept_out() -> None:
    s = service()
    load(s, 1000, tail=0.008)
    (made,) = moved(s)
    assert (made.before, made.after, made.reason) == (8192, 512, Reason.WAIT_FROM_KV_CACHE)
    assert made.outcome.verdict is Verdict.CONFIRMED, made.outcome.message
    assert "requests were longer than 512 and would have been refused or cut off" in made.message
    assert s.limits.max_sequence_length == 512
    hold = s.results[-1][1].hold
    assert hold is not None
    assert "a lower limit was worth it a while ago" in hold, "it is not raised at once for those it turns away"


def test_the_floor_is_the_users() -> None:
    s = service(least=2048)
    load(s, 800, tail=0.008)
    assert all(d.after >= 2048 for d in moved(s))
    assert s.limits.max_sequence_length >= 2048


def test_without_long_requests_it_stays_and_says_why() -> None:
    s = service(blocks=600)
    load(s, 350, tail=0.0)
    assert not moved(s)
    said = [result.hold for _, result in s.results if result.hold and "maxSequenceLength stays" in result.hold]
    assert "requests were longer than 512" in said[-1]
    assert ": the KV cache is taken as requests grow, and 0 of the last" in said[-1]
    assert "so a lower limit would free no more than that" in said[-1]


def test_a_few_requests_tell_no_tail() -> None:
    s = service(blocks=300)
    load(s, 60, tail=0.0, clients=90)
    said = [result.hold for _, result in s.results if result.hold and "maxSequenceLength stays" in result.hold]
    assert said
    assert "the lengths of only" in said[0]


def test_many_long_requests_are_served() -> None:
    s = service()
    load(s, 150, tail=0.05, longest=2000)
    hold = s.results[-1][1].hold
    assert hold is not None
    assert "its longest requests may still run" in hold, "hundreds of short ones have finished by then, and no long one"
    load(s, 450, tail=0.05, longest=2000)
    assert all(d.after >= 4096 for d in moved(s)), [d.message for d in moved(s)]
    assert s.limits.max_sequence_length >= 4096


def test_refused_requests_raise_it_while_memory_is_free() -> None:
    s = service(now=512, most=3000)
    load(s, 300, tail=0.1, clients=4, longest=600)
    made = moved(s)
    assert [(d.before, d.after) for d in made] == [(512, 1024)]
    assert made[0].reason is Reason.REQUESTS_TOO_LONG
    assert "of the last minute were longer than 512 and were refused or cut off" in made[0].message
    assert made[0].outcome.verdict is Verdict.CONFIRMED
    load(s, 600, tail=0.1, clients=4, longest=5000)
    assert s.limits.max_sequence_length == 3000, "up to the bound, a step at a time"
    assert [d.after for d in moved(s)] == [1024, 2048, 3000]


def test_refused_requests_do_not_raise_it_while_memory_is_short() -> None:
    s = service(now=512, blocks=420)
    load(s, 240, tail=0.05, clients=60, longest=600)
    assert not moved(s)


def test_a_pool_that_cannot_hold_one_such_request_keeps_it() -> None:
    s = service(now=512, blocks=100)  # 50% of 100 blocks of 16 tokens
    load(s, 200, tail=0.2, clients=1, longest=600)
    assert not moved(s)
    said = [result.hold for _, result in s.results if result.hold]
    assert any("the KV cache holds 800 tokens in all" in hold for hold in said)


@pytest.mark.parametrize(
    ("length", "most", "share"),
    # 100 requests, two longer than 2,048 and at most 4,096; their mean is taken to be 2,896.
    [(2048, 8192, 2 * (2896.3 - 2048) / 40_000), (1024, 8192, 2 * (2896.3 - 1024) / 40_000), (4096, 8192, 0.0)],
)
def test_the_share_beyond_a_length(length: int, most: int, share: float) -> None:
    tail = Tail(100.0, 40_000.0, tuple(2.0 if bound <= 2048 else 0.0 for bound in SEQUENCE_LENGTHS))
    assert tail.share_over(length, most) == pytest.approx(share, rel=1e-3)
    assert tail.over(2048) == 2.0


def test_nothing_seen_is_no_tail() -> None:
    assert Tail().share_over(1024, 8192) == 0.0
    assert Tail().over(1024) == 0.0
