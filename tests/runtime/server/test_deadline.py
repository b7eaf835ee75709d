"""Which time limit counts when, and what the client is told."""

import math

import pytest

from busload_runtime.server.deadline import HEADER, Deadline, Timeouts, deadline_of
from busload_runtime.server.errors import ApiError

TIMEOUTS = Timeouts(queue=10, request=60, token=5)


def test_the_flags_count_and_a_client_may_ask_for_less() -> None:
    deadline = deadline_of(None, 100.0, TIMEOUTS)
    assert (deadline.patience, deadline.whole, deadline.left(104.0)) == (10, 60, 6)
    shorter = deadline_of("2.5", 100.0, TIMEOUTS)
    assert (shorter.patience, shorter.whole) == (2.5, 2.5)
    longer = deadline_of("600", 100.0, TIMEOUTS)
    assert (longer.patience, longer.whole) == (10, 60)


@pytest.mark.parametrize("value", ["", "0", "-1", "nan", "inf", "86401", "soon", "1e9", "5s"])
def test_what_is_no_number_of_seconds_is_a_400(value: str) -> None:
    with pytest.raises(ApiError) as caught:
        deadline_of(value, 0.0, TIMEOUTS)
    assert (caught.value.status, caught.value.param) == (400, HEADER)
    assert repr(value) in caught.value.message


def test_the_earliest_limit_is_the_one_that_is_due() -> None:
    deadline = Deadline(TIMEOUTS, 100.0)
    assert deadline.due(waits=True, oldest_token=math.inf) == 110
    assert deadline.due(waits=False, oldest_token=120.0) == 125
    assert deadline.due(waits=False, oldest_token=158.0) == 160
    assert deadline.due(waits=True, oldest_token=101.0) == 106


def test_the_answer_says_which_limit_it_was_and_whether_to_try_again() -> None:
    own = Deadline(TIMEOUTS, 0.0, 3.0).error(3.0, waits=True, retry_after=7)
    assert (own.status, own.code, own.param) == (408, "deadline_exceeded", HEADER)
    assert own.headers() == {"x-should-retry": "false"}
    queue = Deadline(TIMEOUTS, 0.0, 30.0).error(10.0, waits=True, retry_after=7)
    assert "no first token after 10 s" in queue.message
    assert (queue.status, queue.headers()) == (408, {"retry-after": "7"})
    whole = Deadline(TIMEOUTS, 0.0).error(60.0, waits=False, retry_after=7)
    assert "not finished after 60 s" in whole.message
    stalled = Deadline(TIMEOUTS, 0.0).error(20.0, waits=False, retry_after=7)
    assert (stalled.code, stalled.status) == ("stalled", 408)
    assert "no further token for 5 s" in stalled.message
