import asyncio

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from busload_operator.control.workqueue import WorkQueue

KEYS = st.sampled_from("abcde")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class QueueMachine(RuleBasedStateMachine):
    """Any order of calls: no key twice at once, none lost, none early."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.queue: WorkQueue[str] = WorkQueue(self.clock, jitter=lambda: 1.0)
        self.working: set[str] = set()
        self.owed: dict[str, float] = {}  # key -> when it is ready at the latest

    def owe(self, key: str, at: float) -> None:
        self.owed[key] = min(at, self.owed.get(key, at))

    @rule(key=KEYS)
    def add(self, key: str) -> None:
        self.queue.add(key)
        self.owe(key, self.clock.now)

    @rule(key=KEYS, delay=st.floats(0, 10))
    def add_after(self, key: str, delay: float) -> None:
        self.queue.add_after(key, delay)
        self.owe(key, self.clock.now + delay)

    @rule(key=KEYS)
    def retry(self, key: str) -> None:
        self.owe(key, self.clock.now + self.queue.retry(key))

    @rule(seconds=st.floats(0, 5))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule()
    def pop(self) -> None:
        key = self.queue.pop()
        due = {k for k, at in self.owed.items() if at <= self.clock.now and k not in self.working}
        if key is None:
            assert not due
            return
        assert key not in self.working
        assert key in due
        self.working.add(key)
        del self.owed[key]

    @rule(key=KEYS)
    def done(self, key: str) -> None:
        if key in self.working:
            self.working.discard(key)
            self.queue.done(key)

    @invariant()
    def length_counts_ready_keys_once(self) -> None:
        assert len(self.queue) <= len(set(self.owed) - self.working)


TestQueue = QueueMachine.TestCase


def test_a_burst_of_adds_is_one_piece_of_work() -> None:
    queue: WorkQueue[str] = WorkQueue(Clock())
    for _ in range(50):
        queue.add("a")
    assert queue.pop() == "a"
    assert queue.pop() is None


def test_an_add_during_work_is_not_lost_and_waits_for_its_end() -> None:
    queue: WorkQueue[str] = WorkQueue(Clock())
    queue.add("a")
    queue.pop()
    queue.add("a")
    assert queue.pop() is None
    queue.done("a")
    assert queue.pop() == "a"


def test_backoff_doubles_up_to_a_limit_and_is_forgiven() -> None:
    queue: WorkQueue[str] = WorkQueue(Clock(), jitter=lambda: 1.0, first_delay=1, last_delay=5)
    assert [queue.retry("a") for _ in range(5)] == [1, 2, 4, 5, 5]
    queue.forgive("a")
    assert queue.retry("a") == 1


def test_jitter_takes_up_to_half_off() -> None:
    queue: WorkQueue[str] = WorkQueue(Clock(), jitter=lambda: 0.0, first_delay=1)
    assert queue.retry("a") == 0.5


def test_the_servers_wish_outweighs_the_backoff() -> None:
    queue: WorkQueue[str] = WorkQueue(Clock(), first_delay=0.1)
    assert queue.retry("a", at_least=7) == 7


async def test_get_wakes_for_an_add_and_for_a_delay() -> None:
    queue: WorkQueue[str] = WorkQueue()
    waiting = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    queue.add_after("late", 0.05)
    assert await waiting == "late"
    waiting = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    queue.add("now")
    assert await waiting == "now"
