"""Steps tried before the start give the law that the executor follows, and touch nothing else."""

import pytest

from busload_runtime.engine.plan import Plan, Sampled
from busload_runtime.engine.probe import Probed, probe

A, B, C, D = 4e-3, 5e-4, 1e-6, 3e-4


class Timed:
    """An executor whose steps take what a law says, on a clock of its own."""

    block_size = 16
    context_length = 2048

    def __init__(self) -> None:
        self.now = 0.0
        self.plans: list[Plan] = []

    def run(self, plan: Plan) -> list[Sampled]:
        self.plans.append(plan)
        decodes = [chunk for chunk in plan.chunks if len(chunk.tokens) == 1]
        kv = sum(chunk.length_after for chunk in plan.chunks)
        prompts = plan.num_tokens - len(decodes)
        self.now += A + B * len(decodes) + C * kv + D * prompts
        return [Sampled(chunk.request_id, 1) for chunk in plan.chunks]


def tried(executor: Timed, blocks: int = 200, budget: int = 264, batch: int = 64) -> Probed | None:
    return probe(executor, blocks, budget, batch, lambda: executor.now)  # type: ignore[arg-type]


def test_the_law_is_found_and_every_plan_is_one_that_an_executor_takes():
    executor = Timed()
    found = tried(executor)
    assert found is not None
    assert (found.law.a, found.law.b, found.law.c, found.law.d) == pytest.approx((A, B, C, D), rel=0.02)
    assert found.batch == 32
    assert len(executor.plans) == 1 + 7 * 2, "only short steps are tried twice"
    for plan in executor.plans:
        assert plan.num_tokens <= 264
        for chunk in plan.chunks:
            assert len(chunk.blocks) == -(-chunk.length_after // 16)
            assert max(chunk.blocks) < 200
        written = [chunk.blocks[chunk.start // 16] for chunk in plan.chunks]
        assert len(set(written)) == len(written), "no two chunks write one block"


def test_slow_steps_are_tried_no_longer_than_needed():
    class Slow(Timed):
        def run(self, plan: Plan) -> list[Sampled]:
            self.now += 0.5
            return super().run(plan)

    executor = Slow()
    found = tried(executor)
    assert found is not None
    assert len(executor.plans) == 4
    assert found.law.a == pytest.approx(0.5 + A, rel=0.02)


def test_a_small_pool_or_batch_is_kept_to_and_too_little_gives_no_law():
    executor = Timed()
    found = tried(executor, batch=8)
    assert found is not None
    assert found.batch == 8
    assert max(len(plan.chunks) for plan in executor.plans) == 8
    small = Timed()
    assert tried(small, blocks=4) is None
    assert all(max(chunk.blocks) < 4 for plan in small.plans for chunk in plan.chunks)
