"""Which tokens of which requests the next step computes. Pure: no clock, no I/O, no model.

The rules, in the order they apply to a step:
1. One token budget. Running requests come first, oldest first, and each decode gets its token: a long prompt is cut
   into chunks around the decodes instead of stopping them. With an inter-token objective and a step law known, chunks
   beside decodes also keep to the time that the objective leaves (`prompt_room.py`); a prompt may then pause.
2. A running request that finds no free block preempts the newest one, which gives all its blocks back and is computed
   again later (recompute). The oldest request is never preempted, so every request ends. Age counts from the first
   start, which is the order of arrival unless late requests were passed over.
3. Waiting requests are admitted in the order of `waiting.py`, tenant by tenant in turn, up to the batch limit, when
   their whole prompt fits the free blocks; they take those blocks at once. A step that preempted admits nothing.
4. Full blocks of equal content, from the first token on, are shared. A block can be found only after the step that
   computed it was committed, and the last token of a prompt is always computed because its logits are needed.

Steps may overlap: `plan` gives the next step while one is in flight (planned, not committed), unless `needs_results`
says that its results must be committed first. See `flight.py`.

Changed limits: a request keeps the maximum sequence length it was added under. A lower batch limit admits nobody until
enough requests have ended; nobody is thrown out for it. A smaller pool preempts the requests that hold blocks beyond
its end; a request that cannot fit the pool any more ends: with `length` if it has output, else with an error.
"""

import math
from bisect import insort
from collections.abc import Callable, Mapping, Sequence

from busload_runtime.contract import Limits, Pace
from busload_runtime.engine.block_pool import Block, BlockPool, chain_digest
from busload_runtime.engine.counters import Counters, Levels
from busload_runtime.engine.flight import Flight
from busload_runtime.engine.plan import PENDING, Chunk, Plan, Sampled
from busload_runtime.engine.prompt_room import PromptRoom
from busload_runtime.engine.prompt_scores import LogitRows, scoring_of
from busload_runtime.engine.request import Output, Request
from busload_runtime.engine.waiting import WaitingQueue, start_order


class RequestRefused(ValueError):
    """A request that cannot run under the limits in force; the message says which and what is allowed."""


class Scheduler:
    """Turns requests into plans: `add` and `abort` at any time, then `plan`, run it, `commit`. Or, where steps overlap:
    `plan` the next one, unless `needs_results`, and then `commit` the one before."""

    def __init__(self, limits: Limits, block_size: int, num_blocks: int, pace: Pace = Pace()) -> None:
        self.limits = limits
        self.pace = pace
        self.block_size = block_size
        self.logit_rows = 0
        """Rows of logits that a step may have where prompts are scored; no fewer than the batch limit in any case."""
        self.counters = Counters()
        self._pool = BlockPool(num_blocks)
        self.capacity = num_blocks * block_size
        """Tokens the whole pool holds."""
        self._requests: dict[int, Request] = {}
        self._running: list[Request] = []
        self._waiting = WaitingQueue(pace)
        self._arrivals = 0
        self._starts = 0
        self._kv_tokens = 0
        self._flights: list[Flight] = []
        """Steps in flight, oldest first: one between steps, two from `plan` to `commit`."""

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def levels(self) -> Levels:
        return Levels(
            running=len(self._running),
            waiting=len(self._waiting),
            queued_prompt_tokens=self._waiting.tokens,
            kv_tokens=self._kv_tokens,
            kv_blocks=self._pool.num_blocks,
            kv_blocks_free=self._pool.free,
        )

    # Requests and limits come and go, also while a step is in flight; `resize` alone waits.

    def add(self, request: Request) -> None:
        """Queues a request. Raises `RequestRefused` when it could never run under the limits in force."""
        length, limit = request.prompt_length, self.limits.max_sequence_length
        if request.request_id in self._requests:
            raise ValueError(f"request id {request.request_id} is already in use")
        if length < 1 or request.max_tokens < 1:
            raise RequestRefused(
                f"a request needs at least 1 prompt token and max_tokens of at least 1, "
                f"got {length} and {request.max_tokens}"
            )
        if length >= limit:
            raise RequestRefused(
                f"the prompt has {length} tokens and maxSequenceLength is {limit}: "
                f"a prompt may have at most {limit - 1} tokens"
            )
        if length > self.capacity:
            raise RequestRefused(self._does_not_fit(length))
        request.max_length = min(length + request.max_tokens, limit)
        request.order = self._arrivals
        self._arrivals += 1
        self._requests[request.request_id] = request
        self._waiting.add(request)

    def abort(self, request_id: int) -> bool:
        """Ends a request; False when the id is unknown (it may just have ended). Its blocks are free at once, or with
        the commit of the step in flight that may write them."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._remove(request)
        return True

    def set_limits(self, limits: Limits) -> None:
        """Puts new limits in force from the next plan on. The pool is a separate matter: see `resize`."""
        self.limits = limits

    def set_pace(self, pace: Pace) -> None:
        """Puts objectives and step law in force from the next plan on."""
        if pace != self.pace:
            self.pace = pace
            self._waiting.set_pace(pace)

    def resize(self, num_blocks: int) -> list[Output]:
        """Changes the size of the pool; returns the ends of the requests that cannot fit it any more. No step may be in
        flight."""
        self._none_in_flight()
        for request in [r for r in self._running if max(r.table, default=-1) >= num_blocks]:
            self._preempt(request)
        self._pool.resize(num_blocks)
        self.capacity = num_blocks * self.block_size
        ended = []
        for request in [r for r in self._requests.values() if len(r.tokens) > self.capacity]:
            self._remove(request)
            if request.drawn:
                ended.append(Output(request.request_id, None, "length"))
            else:
                error = self._does_not_fit(len(request.tokens))
                ended.append(Output(request.request_id, None, "error", error=error))
        return ended

    # One step.

    def plan(self, now: float) -> Plan:
        """The next step. Empty when there is no request, or when all that run wait for the step in flight to end."""
        if len(self._flights) > 1:
            raise RuntimeError("two steps are planned and not committed yet")
        self._assume()
        chunks: list[Chunk] = []
        preemptions = self.counters.preemptions
        room = PromptRoom(self.pace, self.block_size, self._decoding)
        batch, running = self.limits.batch_size, len(self._running)
        rows = LogitRows(max(self.logit_rows, batch), max(running, min(batch, running + len(self._waiting))))
        budget = self._plan_running(chunks, room, rows)
        if self.counters.preemptions == preemptions:
            self._admit(chunks, budget, room, rows, now)
        plan = Plan(tuple(chunks))
        if chunks:
            self._flights.append(Flight(plan))
        return plan

    def needs_results(self) -> bool:
        """Whether the step in flight must be committed before the next can be planned: it draws with penalties, which
        look at all tokens; or scores a prompt, whose rows of logits take memory until they are read; or the next could
        find too few free blocks, and preempt."""
        if not self._flights:
            return False
        for flight in self._flights:
            if any(chunk.history is not None or chunk.scoring is not None for chunk in flight.plan.chunks):
                return True
        free = self._pool.free
        return free < len(self._running) and free < self._blocks_missing(2)

    def commit(self, plan: Plan, sampled: Sequence[Sampled]) -> list[Output]:
        """Takes in the drawn tokens of a step that was computed; returns what to tell the clients."""
        if not self._flights or plan is not self._flights[0].plan:
            raise ValueError("commit takes the oldest plan that is not committed yet, once")
        drawn = {draw.request_id: draw for draw in sampled}
        expected = [c.request_id for c in plan.chunks if c.sampling is not None or c.scoring is not None]
        if len(sampled) != len(expected) or drawn.keys() != set(expected):
            raise ValueError(f"the executor drew tokens for requests {sorted(drawn)}, planned were {sorted(expected)}")
        flight = self._flights.pop(0)
        for blocks in flight.held:
            self._pool.release(blocks)
        requests, size, charges = self._requests, self.block_size, self._waiting.charges
        ended, assumed = flight.ended, flight.assumed
        outputs = []
        self.counters.steps += 1
        for chunk in plan.chunks:
            request_id = chunk.request_id
            count = len(chunk.tokens)
            end = chunk.start + count
            if request_id in ended:
                self._count(ended[request_id], chunk.start, end)
                continue
            request = requests[request_id]
            self._count(request, chunk.start, end)
            if not assumed:
                self._kv_tokens += count
                request.computed = end
            if end > request.reached:
                request.reached = end
            if end // size > request.published:
                self._publish(request, end)
            if chunk.scoring is not None:
                request.prompt_logprobs += drawn[request_id].prompt
            if chunk.sampling is not None:
                if charges:
                    request.account.tokens += 1
                outputs.append(self._draw(request, end, drawn[request_id]))
        return outputs

    def _assume(self) -> None:
        """Leaves the requests of the step in flight as its end will, so that the next one is planned from there.
        `PENDING` stands for a token that is drawn; for none behind which the request ends in any case."""
        for flight in self._flights:
            if flight.assumed:
                continue
            flight.assumed = True
            for chunk in flight.plan.chunks:
                if chunk.request_id in flight.ended:
                    continue
                request = self._requests[chunk.request_id]
                self._kv_tokens += len(chunk.tokens)
                request.computed = end = chunk.length_after
                if chunk.sampling is not None and end + 1 < request.max_length and end < self.capacity:
                    request.tokens.append(PENDING)

    # Many steps at once, for the simulator.

    def decode_steps(self, most: int, now: float) -> int:
        """How many of the next steps, at most `most`, are known to be one decode of each running request and nothing
        else: none of them admits, preempts or computes a prompt, and requests end only in the last of them. The first
        begins at `now`; of the others only those are known that begin up to `decodes_until`."""
        self._none_in_flight()
        running = self._running
        if not running or self._may_admit(now):
            return 0
        steps, longest = most, 0
        for request in running:
            length = len(request.tokens)
            if length != request.computed + 1 or length <= request.prompt_length or length <= request.reached:
                return 0
            if request.stop_token_ids:
                return 0
            longest = max(longest, length)
            steps = min(steps, request.max_length - length)
        steps = min(steps, self.capacity + 1 - longest)
        # Mostly there is room for more blocks than any steps could take; only else each request is looked at.
        if self._pool.free < len(running) * (steps // self.block_size + 1):
            while steps > 0 and self._blocks_missing(steps) > self._pool.free:
                steps //= 2
        return steps

    def decodes_until(self) -> float:
        """Up to this time the answer of `decode_steps` holds, while nothing else is called: then another request is
        the next to be admitted."""
        return math.inf if len(self._running) >= self.limits.batch_size else self._waiting.next_stays_until()

    def decode(self, steps: int, drawn: Mapping[int, int]) -> list[Output]:
        """Does `steps` steps, at most `decode_steps`, as `plan` and `commit` would one by one, each request drawing the
        token `drawn[request_id]` in each of them. Returns what the last `commit` would.

        Blocks are taken and published in the order of single steps, so that even block ids come out the same.
        """
        running, size, counters = self._running, self.block_size, self.counters
        charges = self._waiting.charges
        batch = len(running)
        counters.steps += steps
        counters.step_batch += steps * batch
        counters.generated_tokens += steps * batch
        # In the first step each reads what it holds and the token that the step writes, then one token more each time.
        counters.step_kv_tokens += steps * (self._kv_tokens + batch) + batch * (steps * (steps - 1) // 2)
        self._kv_tokens += steps * batch
        events: list[tuple[int, int, int]] = []  # (step, 0: take a block | 1: publish one, position in the batch)
        for position, request in enumerate(running):
            length = len(request.tokens)
            take, publish = len(request.blocks) * size - length + 2, (request.published + 1) * size - length + 1
            if take <= steps:
                events += [(step, 0, position) for step in range(take, steps + 1, size)]
            if publish <= steps:
                events += [(step, 1, position) for step in range(publish, steps + 1, size)]
            request.computed = request.reached = length - 1 + steps
            tokens = [drawn[request.request_id]] * steps
            request.tokens += tokens
            if charges:
                request.account.tokens += steps
            if request.history is not None:
                request.history.extend(tokens)
        for _, kind, position in sorted(events):
            request = running[position]
            if kind == 0:
                self._take(request, 1)
            else:
                index = request.published
                self._pool.publish(request.blocks[index], self._digest(request, index))
                request.published += 1
        outputs, capacity = [], self.capacity
        for request in running.copy():
            length = len(request.tokens)
            ends = length >= request.max_length or length > capacity
            outputs.append(Output(request.request_id, drawn[request.request_id], "length" if ends else None))
            if ends:
                self._remove(request)
        return outputs

    def _may_admit(self, now: float) -> bool:
        """Whether the next steps could admit somebody. Who waits for memory goes on waiting while a batch only grows,
        unless that batch publishes a block which it looks for."""
        if len(self._running) >= self.limits.batch_size:
            return False
        waiting = self._waiting.next(now)
        if waiting is None:
            return False
        if self._waiting.contested:
            return True
        if any(request.tokens[0] == waiting.tokens[0] and request.salt == waiting.salt for request in self._running):
            return True
        return self._missing(waiting, self._cached_blocks(waiting)) <= self._pool.free

    def _blocks_missing(self, steps: int) -> int:
        """Blocks that the running requests take in so many decode steps."""
        return sum(
            max(0, self._blocks_for(len(request.tokens) + steps - 1) - len(request.blocks)) for request in self._running
        )

    def _decoding(self) -> tuple[int, int]:
        """Decodes of the next step: requests, and KV tokens that they read."""
        lengths = [len(r.tokens) for r in self._running if len(r.tokens) == r.computed + 1 > r.prompt_length]
        return len(lengths), sum(lengths)

    def _plan_running(self, chunks: list[Chunk], room: PromptRoom, rows: LogitRows) -> int:
        """Plans the running requests; returns the tokens left in the budget."""
        running, size = self._running, self.block_size
        budget = max(self.limits.token_budget, len(running))  # a lowered limit still gives every request its token
        position = 0
        while position < len(running):
            request = running[position]
            newer = len(running) - position - 1
            start, length = request.computed, len(request.tokens)
            count = min(length - start, budget - newer)
            if (length > start + 1 or length == request.prompt_length) and count:
                count = rows.tokens(request, start, room.tokens(start, count))
                room.take(start, count)
            end = start + count
            if end > len(request.blocks) * size and not self._make_room(request, end):
                break
            if count:
                chunks.append(self._chunk(request, count))
                budget -= count
            position += 1
        return budget

    def _make_room(self, request: Request, length: int) -> bool:
        """Takes the blocks `request` misses for `length` tokens, preempting the newest; False if that was itself."""
        missing = self._blocks_for(length) - len(request.blocks)
        while missing > self._pool.free:
            newest = self._running[-1]
            self._preempt(newest)
            if newest is request:
                return False
        self._take(request, missing)
        return True

    def _admit(self, chunks: list[Chunk], budget: int, room: PromptRoom, rows: LogitRows, now: float) -> None:
        while budget > 0 and len(self._running) < self.limits.batch_size:
            request = self._waiting.next(now)
            if request is None:
                return
            cached = self._cached_blocks(request)
            start = len(cached) * self.block_size
            count = rows.tokens(request, start, room.tokens(start, min(len(request.tokens) - start, budget)))
            if count == 0 or self._missing(request, cached) > self._pool.free:
                return
            self._start(request, cached, self._blocks_for(len(request.tokens)) - len(cached), now)
            room.take(start, count)
            chunks.append(self._chunk(request, count))
            budget -= count

    def _missing(self, request: Request, cached: list[Block]) -> int:
        """Free blocks that the request needs to start: new ones and those of its cached ones that nobody uses."""
        return self._blocks_for(len(request.tokens)) - sum(1 for block in cached if block.users)

    def _start(self, request: Request, cached: list[Block], missing: int, now: float) -> None:
        self._waiting.remove(request)
        for block in cached:
            self._pool.share(block)
        request.blocks.extend(cached)
        request.table = tuple(block.block_id for block in cached)
        request.published = len(cached)
        request.computed = len(cached) * self.block_size
        self._kv_tokens += request.computed
        self._take(request, missing)
        if request.started is None:
            request.started = now
            request.start_order = self._starts
            self._starts += 1
            request.cached_tokens = request.computed
            self._waiting.charge_start(request)
            self.counters.prefix_queried_tokens += request.prompt_length
            self.counters.prefix_hit_tokens += request.computed
        request.running = True
        insort(self._running, request, key=start_order)

    def _chunk(self, request: Request, count: int) -> Chunk:
        start, tokens, table = request.computed, request.tokens, request.table
        end, length = start + count, len(tokens)
        last = end == length
        needed = -(-end // self.block_size)
        # Positional, because this runs for every token of every request.
        return Chunk(
            request.request_id,
            (tokens[-1],) if last and count == 1 else tuple(tokens[start:end]),
            start,
            table if len(table) == needed else table[:needed],
            request.sampling if last else None,
            length - request.prompt_length,
            request.history if last else None,
            scoring_of(request, start, end) if request.score_prompt else None,
        )

    def _draw(self, request: Request, end: int, draw: Sampled) -> Output:
        """Puts a drawn token at position `end` and ends the request if it was the last one."""
        token = draw.token
        self.counters.generated_tokens += 1
        if len(request.tokens) == end:
            request.tokens.append(token)
        else:
            request.tokens[end] = token  # `PENDING` was there
        if request.history is not None:
            request.history.append(token)
        output = Output(request.request_id, token, logprobs=draw.logprobs)
        length = end + 1
        drawn = length - request.prompt_length
        if drawn == 1 and request.started is not None:
            output.cached_tokens = request.cached_tokens
            output.queue_seconds = request.started - request.arrived
            output.prompt_logprobs = request.prompt_logprobs if request.score_prompt else None
        if drawn >= request.min_tokens and token in request.stop_token_ids:
            output.finish_reason = "stop"
        elif length >= request.max_length or length > self.capacity:
            output.finish_reason = "length"
        if output.finish_reason is not None:
            self._remove(request)
        return output

    def _count(self, request: Request, start: int, end: int) -> None:
        """Counts the tokens at positions `start` .. `end` - 1, which a step has computed: what it was for or not."""
        counters = self.counters
        counters.step_kv_tokens += end
        if start >= request.prompt_length and end - start == 1:
            counters.step_batch += 1
        else:
            counters.step_prefill_tokens += end - start
        if start < request.reached and request.running:
            counters.recomputed_tokens += min(end, request.reached) - start

    # Prefix cache.

    def _cached_blocks(self, request: Request) -> list[Block]:
        """The leading blocks of the request that are cached, short of the block of its last token."""
        blocks: list[Block] = []
        if request.unscored:
            return blocks
        for index in range((len(request.tokens) - 1) // self.block_size):
            block = self._pool.find(self._digest(request, index))
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _publish(self, request: Request, end: int) -> None:
        """Offers the blocks that are full of tokens before position `end`: they are computed, and known."""
        for index in range(request.published, end // self.block_size):
            self._pool.publish(request.blocks[index], self._digest(request, index))
        request.published = end // self.block_size

    def _digest(self, request: Request, index: int) -> bytes:
        """Digest of full block `index`; those before it are known already."""
        digests = request.digests
        if index == len(digests):
            first = index * self.block_size
            parent = digests[-1] if digests else request.salt
            digests.append(chain_digest(parent, request.tokens[first : first + self.block_size]))
        return digests[index]

    # Queues and blocks.

    def _preempt(self, request: Request) -> None:
        self._none_in_flight()
        self._leave_batch(request, self._pool.release)
        self._waiting.add_preempted(request)
        self.counters.preemptions += 1

    def _remove(self, request: Request) -> None:
        release: Callable[[list[Block]], None] = self._pool.release
        for flight in self._flights:
            if flight.end(request):
                release = flight.held.append
        if request.running:
            self._leave_batch(request, release)
        else:
            self._waiting.remove(request)
        self._waiting.end(request)
        del self._requests[request.request_id]

    def _leave_batch(self, request: Request, release: Callable[[list[Block]], None]) -> None:
        self._running.remove(request)
        release(request.blocks)
        self._kv_tokens -= request.computed
        request.blocks = []
        request.table = ()
        request.computed = 0
        request.running = False

    def _take(self, request: Request, count: int) -> None:
        blocks = [self._pool.take() for _ in range(count)]
        request.blocks.extend(blocks)
        request.table += tuple(block.block_id for block in blocks)

    def _blocks_for(self, length: int) -> int:
        return -(-length // self.block_size)

    def _none_in_flight(self) -> None:
        if self._flights:
            raise RuntimeError("a step is planned and not committed yet; commit it first")

    def _does_not_fit(self, length: int) -> str:
        return (
            f"the request has {length} tokens and the KV cache holds {self.capacity}: "
            "shorten the prompt, or raise kvCachePercent or the memory of the pod"
        )
