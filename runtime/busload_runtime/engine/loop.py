"""The engine: a scheduler, an executor and a clock. One thread; every method runs between two steps.

With an executor whose steps run beside the caller (`Overlapping`), the next step is planned and launched while one
runs, and the tokens of that one are taken in afterwards: planning, sending and receiving cost no time of the device.
Other executors compute a step before it is returned from, and never is one in flight between two calls.
"""

import hashlib
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from busload_runtime.contract import Limits, Pace
from busload_runtime.engine.grammar import Grammars, wrong_grammar
from busload_runtime.engine.memory import MemoryPlan
from busload_runtime.engine.messages import GRAMMAR_ERROR, Stats, Submit, TokenOut
from busload_runtime.engine.own_law import OwnLaw
from busload_runtime.engine.plan import Chunk, Plan, SamplingParams, Shaping
from busload_runtime.engine.probe import Probed, probe
from busload_runtime.engine.request import Output, Request
from busload_runtime.engine.scheduler import RequestRefused, Scheduler
from busload_runtime.engine.statistics import Statistics
from busload_runtime.executors.contract import Executor, Pending, launcher
from busload_runtime.grammar.errors import GrammarError

SPARE = 8 << 20
"""Bytes that a step of `Engine.probe`, or one that scores prompts, may need beyond the steps that the limits allow: a
part of what is set aside for what grows."""


@dataclass(slots=True)
class _Launched:
    plan: Plan
    pending: Pending
    started: float
    """When its plan was made."""
    constrained: bool
    """Whether the next plan depends on what it draws, because a grammar follows it."""


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
        grammars: Grammars | None = None,
        plans_by_own_law: bool = False,
    ) -> None:
        """`plans_by_own_law`: nobody will tell a step law, so steps are planned by the one that is found here."""
        self._executor = executor
        self._launch, self._most_in_flight = launcher(executor)
        self._in_flight: deque[_Launched] = deque()
        self._last_result = clock()
        self._memory = memory
        self._clock = clock
        self._grammars = grammars
        num_blocks = memory.num_blocks(limits)
        executor.reserve(memory.max_blocks)
        executor.resize(num_blocks)
        self._scheduler = Scheduler(limits, executor.block_size, num_blocks, pace)
        self._scheduler.logit_rows = self._logit_rows(limits)
        self._statistics = Statistics(clock())
        self._secret = os.urandom(32)
        self._plans_by_own_law = plans_by_own_law
        self._own_law = OwnLaw(None)

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or bool(self._in_flight)

    def warm_up(self) -> None:
        """Computes one real token, outside all counters. Block 0 is blank again afterwards for all the pool knows."""
        chunk = Chunk(request_id=0, tokens=(0,), start=0, blocks=(0,), sampling=SamplingParams(temperature=0.0))
        self._executor.run(Plan((chunk,)))

    def probe(self) -> Probed | None:
        """Tries steps of several shapes, outside all counters; None when the pool is too small for it."""
        budget = self._scheduler.limits.token_budget
        num_blocks = self._scheduler.levels().kv_blocks
        probed = probe(self._executor, num_blocks, budget, self._scheduler.logit_rows, self._clock)
        if probed is not None:
            self._own_law = OwnLaw(probed.law)
            self._plan_by_own_law()
        return probed

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
            score_prompt=message.score_prompt and message.logprobs is not None,
        )
        if message.grammar:
            return self._constrain(request, message.grammar)
        return self._add(request)

    def compiled(self) -> list[TokenOut]:
        """Queues the requests whose grammar is ready now; returns the ends of those that cannot run."""
        outputs = []
        for request, error in self._grammars.compiled() if self._grammars is not None else ():
            outputs += self._add(request) if error is None else [_no_grammar(request, error)]
        return outputs

    def abort(self, request_id: int) -> None:
        """Ends a request and frees its blocks; unknown ids are ignored, since a request may end while Abort travels."""
        self._advance()
        self._scheduler.abort(request_id)
        if self._grammars is not None:
            self._grammars.drop(request_id)

    def apply(self, limits: Limits, pace: Pace = Pace()) -> list[TokenOut]:
        """Puts limits, objectives and step law in force; returns the ends of requests that fit the pool no more, and
        what the step drew that was in flight, if the pool changes.

        Raises `LimitsImpossible` and changes nothing when they cannot be run.
        """
        num_blocks = self._memory.num_blocks(limits)
        self._advance()
        self._scheduler.set_limits(limits)
        self._scheduler.logit_rows = self._logit_rows(limits)
        self._scheduler.set_pace(pace)
        if num_blocks == self._scheduler.levels().kv_blocks:
            return []
        outputs = self._settle()
        ended = self._scheduler.resize(num_blocks)
        if self._grammars is not None:
            for output in ended:
                self._grammars.drop(output.request_id)
        self._executor.resize(num_blocks)
        return outputs + [_token_out(output) for output in ended]

    def step(self) -> list[TokenOut]:
        """Launches one step, waits for all but as many as may be in flight, and returns what those produced. An
        exception of the executor leaves the engine unusable."""
        outputs = []
        if self._in_flight and (self._in_flight[-1].constrained or self._scheduler.needs_results()):
            outputs = self._settle()
        started = self._advance()
        plan = self._scheduler.plan(started)
        if not plan.chunks:
            return outputs + self._settle()
        masked = plan if self._grammars is None else self._grammars.constrain(plan)
        self._in_flight.append(_Launched(plan, self._launch(masked), started, bool(masked.masks)))
        while len(self._in_flight) > self._most_in_flight:
            outputs += self._land()
        return outputs

    def _settle(self) -> list[TokenOut]:
        """Waits for all that is in flight."""
        outputs = []
        while self._in_flight:
            outputs += self._land()
        return outputs

    def _land(self) -> list[TokenOut]:
        """Waits for the oldest step in flight and takes in what it drew."""
        step = self._in_flight.popleft()
        sampled = step.pending.result()
        finished = self._advance()
        executor, grammars = self._executor, self._grammars
        # Of two steps that overlap the second takes what passes between their results: the device had no more for it.
        self._statistics.step(
            finished - max(step.started, self._last_result),
            step.plan,
            executor.weight_bytes,
            executor.bytes_per_block / executor.block_size,
        )
        self._last_result = finished
        outputs = self._scheduler.commit(step.plan, sampled)
        if grammars is not None:
            outputs, ended = grammars.follow(outputs)
            for request_id in ended:
                self._scheduler.abort(request_id)
        return [_token_out(output) for output in outputs]

    def stats(self) -> Stats:
        self._advance()
        stats = self._statistics.snapshot(self._scheduler.counters, self._scheduler.levels(), self._own_law.law)
        if self._own_law.observe(stats):
            self._plan_by_own_law()
        return stats

    def _logit_rows(self, limits: Limits) -> int:
        """The largest power of two rows of logits that a step has memory for."""
        activations = self._memory.activations
        planned = activations(limits.token_budget, limits.batch_size) + SPARE
        return max((2**k for k in range(13) if activations(limits.token_budget, 2**k) <= planned), default=1)

    def _plan_by_own_law(self) -> None:
        if self._plans_by_own_law:
            self._scheduler.set_pace(replace(self._scheduler.pace, law=self._own_law.law))

    def _salt_of(self, tenant: str) -> bytes:
        """Digests start from a secret of this process and the tenant: what another tenant sent is never a hit, and hits
        depend on nothing that a client can know."""
        return hashlib.blake2b(tenant.encode(), key=self._secret, digest_size=32).digest()

    def _add(self, request: Request) -> list[TokenOut]:
        now = self._advance()
        try:
            self._scheduler.add(request)
        except RequestRefused as refused:
            if self._grammars is not None:
                self._grammars.drop(request.request_id)
            return [_refused(request, str(refused))]
        self._statistics.waited_before(now - request.arrived)
        return []

    def _constrain(self, request: Request, text: str) -> list[TokenOut]:
        if self._grammars is None:
            return [_no_grammar(request, "this engine knows no vocabulary")]
        try:
            ready = self._grammars.add(request, text)
        except GrammarError as error:
            return [_no_grammar(request, str(error))]
        return self._add(request) if ready else []

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


def _refused(request: Submit | Request, error: str) -> TokenOut:
    return TokenOut(request.request_id, None, "error", error=error)


def _no_grammar(request: Request, error: str) -> TokenOut:
    return TokenOut(request.request_id, None, "error", error=wrong_grammar(error), error_code=GRAMMAR_ERROR)


def _token_out(output: Output) -> TokenOut:
    return TokenOut(
        output.request_id,
        output.token,
        output.finish_reason,
        output.cached_tokens,
        output.queue_seconds,
        output.error,
        output.logprobs,
        output.error_code,
        output.prompt_logprobs,
    )
