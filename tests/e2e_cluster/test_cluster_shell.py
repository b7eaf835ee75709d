"""What the network may spoil is tried again, and what takes long says so."""

import threading
import time
from collections.abc import Callable

import pytest

from e2e.cluster.shell import DOWNLOADS, Failure, Progress, beating, downloading


def failing(times: int) -> tuple[list[int], Callable[[], str]]:
    """How often it was called, and an action that fails so often before it succeeds."""
    calls: list[int] = []

    def action() -> str:
        calls.append(len(calls) + 1)
        if len(calls) <= times:
            raise Failure(f"no answer, {len(calls)}")
        return "there"

    return calls, action


@pytest.mark.parametrize("times", range(DOWNLOADS))
def test_a_download_that_fails_is_tried_again(times: int) -> None:
    calls, action = failing(times)
    said: list[str] = []
    assert downloading(action, said.append, pause=0.001) == "there"
    assert len(calls) == times + 1
    assert [text.splitlines()[0] for text in said] == [f"no answer, {n}" for n in range(1, times + 1)]


def test_one_that_always_fails_says_what_to_look_at() -> None:
    calls, action = failing(99)
    with pytest.raises(Failure, match=rf"no answer, {DOWNLOADS}\nfailed {DOWNLOADS} times: see whether this machine"):
        downloading(action, lambda _: None, pause=0.001)
    assert len(calls) == DOWNLOADS


def test_a_long_step_is_heard_until_it_ends_and_no_longer() -> None:
    beats: list[float] = []
    twice = threading.Event()

    def say(seconds: float) -> None:
        beats.append(seconds)
        if len(beats) == 2:
            twice.set()

    with beating(say, every=0.001):
        assert twice.wait(60)
    count = len(beats)
    assert beats == sorted(beats)
    time.sleep(0.05)
    assert len(beats) == count


def test_a_step_that_fails_leaves_no_thread_and_is_not_reported_as_done(capsys: pytest.CaptureFixture[str]) -> None:
    before = threading.active_count()
    progress = Progress()
    with pytest.raises(Failure), progress.step("something"):
        raise Failure("no")
    assert threading.active_count() == before
    assert progress.seconds == {}
    assert capsys.readouterr().err == ""
