"""The rules of the scheduler, one by one."""

import pytest
from hashing_executor import HashingExecutor, expected_text
from scheduler_checks import check_idle, check_scheduler, run_step, run_until_idle, texts

from busload_runtime.contract import Limits
from busload_runtime.engine.plan import Plan, Sampled
from busload_runtime.engine.request import Request
from busload_runtime.engine.scheduler import RequestRefused, Scheduler


def build(
    batch_size: int = 4, token_budget: int = 32, num_blocks: int = 64, length: int = 256
) -> tuple[Scheduler, HashingExecutor]:
    limits = Limits(length, batch_size, 90, token_budget, 0, 0)
    return Scheduler(limits, 4, num_blocks), HashingExecutor(4, num_blocks)


def unique(request_id: int, length: int) -> list[int]:
    return [1000 * (request_id + 1) + index for index in range(length)]


def shape(plan: Plan) -> list[tuple[int, int, int]]:
    return [(chunk.request_id, chunk.start, len(chunk.tokens)) for chunk in plan.chunks]


def step(scheduler: Scheduler, executor: HashingExecutor, now: float = 0.0) -> list[tuple[int, int, int]]:
    plan = scheduler.plan(now)
    scheduler.commit(plan, executor.run(plan))
    check_scheduler(scheduler)
    return shape(plan)


def test_a_long_prompt_is_cut_around_the_decodes() -> None:
    scheduler, executor = build(token_budget=16)
    scheduler.add(Request(1, unique(1, 3), 50))
    assert step(scheduler, executor) == [(1, 0, 3)]
    scheduler.add(Request(2, unique(2, 40), 5))
    scheduler.add(Request(3, unique(3, 2), 5))
    assert step(scheduler, executor) == [(1, 3, 1), (2, 0, 15)]
    assert step(scheduler, executor) == [(1, 4, 1), (2, 15, 15)]
    assert step(scheduler, executor) == [(1, 5, 1), (2, 30, 10), (3, 0, 2)]
    assert step(scheduler, executor) == [(1, 6, 1), (2, 40, 1), (3, 2, 1)]


def test_the_batch_limit_holds_and_order_of_arrival_is_kept() -> None:
    scheduler, executor = build(batch_size=2)
    for request_id in range(4):
        scheduler.add(Request(request_id, unique(request_id, 2), 2 + request_id))
    assert shape_ids(step(scheduler, executor)) == [0, 1]
    assert shape_ids(step(scheduler, executor)) == [0, 1]
    assert shape_ids(step(scheduler, executor)) == [1, 2]
    assert scheduler.levels().waiting == 1


def shape_ids(chunks: list[tuple[int, int, int]]) -> list[int]:
    return [request_id for request_id, _, _ in chunks]


def test_a_prompt_is_admitted_only_when_all_of_it_fits() -> None:
    scheduler, executor = build(num_blocks=8, token_budget=16)
    scheduler.add(Request(1, unique(1, 20), 4))
    scheduler.add(Request(2, unique(2, 16), 4))  # 4 blocks, 3 are free
    scheduler.add(Request(3, unique(3, 1), 4))  # would fit, but does not overtake
    assert step(scheduler, executor) == [(1, 0, 16)]
    assert step(scheduler, executor) == [(1, 16, 4)]
    assert scheduler.levels().waiting == 2
    run_until_idle(scheduler, executor)


def test_the_newest_is_preempted_and_nothing_admitted_in_that_step() -> None:
    scheduler, executor = build(num_blocks=8)
    for request_id in (1, 2):
        scheduler.add(Request(request_id, unique(request_id, 16), 12))
    scheduler.add(Request(3, unique(3, 1), 2))
    assert shape_ids(step(scheduler, executor)) == [1, 2]
    assert shape_ids(step(scheduler, executor)) == [1]  # 1 needs a fifth block: 2 gives back its four
    levels = scheduler.levels()
    assert (levels.running, levels.waiting, levels.kv_blocks_free) == (1, 2, 3)
    assert scheduler.counters.preemptions == 1
    # Only one of its four blocks was overwritten, and three are free: 2 and the 3 behind it wait for 1 to end.
    drawn = texts(run_until_idle(scheduler, executor))
    assert drawn[1][-1:] == expected_text(unique(1, 16), 12, 0)[-1:]
    assert len(drawn[2]) == 11  # the first came above
    assert scheduler.counters.recomputed_tokens <= 16
    assert scheduler.counters.prefix_hit_tokens == 0
    assert scheduler.counters.prefix_queried_tokens == 16 + 16 + 1


def test_equal_prompts_share_blocks_only_after_they_were_computed() -> None:
    scheduler, executor = build()
    prompt = unique(1, 14)
    for request_id in (1, 2):
        scheduler.add(Request(request_id, list(prompt), 3))
    assert step(scheduler, executor) == [(1, 0, 14), (2, 0, 14)]
    scheduler.add(Request(3, list(prompt), 3))
    assert step(scheduler, executor)[-1] == (3, 12, 2)
    outputs = run_until_idle(scheduler, executor)
    assert texts(outputs)[3] == expected_text(prompt, 3, 0)[1:]
    scheduler.add(Request(4, list(prompt), 3))
    first = run_step(scheduler, executor)[0]
    assert (first.token, first.cached_tokens) == (expected_text(prompt, 1, 0)[0], 12)
    assert scheduler.counters.prefix_hit_tokens == 24


def test_a_fully_cached_prompt_computes_its_last_block() -> None:
    scheduler, executor = build()
    prompt = unique(1, 16)
    for request_id in (1, 2):
        scheduler.add(Request(request_id, list(prompt), 1))
        outputs = run_until_idle(scheduler, executor)
        assert [output.token for output in outputs] == expected_text(prompt, 1, 0)
    assert outputs[0].cached_tokens == 12


def test_other_salt_finds_nothing() -> None:
    scheduler, executor = build()
    for request_id, salt in enumerate((b"a", b"b", b"a")):
        scheduler.add(Request(request_id, unique(1, 16), 1, salt=salt))
        run_until_idle(scheduler, executor)
        assert scheduler.counters.prefix_hit_tokens == (12 if request_id == 2 else 0)


def test_least_recently_used_content_goes_first_and_tails_before_heads() -> None:
    scheduler, executor = build(num_blocks=8, batch_size=1)
    for request_id in (1, 2):  # four full blocks each: afterwards the pool is full of content
        scheduler.add(Request(request_id, unique(request_id, 16), 1))
        run_until_idle(scheduler, executor)
    scheduler.add(Request(3, unique(3, 8), 1))  # takes the two tail blocks of 1
    run_until_idle(scheduler, executor)
    for request_id in (1, 2):  # 1 finds its two heads and takes the two tails of 2 for the rest
        scheduler.add(Request(10 + request_id, unique(request_id, 13), 1))
        assert run_step(scheduler, executor)[0].cached_tokens == 8


def test_stop_ids_count_from_min_tokens_on() -> None:
    scheduler, executor = build()
    text = expected_text(unique(1, 5), 8, 0)
    stops = frozenset((text[1], text[4]))
    scheduler.add(Request(1, unique(1, 5), 8, stop_token_ids=stops))
    scheduler.add(Request(2, unique(1, 5), 8, min_tokens=3, stop_token_ids=stops))
    outputs = run_until_idle(scheduler, executor)
    assert texts(outputs) == {1: text[:2], 2: text[:5]}
    assert [output.finish_reason for output in outputs if output.finish_reason] == ["stop", "stop"]


def test_queue_seconds_run_from_arrival_to_the_first_step() -> None:
    scheduler, executor = build(batch_size=1)
    for request_id in (1, 2):
        scheduler.add(Request(request_id, unique(request_id, 2), 2, arrived=1.0))
    outputs = [output for now in (3.0, 4.0, 6.0, 7.0) for output in run_step(scheduler, executor, now)]
    assert [(output.request_id, output.queue_seconds) for output in outputs] == [(1, 2.0), (1, 0.0), (2, 5.0), (2, 0.0)]


@pytest.mark.parametrize(
    ("length", "max_tokens", "text"),
    [
        (0, 5, "at least 1 prompt token and max_tokens of at least 1, got 0 and 5"),
        (5, 0, "got 5 and 0"),
        (256, 1, "the prompt has 256 tokens and maxSequenceLength is 256: a prompt may have at most 255 tokens"),
        (200, 1, "the request has 200 tokens and the KV cache holds 128"),
    ],
)
def test_what_can_never_run_is_refused(length: int, max_tokens: int, text: str) -> None:
    scheduler, _ = build(num_blocks=32)
    with pytest.raises(RequestRefused, match=text):
        scheduler.add(Request(1, unique(1, length), max_tokens))
    assert not scheduler.has_work


def test_a_sequence_ends_at_the_limit_it_was_added_under() -> None:
    scheduler, executor = build(length=32)
    scheduler.add(Request(1, unique(1, 20), 100))
    run_step(scheduler, executor)
    scheduler.set_limits(Limits(16, 4, 90, 32, 0, 0))
    with pytest.raises(RequestRefused):
        scheduler.add(Request(2, unique(2, 20), 100))
    outputs = run_until_idle(scheduler, executor)
    assert len(outputs) == 11
    assert outputs[-1].finish_reason == "length"


def test_a_lower_batch_limit_throws_nobody_out_and_starves_nobody() -> None:
    scheduler, executor = build(batch_size=6)
    for request_id in range(7):
        scheduler.add(Request(request_id, unique(request_id, 2), 4 + request_id))
    step(scheduler, executor)
    scheduler.set_limits(Limits(256, 2, 90, 2, 0, 0))
    assert shape_ids(step(scheduler, executor)) == [0, 1, 2, 3, 4, 5]
    run_until_idle(scheduler, executor)
    assert scheduler.counters.preemptions == 0


def test_a_smaller_pool_preempts_or_ends_what_it_cannot_hold() -> None:
    scheduler, executor = build(num_blocks=32, token_budget=64)
    scheduler.add(Request(1, unique(1, 8), 5))  # blocks 0-1
    scheduler.add(Request(2, unique(2, 40), 30))  # blocks 2-11
    step(scheduler, executor)
    scheduler.add(Request(3, unique(3, 60), 30))  # waits with a prompt too long for the new pool
    ended = scheduler.resize(8)
    executor.resize(8)
    check_scheduler(scheduler)
    assert [(output.request_id, output.finish_reason) for output in ended] == [(2, "length"), (3, "error")]
    assert "has 60 tokens and the KV cache holds 32" in (ended[1].error or "")
    assert texts(run_until_idle(scheduler, executor))[1] == expected_text(unique(1, 8), 5, 0)[1:]
    check_idle(scheduler)


def test_nothing_is_admitted_in_a_step_that_preempts() -> None:
    """Here the head of the queue is an older request, put there by a smaller pool, that would fit at once."""
    scheduler, executor = build(num_blocks=6)
    scheduler.add(Request(1, unique(1, 6), 6))  # blocks 0, 1
    scheduler.add(Request(2, unique(2, 12), 1))  # blocks 2, 3, 4: content, but free after this step
    step(scheduler, executor)
    scheduler.add(Request(3, unique(3, 2), 2))  # block 5
    scheduler.add(Request(4, unique(4, 11), 4))  # blocks 4, 3, 2
    assert step(scheduler, executor) == [(1, 6, 1), (3, 0, 2), (4, 0, 11)]
    assert scheduler.resize(5) == []
    executor.resize(5)
    assert step(scheduler, executor) == [(1, 7, 1), (4, 11, 1)]
    assert step(scheduler, executor) == [(1, 8, 1)]  # takes a block of 4, which gives back three
    assert step(scheduler, executor) == [(1, 9, 1), (3, 0, 3)]
    run_until_idle(scheduler, executor)


def test_an_older_request_that_comes_back_leaves_newer_ones_their_token() -> None:
    scheduler, executor = build(num_blocks=9)
    scheduler.add(Request(1, unique(1, 32), 1))  # blocks 0 .. 7: content, but free after this step
    step(scheduler, executor)
    scheduler.add(Request(2, unique(2, 24), 2))  # blocks 8, 7, 6, 5, 4, 3
    scheduler.add(Request(3, unique(3, 2), 3))  # block 2
    assert step(scheduler, executor) == [(2, 0, 24), (3, 0, 2)]
    assert scheduler.resize(8) == []  # takes the first block of 2, so that nothing of it can be found again
    executor.resize(8)
    scheduler.set_limits(Limits(256, 4, 90, 8, 0, 0))
    assert step(scheduler, executor) == [(3, 2, 1), (2, 0, 7)]
    assert step(scheduler, executor) == [(2, 7, 7), (3, 3, 1)]
    run_until_idle(scheduler, executor)


def test_abort_of_a_request_that_waits_runs_or_is_preempted() -> None:
    scheduler, executor = build(num_blocks=8, batch_size=2)
    for request_id in (1, 2, 3):
        scheduler.add(Request(request_id, unique(request_id, 16), 12))
    step(scheduler, executor)
    step(scheduler, executor)
    assert scheduler.counters.preemptions == 1
    for request_id, known in ((2, True), (3, True), (1, True), (1, False), (9, False)):
        assert scheduler.abort(request_id) == known
        check_scheduler(scheduler)
    check_idle(scheduler)


def test_misuse_is_an_error() -> None:
    scheduler, _ = build()
    scheduler.add(Request(1, [1], 2))
    with pytest.raises(ValueError, match="request id 1 is already in use"):
        scheduler.add(Request(1, [1], 2))
    plan = scheduler.plan(0.0)
    for late in (lambda: scheduler.resize(8), lambda: scheduler.decode_steps(1, 0.0)):
        with pytest.raises(RuntimeError, match="not committed"):
            late()
    with pytest.raises(ValueError, match="the oldest plan that is not committed"):
        scheduler.commit(Plan(()), [])
    with pytest.raises(ValueError, match=r"drew tokens for requests \[7\], planned were \[1\]"):
        scheduler.commit(plan, [Sampled(7, 1)])
