"""The law that an engine finds by itself: near the truth from any start, and silent while it knows too little."""

import random
from dataclasses import astuple

import hypothesis.strategies as st
import msgspec
import pytest
from hashing_executor import HashingExecutor
from hypothesis import given, settings

from busload_runtime.contract import Limits, Pace, StepLaw
from busload_runtime.engine.loop import Engine
from busload_runtime.engine.memory import Budget, MemoryPlan
from busload_runtime.engine.messages import Stats, Submit
from busload_runtime.engine.own_law import OwnLaw
from busload_runtime.engine.plan import Plan, Sampled

ZERO = Stats(*[0] * (len(msgspec.structs.fields(Stats)) - 1))
laws = st.builds(StepLaw, st.floats(0.001, 0.05), st.floats(1e-4, 0.01), st.floats(0, 1e-5), st.floats(1e-5, 1e-3))


def seconds(law: StepLaw, batch: float, kv: float, prompt: float) -> float:
    return law.a + law.b * batch + law.c * kv + law.d * prompt


def run(own: OwnLaw, law: StepLaw, windows: int, seed: int, noise: float = 0.05, prompts: bool = True) -> None:
    """Windows of steps as this law has them, with other batches, lengths and prompts in each."""
    draw, stats = random.Random(seed), ZERO
    for _ in range(windows):
        batch, length = draw.randint(1, 24), draw.randint(32, 800)
        prompt = draw.choice([0, 0, 30, 200]) if prompts else 0
        step = seconds(law, batch, batch * length, prompt)
        steps = max(4, int(0.6 / step))
        stats = msgspec.structs.replace(
            stats,
            steps=stats.steps + steps,
            busy_seconds=stats.busy_seconds + steps * step * draw.uniform(1 - noise, 1 + noise),
            step_batch=stats.step_batch + steps * batch,
            step_kv_tokens=stats.step_kv_tokens + steps * batch * length,
            step_prefill_tokens=stats.step_prefill_tokens + steps * prompt,
        )
        own.observe(stats)


@settings(max_examples=40, deadline=None)
@given(truth=laws, off=st.none() | st.lists(st.floats(1 / 3, 3), min_size=4, max_size=4), seed=st.integers(0, 1000))
def test_it_predicts_steps_whatever_the_tried_ones_said(truth: StepLaw, off: list[float] | None, seed: int) -> None:
    """They may have run on a machine that was idle then and is not now, or the other way round."""
    own = OwnLaw(None if off is None else StepLaw(*(x * y for x, y in zip(astuple(truth), off, strict=True))))
    run(own, truth, 1200, seed)
    assert own.law is not None
    for batch, length, prompt in ((1, 100, 0), (8, 300, 0), (8, 300, 128), (20, 600, 64)):
        expected = seconds(truth, batch, batch * length, prompt)
        assert seconds(own.law, batch, batch * length, prompt) == pytest.approx(expected, rel=0.25)


def test_what_was_tried_counts_at_once_and_nothing_is_known_without_it() -> None:
    law = StepLaw(0.01, 0.001, 0.0, 1e-4)
    assert OwnLaw(law).law == law
    own = OwnLaw(None)
    run(own, law, 19, 1)
    assert own.law is None
    silent = OwnLaw(None)
    run(silent, law, 200, 1, prompts=False)
    assert silent.law is None, "what a prompt costs is not known"


def test_steps_that_follow_no_law_give_none() -> None:
    own = OwnLaw(None)
    run(own, StepLaw(0.01, 0.001, 0.0, 1e-4), 300, 1, noise=0.95)
    assert own.law is None


class Clocked(HashingExecutor):
    """Takes the time that a law says."""

    law = StepLaw(0.010, 0.001, 0.0, 0.001)
    now = 0.0

    def run(self, plan: Plan) -> list[Sampled]:
        decodes = sum(len(chunk.tokens) == 1 for chunk in plan.chunks)
        prompts = sum(len(chunk.tokens) for chunk in plan.chunks if len(chunk.tokens) > 1)
        Clocked.now += seconds(self.law, decodes, 0, prompts)
        return list(super().run(plan))


@pytest.mark.parametrize(("own", "chunk"), [(True, 33), (False, 200)])
def test_an_engine_cuts_prompts_by_the_law_it_tried(own: bool, chunk: int) -> None:
    executor = Clocked(block_size=16, context_length=4096)
    memory = MemoryPlan(Budget(10**9, "test"), 0, 0, 16, 1000, 4096, lambda tokens, batch: 0)
    limits = Limits(1024, 8, 90, 512, 100, 100_000)
    engine = Engine(executor, memory, limits, lambda: Clocked.now, Pace(inter_token_latency=0.05), plans_by_own_law=own)
    assert engine.probe() is not None
    engine.submit(Submit(1, [1] * 20, 500))
    while engine.stats().generated_tokens < 2:
        engine.step()
    before = engine.stats().step_prefill_tokens
    engine.submit(Submit(2, [2] * 200, 5))
    engine.step()
    # 0.9*50 ms - 10 ms - 1 ms leave 34 ms, 1 ms for each token.
    assert engine.stats().step_prefill_tokens - before == pytest.approx(chunk, abs=2)
