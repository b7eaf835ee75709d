"""The time budget of a step and late-last admission: bounds that hold in every step, and nobody starves."""

import hypothesis.strategies as st
from hashing_executor import HashingExecutor, expected_text
from hypothesis import example, given, settings
from scheduler_checks import check_idle, check_scheduler, run_step, texts

from busload_runtime.contract import Limits, Pace, StepLaw
from busload_runtime.engine.line import PATIENCE_OBJECTIVES, PATIENCE_SECONDS
from busload_runtime.engine.plan import Plan, Sampled
from busload_runtime.engine.request import Output, Request
from busload_runtime.engine.scheduler import Scheduler

BLOCK_SIZE = 4
SLOW_PROMPTS = StepLaw(a=0.010, b=0.001, c=1e-5, d=0.002)


def make(pace: Pace, batch: int = 4, budget: int = 512, blocks: int = 200) -> Scheduler:
    return Scheduler(Limits(512, batch, 90, budget, 0, 0), BLOCK_SIZE, blocks, pace)


def add(scheduler: Scheduler, request_id: int, prompt: int, output: int, arrived: float = 0.0) -> None:
    scheduler.add(Request(request_id, [1000 + request_id] * prompt, output, arrived=arrived))


def step(scheduler: Scheduler, now: float = 0.0) -> Plan:
    plan = scheduler.plan(now)
    scheduler.commit(plan, [Sampled(c.request_id, 7) for c in plan.chunks if c.sampling is not None])
    return plan


def sizes(plan: Plan) -> dict[int, int]:
    return {chunk.request_id: len(chunk.tokens) for chunk in plan.chunks}


def duration(law: StepLaw, scheduler: Scheduler, plan: Plan, running: set[int]) -> tuple[float, int, int]:
    """Predicted seconds of a planned step, its decodes, its prompt tokens.

    Decodes are of requests in `running`, those before the step: who comes back from a preemption is computed again like
    a prompt, if only for the one token that no cached block holds.
    """
    batch = prompt = kv = 0
    for chunk in plan.chunks:
        kv += chunk.length_after
        request = scheduler._requests[chunk.request_id]
        if chunk.request_id in running and len(chunk.tokens) == 1 and chunk.start >= request.prompt_length:
            batch += 1
        else:
            prompt += len(chunk.tokens)
    return law.a + law.b * batch + law.c * kv + law.d * prompt, batch, prompt


# Time budget.


def test_a_prompt_beside_a_decode_gets_what_the_objective_leaves() -> None:
    scheduler = make(Pace(inter_token_latency=0.060, law=SLOW_PROMPTS))
    add(scheduler, 0, 100, 50)
    assert sizes(step(scheduler)) == {0: 100}, "nothing decodes: only the token budget bounds"
    add(scheduler, 1, 100, 5)
    # 0.9*60 ms - 10 ms - 1 ms - 101*0.01 ms = 41.99 ms; 2.01 ms for each token and what it reads.
    assert sizes(step(scheduler)) == {0: 1, 1: 20}
    # The one that reads 20 tokens before its chunk has 0.2 ms less, and the decode one token more.
    assert sizes(step(scheduler)) == {0: 1, 1: 20}
    for pace in (Pace(inter_token_latency=0.060), Pace(law=SLOW_PROMPTS), Pace()):
        scheduler.set_pace(pace)
        assert sizes(scheduler.plan(0.0)) == {0: 1, 1: 60}, "without objective or law it is not known"
        scheduler._flights.clear()


def test_when_decodes_take_all_the_time_one_block_of_prompt_moves_on() -> None:
    scheduler = make(Pace(inter_token_latency=0.010, law=SLOW_PROMPTS))
    add(scheduler, 0, 10, 50)
    step(scheduler)
    add(scheduler, 1, 10, 5)
    add(scheduler, 2, 10, 5)
    assert [sizes(step(scheduler)) for _ in range(4)] == [
        {0: 1, 1: 4},
        {0: 1, 1: 4},
        {0: 1, 1: 2, 2: 2},
        {0: 1, 1: 1, 2: 4},
    ]


@settings(max_examples=200, deadline=None)
@given(
    load=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20), st.integers(0, 30)), min_size=1, max_size=10),
    objective=st.floats(0.005, 0.2),
    law=st.builds(StepLaw, st.floats(0, 0.02), st.floats(0, 0.004), st.floats(0, 1e-4), st.floats(0, 0.004)),
    budget=st.integers(16, 64),
    batch=st.integers(1, 8),
    blocks=st.integers(24, 60),
)
@example(
    load=[(1, 11, 0), (1, 17, 0), (7, 1, 2), (52, 2, 1), (54, 4, 0)],
    objective=0.0390625,
    law=StepLaw(0.0078125, 0.00390625, 0.0, 0.00390625),
    budget=58,
    batch=2,
    blocks=28,
)
def test_no_step_exceeds_a_budget_and_every_step_moves_a_prompt(
    load: list[tuple[int, int, int]], objective: float, law: StepLaw, budget: int, batch: int, blocks: int
) -> None:
    scheduler = Scheduler(Limits(81, batch, 90, budget, 0, 0), BLOCK_SIZE, blocks, Pace(None, objective, law))
    executor = HashingExecutor(BLOCK_SIZE, blocks)
    outputs: list[Output] = []
    for number in range(5000):
        for request_id, (prompt, output, at) in enumerate(load):
            if at == number:
                scheduler.add(Request(request_id, [1000 + request_id] * prompt, output))
        if not scheduler.has_work:
            if number > 30:
                break
            continue
        before = [r for r in scheduler._running if len(r.tokens) > r.computed + 1 or not r.drawn]
        running = {request.request_id for request in scheduler._running}
        plan = scheduler.plan(0.0)
        seconds, decodes, prompts = duration(law, scheduler, plan, running)
        assert plan.num_tokens <= budget
        if decodes and prompts > BLOCK_SIZE:
            assert seconds <= 0.9 * objective + 1e-9
        oldest = next((r for r in before if r.running), None)
        if oldest is not None:
            moved = sizes(plan).get(oldest.request_id, 0)
            assert moved >= min(BLOCK_SIZE, len(oldest.tokens) - oldest.computed, budget - len(plan.chunks) + 1)
        outputs += scheduler.commit(plan, executor.run(plan))
        check_scheduler(scheduler)
    assert texts(outputs) == {
        request_id: expected_text([1000 + request_id] * prompt, output, 0)
        for request_id, (prompt, output, _) in enumerate(load)
    }
    check_idle(scheduler)


# Order of admission.

LATE_LAST = Pace(time_to_first_token=1.0, law=StepLaw(a=0.010, b=0.0, c=0.0, d=0.001))


def admitted(scheduler: Scheduler, now: float) -> list[int]:
    """Ids in the order in which a full pass admits them, one at a time."""
    order: list[int] = []
    while scheduler.has_work:
        order += sizes(step(scheduler, now))
    return order


def test_who_can_still_make_it_goes_before_who_cannot() -> None:
    scheduler = make(LATE_LAST, batch=1)
    for request_id, (prompt, arrived) in enumerate([(10, 0.0), (100, 0.0), (10, 0.5), (300, 0.5), (10, 0.6)]):
        add(scheduler, request_id, prompt, 1, arrived)
    # At 1.3: 0 and 1 are lost by age, 3 by its long prompt (0.02 + 0.3 s more).
    assert admitted(scheduler, 1.3) == [2, 4, 0, 1, 3]


def test_in_order_of_arrival_without_objective_or_law() -> None:
    for pace in (Pace(), Pace(time_to_first_token=1.0), Pace(law=LATE_LAST.law)):
        scheduler = make(pace, batch=1)
        for request_id, arrived in enumerate([0.0, 0.1, 5.0]):
            add(scheduler, request_id, 10, 1, arrived)
        assert admitted(scheduler, 5.1) == [0, 1, 2]


def test_patience_ends_and_then_age_counts_again() -> None:
    scheduler = make(LATE_LAST, batch=1)
    for request_id, arrived in enumerate([0.0, 5.0, 45.9]):
        add(scheduler, request_id, 10, 1, arrived)
    assert sizes(step(scheduler, 46.0)) == {0: 10}
    assert admitted(scheduler, 46.0) == [2, 1]


def test_another_objective_judges_all_anew() -> None:
    scheduler = make(LATE_LAST, batch=1)
    for request_id, arrived in enumerate([0.0, 3.0, 4.0]):
        add(scheduler, request_id, 10, 1, arrived)
    assert sizes(step(scheduler, 4.1)) == {2: 10}
    scheduler.set_pace(Pace(5.0, None, LATE_LAST.law))
    assert admitted(scheduler, 4.1) == [0, 1]
    add(scheduler, 3, 10, 1, 0.0)
    add(scheduler, 4, 10, 1, 9.0)
    assert admitted(scheduler, 9.1) == [4, 3]


@settings(max_examples=150, deadline=None)
@given(
    gaps=st.lists(st.floats(0.0, 4.0), min_size=5, max_size=60),
    prompts=st.lists(st.integers(1, 60), min_size=60, max_size=60),
    objective=st.floats(0.5, 8.0),
    step_seconds=st.floats(0.05, 3.0),
    aborts=st.sets(st.integers(0, 59), max_size=10),
    changes=st.dictionaries(st.integers(0, 80), st.sampled_from([None, 0.2, 2.0, 50.0]), max_size=3),
)
def test_nobody_starves_and_each_class_keeps_its_order(
    gaps: list[float],
    prompts: list[int],
    objective: float,
    step_seconds: float,
    aborts: set[int],
    changes: dict[int, float | None],
) -> None:
    law = StepLaw(a=step_seconds / 4, b=0.0, c=0.0, d=step_seconds / 100)
    scheduler = make(Pace(objective, None, law), batch=1, budget=512)
    arrivals, clock = [], 0.0
    for gap in gaps:
        clock += gap
        arrivals.append(clock)
    now, added, steps, ended = 0.0, 0, 0, set[int]()
    while added < len(arrivals) or scheduler.has_work:
        while added < len(arrivals) and arrivals[added] <= now:
            add(scheduler, added, prompts[added], 1, arrivals[added])
            added += 1
        if steps in changes:
            scheduler.set_pace(Pace(changes[steps], None, law))
        for request_id in aborts:
            if steps == request_id + 3 and scheduler.abort(request_id):
                ended.add(request_id)
        check_scheduler(scheduler)
        waiting = {r.request_id: r for r in scheduler._waiting.in_order()}
        for request_id in sizes(step(scheduler, now)) if scheduler.has_work else ():
            chosen = waiting.pop(request_id)
            ended.add(request_id)
            limit = scheduler.pace.time_to_first_token
            if limit is None:
                assert all(other.order > chosen.order for other in waiting.values())
                continue

            def late(request: Request, limit: float = limit, now: float = now) -> bool:
                return request.arrived + limit - 2 * law.a - law.d * request.prompt_length < now

            def impatient(request: Request, limit: float = limit, now: float = now) -> bool:
                return request.arrived + max(PATIENCE_OBJECTIVES * limit, PATIENCE_SECONDS) < now

            for other in waiting.values():
                if impatient(chosen):
                    assert other.order > chosen.order, "the impatient keep the order of arrival"
                else:
                    assert not impatient(other), "somebody who has waited too long is passed over"
                    assert late(other) >= late(chosen), "a late one goes before one that can make it"
                    if late(other) == late(chosen):
                        assert other.order > chosen.order, "a class keeps the order of arrival"
        now += step_seconds
        steps += 1
        assert steps < 5000
    assert ended == set(range(len(arrivals)))
    check_idle(scheduler)


def test_a_late_request_that_was_passed_over_does_not_push_out_those_that_run() -> None:
    scheduler = make(LATE_LAST, batch=2, blocks=10)
    executor = HashingExecutor(BLOCK_SIZE, 10)
    add(scheduler, 0, 15, 20, arrived=0.0)
    add(scheduler, 1, 15, 20, arrived=2.0)
    started: list[int] = []
    while scheduler.has_work:
        run_step(scheduler, executor, 2.1)
        check_scheduler(scheduler)
        started += [r.request_id for r in scheduler._running if r.request_id not in started]
        if scheduler.counters.preemptions:
            break
    assert started == [1, 0]
    assert [r.request_id for r in scheduler._running] == [1], "who started first stays, though it arrived last"
