"""An executor whose steps run beside the caller, as late as can be: a launched step is computed when its result is
taken. What the scheduler or the engine changed too early by then gives other tokens, or an error."""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from hashing_executor import HashingExecutor

from busload_runtime.engine.plan import NO_TOKEN, PENDING, Chunk, Plan, Sampled


class LateExecutor(HashingExecutor):
    """Implements `Overlapping`."""

    def __init__(self, block_size: int, num_blocks: int = 0, context_length: int = 1 << 20) -> None:
        super().__init__(block_size, num_blocks, context_length)
        self.in_flight: deque[LateStep] = deque()
        self.behind = 0
        """Steps that were launched while another one was in flight."""
        self._drawn: dict[int, int] = {}

    def launch(self, plan: Plan) -> "LateStep":
        assert plan.chunks
        assert len(self.in_flight) < 2, "a third step is launched"
        for step in self.in_flight:
            self._check_apart(step.plan, plan)
            assert not any(chunk.scoring for chunk in step.plan.chunks), "rows of logits are still kept for a step"
        for chunk in plan.chunks:
            assert chunk.history is None or len(chunk.history) == chunk.length_after, "a history is not complete"
        self.behind += bool(self.in_flight)
        self.in_flight.append(LateStep(self, plan))
        return self.in_flight[-1]

    def run(self, plan: Plan) -> Sequence[Sampled]:
        return self.launch(plan).result()

    def resize(self, num_blocks: int) -> None:
        assert not self.in_flight, "blocks are taken from a step in flight"
        super().resize(num_blocks)

    def compute(self, plan: Plan) -> Sequence[Sampled]:
        chunks = tuple(self._put_in(chunk) for chunk in plan.chunks)
        sampled = super().run(replace(plan, chunks=chunks))
        self._drawn = {one.request_id: one.token for one in sampled if one.token != NO_TOKEN}
        return sampled

    def _put_in(self, chunk: Chunk) -> Chunk:
        if PENDING not in chunk.tokens:
            return chunk
        assert chunk.tokens == (PENDING,)
        return replace(chunk, tokens=(self._drawn[chunk.request_id],))

    def _check_apart(self, before: Plan, plan: Plan) -> None:
        """Of two steps in flight, each keeps off what the other one writes for another request."""
        for one in before.chunks:
            for two in plan.chunks:
                if one.request_id != two.request_id:
                    assert not self._own(two) & set(one.blocks), "a block that a step in flight uses was given away"
                    assert not self._own(one) & set(two.blocks), "a block that is not computed yet is shared"

    def _own(self, chunk: Chunk) -> set[int]:
        return set(chunk.blocks[chunk.start // self.block_size :])


class LateStep:
    """Implements `Pending`."""

    def __init__(self, executor: LateExecutor, plan: Plan) -> None:
        self.plan = plan
        self._executor = executor

    def result(self) -> Sequence[Sampled]:
        assert self._executor.in_flight.popleft() is self, "results are not taken in order"
        return self._executor.compute(self.plan)
