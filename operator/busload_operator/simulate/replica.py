"""One simulated pod: the runtime's own scheduler and block pool, on a clock that the step law moves.

What the two processes of a real pod do to time is kept: a request that arrives during a step is seen when the step
ends, a step's tokens exist when it ends, new limits apply between two steps, and a scrape shows the newest finished
step. Steps in which nothing but decoding can happen are computed many at once (`Scheduler.decode`), with the same
result as one by one.
"""

import math
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from busload_operator.simulate.hardware import Hardware, Noise, SetupError
from busload_operator.simulate.workload import Arrival, prompt_tokens
from busload_operator.tuning import Counters
from busload_operator.tuning.counters import OPTIONAL_SAMPLES
from busload_runtime.contract import SEQUENCE_LENGTHS, Limits, Pace
from busload_runtime.engine.plan import Plan, Sampled
from busload_runtime.engine.request import Output, Request
from busload_runtime.engine.scheduler import RequestRefused, Scheduler

_MOST_STEPS = 64
"""Decode steps planned at once; what an arrival cuts off is thrown away."""


@dataclass(slots=True, eq=False)
class Job:
    """A request. Times in seconds of the simulation."""

    request_id: int
    arrival: Arrival
    pod: str = ""
    first: float | None = None
    """When its first token existed in the engine."""
    last: float | None = None
    """When its newest token existed there."""
    front_end: float = 0.0
    """Seconds that its client sees each token later, counted from its arrival."""
    output: int = 0
    """Tokens it got; set at the end."""
    failed: str = ""
    """Why it got no full answer: too_long, queue_full, cut_short (by maxSequenceLength or the pool), pool_too_small,
    pod_lost, no_pod, unfinished. Empty: it got one."""

    @property
    def time_to_first_token(self) -> float | None:
        """As its client sees it."""
        return None if self.first is None else self.first - self.arrival.at + self.front_end

    @property
    def time_per_output_token(self) -> float:
        """Mean gap between its tokens; 0 for a single one."""
        if self.first is None or self.last is None or self.output < 2:
            return 0.0
        return (self.last - self.first) / (self.output - 1)


@dataclass(slots=True)
class _Sums:
    """What a pod counts beside its scheduler: the engine's integrals and what the HTTP process sees."""

    busy_seconds: float = 0.0
    batch_seconds: float = 0.0
    queue_seconds: float = 0.0
    kv_token_seconds: float = 0.0
    arrived: int = 0
    prompt_tokens_arrived: int = 0
    ttft_sum: float = 0.0
    ttft_count: int = 0
    itl_sum: float = 0.0
    itl_count: int = 0
    output_tokens: int = 0
    finished: int = 0
    finished_prompt_tokens: int = 0
    finished_kv_token_steps: float = 0.0
    ttft_judged: int = 0
    ttft_missed: int = 0
    itl_judged: int = 0
    itl_missed: int = 0
    too_long: int = 0
    answers_cut: int = 0
    sequence_lengths: list[int] = field(default_factory=lambda: [0] * (len(SEQUENCE_LENGTHS) + 1))
    """Finished requests by the smallest bound that holds them; the last are longer than all."""


class Replica:
    """A pod from `ready_at` on. `finished` gathers the jobs that ended until somebody takes them.

    Raises `SetupError` when it is to start with limits that its memory cannot hold.
    """

    def __init__(
        self,
        name: str,
        hardware: Hardware,
        limits: Limits,
        generation: int,
        created: float,
        ready_at: float,
        seed: int,
        pace: Pace = Pace(),
    ) -> None:
        self.name, self.created, self.ready_at = name, created, ready_at
        self.draining_since: float | None = None
        self.refused_limits = ""
        """Why the newest limits were not applied."""
        self.finished: list[Job] = []
        self.assigned = 0
        """Requests that were routed here."""
        self._hardware, self._pace = hardware, pace
        self._noise = Noise(seed, name, hardware.noise, hardware.drift)
        self._start(limits, generation)

    def _start(self, limits: Limits, generation: int) -> None:
        """The process as it is when it becomes ready."""
        blocks = self._hardware.num_blocks(limits)
        self._scheduler = Scheduler(limits, self._hardware.block_size, blocks, self._pace)
        self.limits, self.generation = limits, generation
        self._next_limits: tuple[int, Limits] | None = None
        self._jobs: dict[int, Job] = {}
        self._requests: dict[int, Request] = {}
        self._tokens: dict[int, int] = {}
        self._inbox: list[Job] = []
        self._sums = _Sums()
        self._clock = self.ready_at
        """Up to here everything is counted."""
        self._plan: Plan | None = None
        self._ends: list[float] = []
        """When the steps under way end: one that was planned, or several decodes."""
        self._show()

    # What the fleet asks.

    @property
    def requests(self) -> int:
        """Requests here, running and waiting."""
        return len(self._jobs)

    @property
    def next_event(self) -> float:
        """When the steps under way end; infinite without work."""
        return self._ends[-1] if self._ends else math.inf

    @property
    def idle_since(self) -> float:
        """When its last step ended; meant for a pod without requests."""
        return self._clock

    def outstanding_tokens(self, now: float) -> int:
        """Tokens of all requests here, prompts that are not computed yet included."""
        decoded = bisect_right(self._ends, now) * self._scheduler.levels().running if self._plan is None else 0
        waiting = sum(job.arrival.prompt for job in self._inbox)
        return sum(len(request.tokens) for request in self._requests.values()) + decoded + waiting

    # What happens to it.

    def submit(self, job: Job, now: float) -> None:
        """A request arrives. It may be refused at once: `job.failed` says why."""
        self.advance(now)
        job.pod, job.front_end = self.name, self._hardware.front_end
        self.assigned += 1
        if (reason := self._refuses(job)) is not None:
            job.failed = reason
            self._sums.too_long += reason == "too_long"
            return
        self._sums.arrived += 1
        self._sums.prompt_tokens_arrived += job.arrival.prompt
        self._jobs[job.request_id] = job
        self._inbox.append(job)
        self._wake(now)

    def apply(self, limits: Limits, generation: int, now: float) -> None:
        """New limits, in force at the next boundary of a step, or from the start of a pod that is not ready yet."""
        if now < self.ready_at:
            self._start(limits, generation)
            return
        self.advance(now)
        self._next_limits = (generation, limits)
        self._wake(now)

    def restart(self, now: float, ready_at: float) -> list[Job]:
        """The process ends and starts anew: counters from zero. Returns the requests it lost."""
        self.advance(now)
        lost = list(self._jobs.values())
        for job in lost:
            job.failed = "pod_lost"
        generation, limits = self._next_limits or (self.generation, self.limits)
        self.ready_at = ready_at
        self._start(limits, generation)
        return lost

    def advance(self, now: float) -> None:
        """Everything that ends at or before `now`."""
        while self._ends and self._ends[-1] <= now:
            self._end_steps(len(self._ends))
            self._begin(self._clock)

    def counters(self, now: float) -> Counters:
        """As its /metrics would say: of the newest finished step, or of now when nothing is under way."""
        self.advance(now)
        if self._plan is None and (done := bisect_right(self._ends, now)):
            self._end_steps(done)
            self._show()
        if not self._ends:
            self._account(now)
            self._show()
        levels, preemptions = self._shown
        work, sums, limits = self._scheduler.counters, self._sums, self.limits
        counted: dict[str, Any] = {name: float(getattr(sums, name)) for name in OPTIONAL_SAMPLES}
        return Counters(
            clock=self._clock,
            steps=work.steps,
            busy_seconds=sums.busy_seconds,
            step_batch=work.step_batch,
            step_kv_tokens=work.step_kv_tokens,
            prefill_tokens=work.step_prefill_tokens,
            generated_tokens=work.generated_tokens,
            arrived=sums.arrived,
            preemptions=preemptions,
            batch_seconds=sums.batch_seconds,
            queue_seconds=sums.queue_seconds,
            kv_token_seconds=sums.kv_token_seconds,
            ttft_sum=sums.ttft_sum,
            ttft_count=sums.ttft_count,
            itl_sum=sums.itl_sum,
            itl_count=sums.itl_count,
            output_tokens_sum=sums.output_tokens,
            finished=sums.finished,
            running=levels.running,
            waiting=levels.waiting,
            kv_blocks=levels.kv_blocks,
            kv_blocks_free=levels.kv_blocks_free,
            kv_block_size=self._scheduler.block_size,
            generation=self.generation,
            max_sequence_length=limits.max_sequence_length,
            batch_size=limits.batch_size,
            kv_cache_percent=limits.kv_cache_percent,
            token_budget=limits.token_budget,
            sequence_lengths=tuple(accumulate(map(float, sums.sequence_lengths[:-1]))),
            **counted,
        )

    # How steps go.

    def _wake(self, now: float) -> None:
        """Something new must be seen at the next boundary: now, or when the step in progress ends."""
        if not self._ends:
            self._account(now)
            self._begin(now)
        elif self._plan is None:
            del self._ends[bisect_right(self._ends, now) + 1 :]

    def _begin(self, now: float) -> None:
        """Takes in what is new, then starts the next step or steps."""
        self._show()
        if self._next_limits is not None:
            self._apply(*self._next_limits)
            self._next_limits = None
        for job in self._inbox:
            self._queue(job, now)
        self._inbox.clear()
        scheduler = self._scheduler
        if (steps := scheduler.decode_steps(_MOST_STEPS, now)) > 0:
            self._ends = self._decode_ends(steps, now)
        elif scheduler.has_work:
            self._plan = plan = scheduler.plan(now)
            batch, prefill, kv = 0, 0, 0
            for chunk in plan.chunks:
                # The rule of the scheduler's own counters: one token past the prompt is a decode.
                kv += chunk.length_after
                tokens = len(chunk.tokens)
                if tokens == 1 and chunk.start >= self._jobs[chunk.request_id].arrival.prompt:
                    batch += 1
                else:
                    prefill += tokens
            self._ends = [now + self._seconds(batch, kv, prefill, 0, now)]

    def _show(self) -> None:
        """Keeps what a scrape sees until the next boundary: the engine reports between two steps, before it takes in
        anything or plans the next one."""
        self._shown = self._scheduler.levels(), self._scheduler.counters.preemptions

    def _decode_ends(self, steps: int, now: float) -> list[float]:
        levels, until = self._scheduler.levels(), self._scheduler.decodes_until()
        batch = levels.running
        ends: list[float] = []
        kv = levels.kv_tokens + batch  # attention also reads the token that the step itself writes
        for step in range(steps):
            if ends and now > until:
                break
            now += self._seconds(batch, kv, 0, step, now)
            kv += batch
            ends.append(now)
        return ends

    def _seconds(self, batch: int, kv_tokens: int, prefill: int, ahead: int, now: float) -> float:
        """Time of the step that is `ahead` steps after the next one."""
        seconds = self._hardware.law.seconds(batch, kv_tokens, prefill)
        return seconds * self._noise.factor(self._scheduler.counters.steps + ahead, now)

    def _end_steps(self, count: int) -> None:
        """The first `count` of the steps under way have ended."""
        ends, self._ends = self._ends[:count], self._ends[count:]
        if self._plan is not None:
            self._end_planned(self._plan, ends[0])
            return
        levels, sums, start = self._scheduler.levels(), self._sums, self._clock
        batch, waiting, kv_tokens = levels.running, levels.waiting, levels.kv_tokens
        outputs = self._scheduler.decode(len(ends), self._tokens)
        jobs = [self._jobs[output.request_id] for output in outputs]
        # Whose last token is older than the step before was preempted: its gap is longer than the step.
        gaps = [ends[0] - job.last for job in jobs if job.last is not None and job.last != start]
        for gap in gaps:
            sums.itl_sum += gap
        going_on = batch - len(gaps)
        for end in ends:
            seconds = end - self._clock
            sums.busy_seconds += seconds
            sums.batch_seconds += batch * seconds
            sums.queue_seconds += waiting * seconds
            sums.kv_token_seconds += kv_tokens * seconds
            sums.itl_sum += going_on * seconds
            going_on = batch
            kv_tokens += batch
            self._clock = end
        sums.itl_count += batch * len(ends)
        for job, output in zip(jobs, outputs, strict=True):
            job.last = self._clock
            if output.finish_reason is not None:
                self._finish(output)

    def _end_planned(self, plan: Plan, end: float) -> None:
        start, sums = self._clock, self._sums
        self._account(end)
        seconds = end - start
        sums.busy_seconds += seconds
        self._plan = None
        sampled = [Sampled(c.request_id, self._tokens[c.request_id]) for c in plan.chunks if c.sampling is not None]
        going_on = 0
        for output in self._scheduler.commit(plan, sampled):
            job = self._jobs[output.request_id]
            if job.last is None:
                job.first = end
                first = end - job.arrival.at + job.front_end
                sums.ttft_sum += first
                sums.ttft_count += 1
                if (objective := self._pace.time_to_first_token) is not None:
                    sums.ttft_judged += 1
                    sums.ttft_missed += first > objective
            elif job.last == start:
                going_on += 1
            else:  # it was preempted in between
                sums.itl_sum += end - job.last
                sums.itl_count += 1
            job.last = end
            if output.finish_reason is not None:
                self._finish(output)
        sums.itl_sum += going_on * seconds
        sums.itl_count += going_on

    def _account(self, now: float) -> None:
        """Integrates the levels, which held since the last time."""
        seconds = now - self._clock
        levels, sums = self._scheduler.levels(), self._sums
        sums.batch_seconds += levels.running * seconds
        sums.queue_seconds += levels.waiting * seconds
        sums.kv_token_seconds += levels.kv_tokens * seconds
        self._clock = now

    # Who enters and leaves.

    def _refuses(self, job: Job) -> str | None:
        """The HTTP process's rule: seats of the batch and of the queue, prompt tokens that wait, the longest length."""
        limits, levels = self.limits, self._scheduler.levels()
        if job.arrival.prompt >= limits.max_sequence_length:
            return "too_long"
        short = levels.waiting > 0 and levels.running < limits.batch_size
        seats = levels.running if short else limits.batch_size
        if self.requests + 1 > seats + limits.max_queued_requests:
            return "queue_full"
        tokens = levels.queued_prompt_tokens + sum(waiting.arrival.prompt for waiting in self._inbox)
        return "queue_full" if tokens and tokens + job.arrival.prompt > limits.max_queued_tokens else None

    def _queue(self, job: Job, now: float) -> None:
        request = Request(
            job.request_id,
            prompt_tokens(job.arrival, job.request_id),
            max(1, job.arrival.output),
            arrived=job.arrival.at,
        )
        try:
            self._scheduler.add(request)
        except RequestRefused:
            # The limits changed between its arrival and the end of the step.
            job.failed = "too_long"
            self._sums.too_long += 1
            self._leave(job)
            return
        self._requests[job.request_id] = request
        self._tokens[job.request_id] = -1 - job.request_id
        self._sums.queue_seconds += now - job.arrival.at

    def _apply(self, generation: int, limits: Limits) -> None:
        try:
            blocks = self._hardware.num_blocks(limits)
        except SetupError as error:
            self.refused_limits = str(error)
            return
        self.refused_limits, self.generation, self.limits = "", generation, limits
        self._scheduler.set_limits(limits)
        if blocks != self._scheduler.levels().kv_blocks:
            for output in self._scheduler.resize(blocks):
                self._finish(output)

    def _finish(self, output: Output) -> None:
        job = self._jobs[output.request_id]
        job.output = self._requests[output.request_id].drawn
        if output.finish_reason == "error":
            job.failed = "pool_too_small"
        elif job.output < job.arrival.output:
            job.failed = "cut_short"
        self._count_finished(job)
        self._leave(job)

    def _count_finished(self, job: Job) -> None:
        sums, prompt, output = self._sums, job.arrival.prompt, job.output
        sums.output_tokens += output
        sums.finished += 1
        sums.sequence_lengths[bisect_left(SEQUENCE_LENGTHS, prompt + output)] += 1
        # Whom a smaller pool has ended was not cut by the limit.
        at_limit = output < job.arrival.output and prompt + output >= self._requests[job.request_id].max_length
        sums.answers_cut += at_limit
        sums.finished_prompt_tokens += prompt
        sums.finished_kv_token_steps += output * (prompt + output / 2)
        if output > 1 and (objective := self._pace.inter_token_latency) is not None:
            sums.itl_judged += 1
            sums.itl_missed += job.time_per_output_token > objective

    def _leave(self, job: Job) -> None:
        del self._jobs[job.request_id]
        self._requests.pop(job.request_id, None)
        self._tokens.pop(job.request_id, None)
        self.finished.append(job)
