"""What must hold between any two steps, and a way to run a scheduler to its end."""

from collections import Counter

from hashing_executor import HashingExecutor

from busload_runtime.contract import Pace
from busload_runtime.engine.block_pool import Block, BlockPool
from busload_runtime.engine.request import Output, Request
from busload_runtime.engine.scheduler import Scheduler
from busload_runtime.engine.waiting import KEPT_ACCOUNTS


def free_list(pool: BlockPool) -> list[Block]:
    blocks, block = [], pool._ends.right
    while block is not pool._ends:
        assert block.left.right is block
        blocks.append(block)
        block = block.right
    return blocks


def check_pool(pool: BlockPool) -> None:
    free = free_list(pool)
    assert len(free) == len(set(map(id, free))) == pool._listed
    assert {block.block_id for block in free} == {block.block_id for block in pool._blocks if block.users == 0}
    assert [block.block_id for block in pool._blocks] == list(range(len(pool._blocks)))
    assert len(pool._blocks) <= pool.num_blocks
    assert {block.digest: block for block in pool._blocks if block.digest} == pool._cached
    kinds = [block.digest is not None for block in free]
    assert kinds == sorted(kinds), "blank blocks come before those with content"


def check_scheduler(scheduler: Scheduler) -> None:
    pool, size = scheduler._pool, scheduler.block_size
    check_pool(pool)
    users: dict[int, list[tuple[int, tuple[int, ...]]]] = {}
    for request in scheduler._running:
        assert request.table == tuple(block.block_id for block in request.blocks)
        assert len(set(request.table)) == len(request.table)
        assert len(request.tokens) <= request.max_length
        # In a step in flight that cannot but be its last one, all of it is computed.
        assert request.computed < len(request.tokens) or last_token_pending(scheduler, request)
        assert request.computed <= len(request.table) * size
        for index, block in enumerate(request.table):
            users.setdefault(block, []).append((index, tuple(request.tokens[: (index + 1) * size])))
    held = Counter(block.block_id for flight in scheduler._flights for blocks in flight.held for block in blocks)
    for block in pool._blocks:
        holders = users.get(block.block_id, [])
        assert block.users == len(holders) + held[block.block_id], "a block is leaked or given away twice"
        if len(holders) > 1:
            assert len(set(holders)) == 1, "a block is shared by requests of different content"
            assert len(holders[0][1]) == (holders[0][0] + 1) * size, "a block is shared before it is full"
    queue = scheduler._waiting
    running, waiting = scheduler._running, queue.in_order()
    for started in (running, queue._preempted):
        assert [request.start_order for request in started] == sorted(request.start_order for request in started)
    for tenant, line in queue._lines.items():
        assert len(line) > 0, "a tenant without requests waits for its turn"
        for never_ran in (list(line._timely.values()), line._late):
            assert [request.order for request in never_ran] == sorted(request.order for request in never_ran)
            assert all(request.started is None and request.tenant == tenant for request in never_ran)
    check_accounts(scheduler)
    assert {*map(id, running), *map(id, waiting)} == {*map(id, scheduler._requests.values())}
    levels = scheduler.levels()
    assert (levels.running, levels.waiting) == (len(running), len(waiting))
    assert levels.queued_prompt_tokens == sum(len(request.tokens) for request in waiting)
    assert levels.kv_tokens == sum(request.computed for request in running)
    assert levels.kv_blocks_free == pool.num_blocks - len(users.keys() | held.keys())


def last_token_pending(scheduler: Scheduler, request: Request) -> bool:
    end = request.computed + 1
    return bool(scheduler._flights) and (end >= request.max_length or end > scheduler.capacity)


def check_accounts(scheduler: Scheduler) -> None:
    accounts = scheduler._waiting._accounts
    live = Counter(request.tenant for request in scheduler._requests.values())
    assert {tenant: account.live for tenant, account in accounts.items() if account.live} == live
    assert sum(not account.live for account in accounts.values()) == scheduler._waiting._idle <= KEPT_ACCOUNTS
    assert all(request.account is accounts[request.tenant] for request in scheduler._requests.values())


def run_step(scheduler: Scheduler, executor: HashingExecutor, now: float = 0.0) -> list[Output]:
    before, preemptions = {request.request_id for request in scheduler._running}, scheduler.counters.preemptions
    decoding = {r.request_id for r in scheduler._running if len(r.tokens) == r.computed + 1 > r.prompt_length}
    plan = scheduler.plan(now)
    planned, running = {chunk.request_id for chunk in plan.chunks}, {r.request_id for r in scheduler._running}
    assert planned, "there is work and nothing is planned"
    assert plan.num_tokens <= max(scheduler.limits.token_budget, len(before))
    assert len(running) <= max(scheduler.limits.batch_size, len(before))
    if scheduler.pace == Pace():
        assert planned == running, "a running request gets no token"
    else:
        assert planned <= running
        assert planned >= decoding & running, "a decoding request gets no token"
    if scheduler.counters.preemptions > preemptions:
        assert running < before, "a step preempts and admits"
    return scheduler.commit(plan, executor.run(plan))


def run_until_idle(scheduler: Scheduler, executor: HashingExecutor, max_steps: int = 100_000) -> list[Output]:
    outputs = []
    for _ in range(max_steps):
        if not scheduler.has_work:
            break
        outputs += run_step(scheduler, executor)
        check_scheduler(scheduler)
    assert not scheduler.has_work, f"requests still run after {max_steps} steps"
    return outputs


def check_idle(scheduler: Scheduler) -> None:
    levels = scheduler.levels()
    assert levels.kv_blocks_free == levels.kv_blocks
    assert (levels.running, levels.waiting, levels.kv_tokens, levels.queued_prompt_tokens) == (0, 0, 0, 0)


def texts(outputs: list[Output]) -> dict[int, list[int]]:
    drawn: dict[int, list[int]] = {}
    for output in outputs:
        drawn.setdefault(output.request_id, [])
        if output.token is not None:
            drawn[output.request_id].append(output.token)
    return drawn
