"""Many decode steps at once are what single steps would have been: every counter, level, block and digest."""

import hypothesis.strategies as st
from hypothesis import given, settings
from scheduler_checks import check_scheduler

from busload_runtime.contract import Limits
from busload_runtime.engine.plan import Sampled
from busload_runtime.engine.request import Output, Request
from busload_runtime.engine.scheduler import Scheduler

BLOCK_SIZE = 4
requests = st.lists(
    st.tuples(
        st.sampled_from([(1,), (1, 1, 1, 1, 1), (2, 3), (5,) * 9, (6,) * 17]),
        st.integers(1, 40),
        st.sampled_from("abc"),
    ),
    min_size=1,
    max_size=7,
)


def make(budget: int, batch: int, blocks: int) -> Scheduler:
    return Scheduler(Limits(64, batch, 90, max(budget, batch), 0, 0), BLOCK_SIZE, blocks)


def add(scheduler: Scheduler, request_id: int, prompt: tuple[int, ...], output: int, tenant: str = "") -> None:
    scheduler.add(Request(request_id, list(prompt), output, tenant=tenant, weight=2.0 if tenant == "c" else 1.0))


def one_step(scheduler: Scheduler, drawn: dict[int, int]) -> list[Output]:
    plan = scheduler.plan(0.0)
    return scheduler.commit(
        plan, [Sampled(c.request_id, drawn[c.request_id]) for c in plan.chunks if c.sampling is not None]
    )


def picture(scheduler: Scheduler) -> object:
    pool = scheduler._pool
    return (
        scheduler.counters,
        scheduler.levels(),
        # Digests past `published` are a memory of look-ups, no state.
        [
            (r.request_id, r.tokens, r.computed, r.reached, r.table, r.digests[: r.published], r.published)
            for r in scheduler._running
        ],
        [r.request_id for r in scheduler._waiting.in_order()],
        {tenant: account.served for tenant, account in scheduler._waiting._accounts.items()},
        [(block.block_id, block.users, block.digest) for block in pool._blocks],
        {digest: block.block_id for digest, block in pool._cached.items()},
    )


@settings(max_examples=300, deadline=None)
@given(
    arrivals=requests,
    later=requests,
    budget=st.integers(16, 40),
    batch=st.integers(1, 6),
    blocks=st.integers(14, 48),
    most=st.integers(1, 30),
    same_tokens=st.booleans(),
)
def test_decode_equals_single_steps(
    arrivals: list[tuple[tuple[int, ...], int, str]],
    later: list[tuple[tuple[int, ...], int, str]],
    budget: int,
    batch: int,
    blocks: int,
    most: int,
    same_tokens: bool,
) -> None:
    fast, slow = make(budget, batch, blocks), make(budget, batch, blocks)
    # Equal drawn tokens make equal blocks, which then compete for one digest.
    drawn = {i: 9 if same_tokens else 100 + i for i in range(len(arrivals) + len(later))}
    for scheduler in (fast, slow):
        for request_id, (prompt, output, tenant) in enumerate(arrivals):
            add(scheduler, request_id, prompt, output, tenant)
    taken, at_once = 0, 0
    while fast.has_work or later:
        if taken >= 12 and later:
            for scheduler in (fast, slow):
                for offset, (prompt, output, tenant) in enumerate(later):
                    add(scheduler, len(arrivals) + offset, prompt, output, tenant)
            later = []
        steps = fast.decode_steps(most, 0.0)
        assert 0 <= steps <= most
        if steps == 0 and not fast.has_work:
            taken = 12
            continue
        if steps == 0:
            assert one_step(fast, drawn) == one_step(slow, drawn)
            taken += 1
        else:
            outputs = fast.decode(steps, drawn)
            singles = [one_step(slow, drawn) for _ in range(steps)]
            assert outputs == singles[-1]
            assert all(output.finish_reason is None for step in singles[:-1] for output in step)
            taken += steps
            at_once += steps
        assert picture(fast) == picture(slow)
        check_scheduler(fast)
    if any(output > 2 for _, output, _ in arrivals) and len(arrivals) == 1:
        assert at_once > 0


def test_it_goes_as_far_as_the_next_end() -> None:
    scheduler = make(16, 2, 40)
    add(scheduler, 0, (1, 2, 3), 30)
    add(scheduler, 1, (4, 5, 6), 10)
    one_step(scheduler, {0: 7, 1: 8})
    assert scheduler.decode_steps(64, 0.0) == 9
    assert scheduler.decode_steps(4, 0.0) == 4
    assert [o.finish_reason for o in scheduler.decode(9, {0: 7, 1: 8})] == [None, "length"]
    assert scheduler.decode_steps(64, 0.0) == 20


def test_not_beside_somebody_who_can_be_admitted_or_a_prompt() -> None:
    scheduler = make(16, 2, 40)
    add(scheduler, 0, (1,), 30)
    assert scheduler.decode_steps(64, 0.0) == 0, "a prompt is not a decode"
    one_step(scheduler, {0: 7})
    add(scheduler, 1, (2,) * 30, 10)
    assert scheduler.decode_steps(64, 0.0) == 0, "request 1 can start"
    one_step(scheduler, {0: 7})
    assert scheduler.decode_steps(64, 0.0) == 0, "request 1 still computes its prompt"
    one_step(scheduler, {0: 7, 1: 8})
    add(scheduler, 2, (3,), 10)
    assert scheduler.decode_steps(64, 0.0) == 9, "request 2 must wait for a place in the batch"


def test_not_into_a_preemption() -> None:
    scheduler = make(16, 2, 6)
    add(scheduler, 0, (1,) * 7, 16)
    add(scheduler, 1, (2,) * 7, 16)
    drawn = {0: 7, 1: 8}
    while scheduler.counters.preemptions == 0:
        steps = scheduler.decode_steps(64, 0.0)
        if steps:
            scheduler.decode(steps, drawn)
            assert scheduler.counters.preemptions == 0
        else:
            one_step(scheduler, drawn)
    assert scheduler.levels().running == 1
    assert scheduler.decode_steps(64, 0.0) > 0, "who waits for memory does not stop the one that runs"


def test_not_for_one_who_may_stop() -> None:
    scheduler = make(16, 2, 40)
    scheduler.add(Request(0, [1, 2], 30, stop_token_ids=frozenset({5})))
    one_step(scheduler, {0: 7})
    assert scheduler.decode_steps(64, 0.0) == 0
