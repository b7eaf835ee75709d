import dataclasses

import msgspec
import pytest

from busload_runtime.contract import Limits, StepLaw
from busload_runtime.engine.messages import Stats
from busload_runtime.server.admission import Admission
from busload_runtime.server.errors import ApiError
from busload_runtime.server.tenants import Tenant

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
    admission.take(3)
    admission.queue_tokens(500)
    with pytest.raises(ApiError) as caught:
        admission.queue_tokens(1)
    assert caught.value.status == 429
    with pytest.raises(ApiError, match="500 prompt tokens wait, 2 more"):
        admission.check(2)
    admission.unqueue(500)
    admission.queue_tokens(60)
    admission.queue_tokens(40)
    assert admission.waiting_tokens == 100


def test_retry_after_is_the_time_that_the_queue_takes(admission: Admission) -> None:
    admission.limits = dataclasses.replace(LIMITS, max_queued_requests=20, max_queued_tokens=10_000)
    admission.take(24)
    admission.queue_tokens(2400)
    assert admission.retry_after() == 5, "nothing is known yet"
    admission.rate.finished(100, 50)
    for seconds in range(10):  # 300 tokens a second
        admission.observe(msgspec.structs.replace(IDLE, busy_seconds=float(seconds), generated_tokens=300 * seconds))
    # 20 of the 24 wait beyond the seats.
    assert admission.retry_after() == pytest.approx((20 * 100 + 20 * 50) / 300, abs=1)
    admission.rate.law = StepLaw(a=0.2, b=0.01, c=0.0, d=0.001)
    assert admission.retry_after() == pytest.approx(20 * 50 * (0.2 / 4 + 0.01) + 2000 * 0.001, abs=1)
    admission.leave(20, waiting=20)
    assert admission.retry_after() == 1


def test_a_queue_that_is_too_long_in_time_refuses_who_would_not_wait(clock: Clock) -> None:
    admission = Admission(dataclasses.replace(LIMITS, max_queued_requests=20), clock)
    admission.take(15)
    admission.rate.finished(10, 100)
    admission.take(1, patience=1)
    admission.leave(1, waiting=1)
    admission.rate.law = StepLaw(a=0.1, b=0.01, c=0.0, d=0.0)  # 3.5 s for each of 11
    with pytest.raises(ApiError) as caught:
        admission.take(1, patience=30)
    error = caught.value
    assert (error.status, error.code, error.retry_after) == (429, "queue_full", 39)
    assert "39 s, and this request may wait 30 s" in error.message
    admission.leave(8)
    with pytest.raises(ApiError, match="may wait 5 s"):
        admission.take(1, patience=5)
    admission.take(1, patience=20)
    admission.leave(8)
    admission.take(1, patience=0.001)


def test_a_tenant_fills_half_of_the_queue_and_no_more(clock: Clock) -> None:
    admission = Admission(dataclasses.replace(LIMITS, max_queued_requests=8, max_queued_tokens=100), clock)
    heavy, light = Tenant("h", "h", bounded=True), Tenant("l", "l", bounded=True)
    admission.take(8, tenant=heavy)
    with pytest.raises(ApiError, match="share of the queue is 4") as caught:
        admission.take(1, tenant=heavy)
    assert (caught.value.status, caught.value.code, caught.value.reason) == (429, "tenant_limit", "tenant_limit")
    for _ in range(4):  # they decode now, and their seats are free no more
        admission.queue_tokens(10, heavy)
        admission.unqueue(10, heavy)
    with pytest.raises(ApiError, match="4 requests of this tenant wait"):
        admission.take(1, tenant=heavy)
    admission.take(4, tenant=light)
    with pytest.raises(ApiError, match="the queue holds 8"):
        admission.take(1, tenant=light)
    admission.queue_tokens(50, heavy)
    with pytest.raises(ApiError, match="share of 50"):
        admission.queue_tokens(1, heavy)
    admission.queue_tokens(50, light)
    with pytest.raises(ApiError) as impossible:
        admission.take(9, tenant=light)
    assert impossible.value.status == 400
    admission.leave(4, light, waiting=4)
    admission.leave(8, heavy, waiting=4)
    assert admission.tenants == 0


def test_who_names_no_tenant_may_fill_the_queue(clock: Clock) -> None:
    admission = Admission(dataclasses.replace(LIMITS, max_queued_requests=8), clock)
    admission.take(12)
    admission.queue_tokens(100)
    assert (admission.live, admission.waiting_tokens) == (12, 100)


def test_draining_refuses(admission: Admission) -> None:
    admission.draining = True
    error = refusal(admission)
    assert (error.status, error.reason) == (503, "draining")
