import dataclasses

import msgspec
import pytest

from busload_runtime.contract import Limits
from busload_runtime.engine.messages import Stats
from busload_runtime.server.admission import Admission
from busload_runtime.server.errors import ApiError

LIMITS = Limits(2048, 4, 90, 512, 2, 100)
IDLE = Stats(*[0] * len(msgspec.structs.fields(Stats)))


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def admission(clock: Clock) -> Admission:
    return Admission(LIMITS, clock)


def refusal(admission: Admission, count: int = 1) -> ApiError:
    with pytest.raises(ApiError) as caught:
        admission.take(count)
    return caught.value


def test_batch_and_queue_fill_then_refuse(admission: Admission) -> None:
    for _ in range(6):
        admission.take(1)
    error = refusal(admission)
    assert (error.status, error.code, error.reason) == (429, "queue_full", "queue_full")
    assert error.retry_after is not None
    admission.leave()
    admission.take(1)


def test_a_refused_request_takes_no_seat(admission: Admission) -> None:
    admission.take(5)
    refusal(admission, 2)
    assert admission.live == 5


def test_more_sequences_than_ever_fit_is_a_400(admission: Admission) -> None:
    assert refusal(admission, 7).status == 400


def test_seats_that_memory_cannot_serve_stop_counting(admission: Admission, clock: Clock) -> None:
    admission.observe(msgspec.structs.replace(IDLE, running=1, waiting=2))
    assert admission.seats == 4  # it may be a batch that is just filling
    clock.now += 2
    admission.observe(msgspec.structs.replace(IDLE, running=1, waiting=2))
    assert admission.seats == 1
    admission.take(3)
    assert refusal(admission).status == 429
    admission.observe(msgspec.structs.replace(IDLE, running=3))
    assert admission.seats == 4


def test_waiting_prompt_tokens_are_bounded_but_one_prompt_always_enters(admission: Admission) -> None:
    admission.queue_tokens(500)
    with pytest.raises(ApiError) as caught:
        admission.queue_tokens(1)
    assert caught.value.status == 429
    admission.unqueue_tokens(500)
    admission.queue_tokens(60)
    admission.queue_tokens(40)
    assert admission.waiting_tokens == 100


def test_retry_after_follows_the_finish_rate(admission: Admission, clock: Clock) -> None:
    admission.limits = dataclasses.replace(LIMITS, max_queued_requests=20)
    admission.take(24)
    unknown = admission.retry_after()
    for _ in range(10):  # two a second
        clock.now += 0.5
        admission.leave(finished=True)
        admission.take(1)
    assert unknown == 5
    assert admission.retry_after() == pytest.approx(20 / 2, abs=2)


def test_draining_refuses(admission: Admission) -> None:
    admission.draining = True
    error = refusal(admission)
    assert (error.status, error.reason) == (503, "draining")
