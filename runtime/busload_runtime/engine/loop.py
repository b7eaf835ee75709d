"""The engine: a scheduler, an executor and a clock. One thread; every method runs between two steps."""

import hashlib
import os
import time
from collections.abc import Callable

from busload_runtime.contract import Limits, Pace
from busload_runtime.engine.memory import MemoryPlan
from busload_runtime.engine.messages import Stats, Submit, TokenOut
from busload_runtime.engine.plan import Chunk, Plan, SamplingParams, Shaping
from busload_runtime.engine.probe import Probed, probe
from busload_runtime.engine.request import Output, Request
from busload_runtime.engine.scheduler import RequestRefused, Scheduler
from busload_runtime.engine.statistics import Statistics
from busload_runtime.executors.contract import Executor

SPARE = 8 << 20
"""Bytes that a step of `Engine.probe` may need beyond the steps that the limits allow: a part of what is set aside for
what grows."""


class Engine:
    """Runs requests on one executor. The executor's pool is reserved and sized here.

    Raises `LimitsImpossible` when the limits cannot be run in the memory of `memory`.
    """

    def __init__(
        self,
        executor: Executor,
        memory: MemoryPlan,
        limits: Limits,
        clock: Callable[[], float] = time.monotonic,
        pace: Pace = Pace(),
    ) -> None:
        self._executor = executor
        self._memory = memory
        self._clock = clock
        num_blocks = memory.num_blocks(limits)
        executor.reserve(memory.max_blocks)
        executor.resize(num_blocks)
        self._scheduler = Scheduler(limits, executor.block_size, num_blocks, pace)
        self._statistics = Statistics(clock())
        self._secret = os.urandom(32)

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def warm_up(self) -> None:
        """Computes one real token, outside all counters. Block 0 is blank again afterwards for all the pool knows."""
        chunk = Chunk(request_id=0, tokens=(0,), start=0, blocks=(0,), sampling=SamplingParams(temperature=0.0))
        self._executor.run(Plan((chunk,)))

    def probe(self) -> Probed | None:
        """Tries steps of several shapes, outside all counters; None when the pool is too small for it."""
        limits, memory = self._scheduler.limits, self._memory
        planned = memory.activations(limits.token_budget, limits.batch_size) + SPARE
        sizes = [2**k for k in range(13) if memory.activations(limits.token_budget, 2**k) <= planned]
        num_blocks = self._scheduler.levels().kv_blocks
        return probe(self._executor, num_blocks, limits.token_budget, max(sizes, default=1), self._clock)

    def submit(self, message: Submit) -> list[TokenOut]:
        """Queues a request; returns its end when it cannot run."""
        now = self._advance()
        vocabulary = self._executor.vocab_size
        for what, ids in (("prompt token", message.tokens), ("logit_bias", message.logit_bias)):
            if ids and not 0 <= min(ids) <= max(ids) < vocabulary:
                return [_refused(message, f"{what} ids must be from 0 to {vocabulary - 1}")]
        sent = min(message.submitted_at, now) if message.submitted_at > 0 else now
        request = Request(
            request_id=message.request_id,
            tokens=list(message.tokens),
            max_tokens=message.max_tokens,
            min_tokens=message.min_tokens,
            stop_token_ids=frozenset(message.stop_token_ids),
            sampling=_sampling(message),
            salt=self._salt_of(message.tenant),
            arrived=sent,
            tenant=message.tenant,
            weight=message.weight,
        )
        try:
            self._scheduler.add(request)
        except RequestRefused as refused:
            return [_refused(message, str(refused))]
        self._statistics.waited_before(now - sent)
        return []

    def abort(self, request_id: int) -> None:
        """Ends a request and frees its blocks; unknown ids are ignored, since a request may end while Abort travels."""
        self._advance()
        self._scheduler.abort(request_id)

    def apply(self, limits: Limits, pace: Pace = Pace()) -> list[TokenOut]:
        """Puts limits, objectives and step law in force; returns the ends of requests that fit the pool no more.

        Raises `LimitsImpossible` and changes nothing when they cannot be run.
        """
        num_blocks = self._memory.num_blocks(limits)
        self._advance()
        self._scheduler.set_limits(limits)
        self._scheduler.set_pace(pace)
        if num_blocks == self._scheduler.levels().kv_blocks:
            return []
        ended = self._scheduler.resize(num_blocks)
        self._executor.resize(num_blocks)
        return [_token_out(output) for output in ended]

    def step(self) -> list[TokenOut]:
        """Computes one step and returns what it produced. An exception of the executor leaves the engine unusable."""
        started = self._advance()
        plan = self._scheduler.plan(started)
        sampled = self._executor.run(plan)
        finished = self._advance()
        executor = self._executor
        self._statistics.step(
            finished - started, plan, executor.weight_bytes, executor.bytes_per_block / executor.block_size
        )
        return [_token_out(output) for output in self._scheduler.commit(plan, sampled)]

    def stats(self) -> Stats:
        self._advance()
        return self._statistics.snapshot(self._scheduler.counters, self._scheduler.levels())

    def _salt_of(self, tenant: str) -> bytes:
        """Digests start from a secret of this process and the tenant: what another tenant sent is never a hit, and hits
        depend on nothing that a client can know."""
        return hashlib.blake2b(tenant.encode(), key=self._secret, digest_size=32).digest()

    def _advance(self) -> float:
        now = self._clock()
        self._statistics.advance(now, self._scheduler.levels())
        return now


def _sampling(message: Submit) -> SamplingParams:
    shaping = Shaping(
        logit_bias=tuple(message.logit_bias.items()),
        repetition_penalty=message.repetition_penalty,
        frequency_penalty=message.frequency_penalty,
        presence_penalty=message.presence_penalty,
    )
    return SamplingParams(
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        seed=message.seed,
        min_p=message.min_p,
        logprobs=message.logprobs,
        shaping=None if shaping == Shaping() else shaping,
    )


def _refused(message: Submit, error: str) -> TokenOut:
    return TokenOut(message.request_id, None, "error", error=error)


def _token_out(output: Output) -> TokenOut:
    return TokenOut(
        output.request_id,
        output.token,
        output.finish_reason,
        output.cached_tokens,
        output.queue_seconds,
        output.error,
        output.logprobs,
    )
