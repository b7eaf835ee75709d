"""Steps that overlap, under any traffic: clients get what they get without, and no block is ever in two hands."""

from dataclasses import dataclass, field

import hypothesis.strategies as st
from hashing_executor import HashingExecutor, expected_scores, expected_text, logprobs_of
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from late_executor import LateExecutor
from scheduler_checks import check_idle, check_scheduler

from busload_runtime.contract import Limits
from busload_runtime.engine.loop import Engine
from busload_runtime.engine.memory import Budget, LimitsImpossible, MemoryPlan
from busload_runtime.engine.messages import Submit, TokenOut

BLOCK_SIZE = 4
LONGEST = 48
BLOCKS = 20
LIMITS = Limits(LONGEST, 4, 100, 16, 0, 0)

# Few tokens and shared beginnings, so that prefixes are found in the cache, and prompts that end with a block.
BEGINNINGS = [[1] * 12, [1] * 9 + [2] * 7, [1, 2, 3, 4] * 4, [2]]
prompts = st.builds(
    lambda beginning, length, rest: beginning[:length] + rest,
    st.sampled_from(BEGINNINGS),
    st.integers(0, 16),
    st.lists(st.integers(1, 2), min_size=1, max_size=8),
)
wishes = st.sampled_from(
    [{}] * 6
    + [{"presence_penalty": 1.0}, {"logit_bias": {1: 2.0}}, {"logprobs": 2}, {"logprobs": 0, "score_prompt": True}]
)


def build(executor: HashingExecutor) -> Engine:
    overhead, activations = 1 << 20, executor.activation_bytes(LIMITS.token_budget, LIMITS.batch_size)
    memory = MemoryPlan(
        budget=Budget(executor.weight_bytes + overhead + activations + BLOCKS * executor.bytes_per_block, "test"),
        weights=executor.weight_bytes,
        overhead=overhead,
        block_size=BLOCK_SIZE,
        bytes_per_block=executor.bytes_per_block,
        context_length=executor.context_length,
        activations=executor.activation_bytes,
    )
    return Engine(executor, memory, LIMITS)


@dataclass
class Answer:
    """What one engine sent of one request."""

    tokens: list[int] = field(default_factory=list)
    reason: str | None = None
    details: list[object] = field(default_factory=list)


@dataclass
class Asked:
    message: Submit
    full: list[int]
    """Its text, if nothing comes in between."""
    reason: str
    cut: bool = False
    """Whether something may have come in between: an abort, or a pool too small for it."""


class AnyTrafficTwice(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.late = LateExecutor(BLOCK_SIZE, context_length=LONGEST)
        self.engines = (build(HashingExecutor(BLOCK_SIZE, context_length=LONGEST)), build(self.late))
        self.answers: tuple[dict[int, Answer], dict[int, Answer]] = ({}, {})
        self.asked: dict[int, Asked] = {}
        self.aborted: set[int] = set()
        self.longest = LONGEST
        self.capacity = BLOCKS * BLOCK_SIZE

    @rule(
        prompt=prompts,
        max_tokens=st.integers(1, 24),
        min_tokens=st.integers(0, 6),
        seed=st.integers(0, 3),
        stop_at=st.none() | st.integers(0, 12),
        wish=wishes,
        tenant=st.sampled_from("aab"),
    )
    def submit(
        self,
        prompt: list[int],
        max_tokens: int,
        min_tokens: int,
        seed: int,
        stop_at: int | None,
        wish: dict[str, object],
        tenant: str,
    ) -> None:
        text = expected_text(prompt, max(max_tokens, 13), seed)
        stops = [] if stop_at is None else [text[stop_at]]
        message = Submit(
            len(self.asked), prompt, max_tokens, min_tokens=min_tokens, stop_token_ids=stops, seed=seed, tenant=tenant,
            **wish,  # type: ignore[arg-type]
        )  # fmt: skip
        refused = [engine.submit(message) for engine in self.engines]
        assert refused[0] == refused[1]
        count = min(max_tokens, self.longest - len(prompt))
        ends = [place + 1 for place in range(count) if text[place] in stops and place + 1 >= min_tokens]
        full, reason = (text[: ends[0]], "stop") if ends else (text[: max(count, 0)], "length")
        self.asked[message.request_id] = Asked(message, full, reason, cut=bool(refused[0]))
        for answers in self.answers:
            answers[message.request_id] = Answer(reason="error" if refused[0] else None)
        self.note_capacity()

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.asked)))
        for engine in self.engines:
            engine.abort(request_id)
        if any(answers[request_id].reason is None for answers in self.answers):
            self.asked[request_id].cut = True
            self.aborted.add(request_id)

    @rule(
        longest=st.integers(16, LONGEST),
        batch=st.integers(1, 6),
        budget=st.integers(6, 24),
        percent=st.integers(60, 100),
    )
    def change_limits(self, longest: int, batch: int, budget: int, percent: int) -> None:
        limits = Limits(longest, batch, percent, budget, 0, 0)
        try:
            outputs = self.engines[0].apply(limits)
        except LimitsImpossible:
            return
        self.take(0, outputs)
        self.take(1, self.engines[1].apply(limits))
        self.longest = longest
        self.capacity = self.engines[0].stats().kv_blocks * BLOCK_SIZE
        self.note_capacity()

    @rule(steps=st.integers(1, 8), engine=st.sampled_from((0, 1, None)))
    def step(self, steps: int, engine: int | None) -> None:
        """Both, or one that gets ahead of the other."""
        for _ in range(steps):
            for number in (0, 1) if engine is None else (engine,):
                if self.engines[number].has_work:
                    self.take(number, self.engines[number].step())

    def take(self, number: int, outputs: list[TokenOut]) -> None:
        for output in outputs:
            answer = self.answers[number][output.request_id]
            assert output.request_id not in self.aborted
            assert answer.reason is None, "an output behind the end"
            if output.token is not None:
                answer.tokens.append(output.token)
                answer.details.append((output.logprobs, output.prompt_logprobs))
            answer.reason = output.finish_reason

    def note_capacity(self) -> None:
        for request_id, asked in self.asked.items():
            if any(answers[request_id].reason is None for answers in self.answers):
                asked.cut |= len(asked.message.tokens) + len(asked.full) > self.capacity

    @invariant()
    def holds(self) -> None:
        for engine in self.engines:
            check_scheduler(engine._scheduler)
        assert len(self.late.in_flight) <= 1

    def teardown(self) -> None:
        for number, engine in enumerate(self.engines):
            for _ in range(10_000):
                if not engine.has_work:
                    break
                self.take(number, engine.step())
                check_scheduler(engine._scheduler)
            assert not engine.has_work, "requests never end"
            check_idle(engine._scheduler)
        for request_id, asked in self.asked.items():
            plain, ahead = (answers[request_id] for answers in self.answers)
            for answer in (plain, ahead):
                assert answer.tokens == asked.full[: len(answer.tokens)]
                assert answer.details == self.details(asked, len(answer.tokens))
            if not asked.cut:
                assert (plain.tokens, plain.reason) == (ahead.tokens, ahead.reason) == (asked.full, asked.reason)
        generated = [engine.stats().generated_tokens for engine in self.engines]
        assert generated == [sum(len(answer.tokens) for answer in answers.values()) for answers in self.answers]

    def details(self, asked: Asked, count: int) -> list[object]:
        message = asked.message
        scores = expected_scores(message.tokens) if message.score_prompt else None
        return [
            (logprobs_of(token, message.logprobs), scores if place == 0 else None)
            for place, token in enumerate(asked.full[:count])
        ]


TestAnyTrafficTwice = AnyTrafficTwice.TestCase
TestAnyTrafficTwice.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
