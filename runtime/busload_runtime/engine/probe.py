"""Tries steps of several shapes on an executor before it serves, and fits the step law to what they took.

So the law is known before the first request: the operator predicts its first change instead of guessing it, and a
server without an operator can say how long its queue is. What runs later refines it.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from busload_runtime import step_law
from busload_runtime.contract import StepLaw
from busload_runtime.engine.plan import Chunk, Plan, SamplingParams
from busload_runtime.executors.contract import Executor, Pending, launcher

SECONDS = 0.6
"""After which no further shape is tried. The first ones, without which there is no law, are tried in any case."""
NEEDED = 4
REPEATED_BELOW = 0.05
"""Seconds. A shorter step is tried twice, and the shorter time counts: what else the machine does may have hit one."""
LARGEST_BATCH = 32
PROMPT = 256
_GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Shape:
    """A step: `batch` decodes of sequences of `context` tokens each, or one prompt of `prompt` tokens."""

    batch: int
    context: int
    prompt: int = 0

    def work(self) -> tuple[float, float, float, float]:
        """Steps, batch, KV tokens and prompt tokens, as the scheduler counts them."""
        if self.prompt:
            return 1.0, 0.0, float(self.prompt), float(self.prompt)
        return 1.0, float(self.batch), float(self.batch * self.context), 0.0


@dataclass(frozen=True, slots=True)
class Probed:
    law: StepLaw
    batch: int
    """The largest that was tried."""


def probe(
    executor: Executor, num_blocks: int, token_budget: int, largest_batch: int, clock: Callable[[], float]
) -> Probed | None:
    """Runs each shape, those of short steps twice. None when too few shapes fit the pool, or none took time.

    Writes to blocks 0 .. `num_blocks` - 1, whose content is nobody's yet. Cached keys and values are read from few
    blocks, so the cost per KV token is that of computing with them: right where arithmetic decides, as on CPUs.
    """
    began = clock()
    points: list[tuple[Shape, float]] = []
    for shape in _shapes(executor, num_blocks, token_budget, largest_batch):
        if len(points) >= NEEDED and clock() - began > SECONDS:
            break
        times = []
        for _ in range(2):
            times.append(_seconds(executor, _plan(shape, executor.block_size), clock))
            if times[0] >= REPEATED_BELOW:
                break
        points.append((shape, min(times)))
    measured = [(shape.work(), seconds) for shape, seconds in points if seconds > 0]
    if len(measured) < NEEDED:
        return None
    law = step_law.fit(measured)
    return None if law is None else Probed(law, max(shape.batch for shape, _ in points))


def _seconds(executor: Executor, plan: Plan, clock: Callable[[], float]) -> float:
    """Of a step, from result to result, launched as the engine does: behind another one where steps overlap."""
    launch, ahead = launcher(executor)
    running: deque[Pending] = deque()
    results = [clock()]
    for left in reversed(range(1 + 2 * ahead)):
        running.append(launch(plan))
        while len(running) > (ahead if left else 0):
            running.popleft().result()
            results.append(clock())
    return results[ahead + 1] - results[ahead]  # between those that fill and empty the row


def _shapes(executor: Executor, num_blocks: int, token_budget: int, largest_batch: int) -> Iterator[Shape]:
    """Those that fit, the most telling first."""
    size = executor.block_size
    # Whole blocks, which the prompt writes and the others read: a decode writes the first place of the next block.
    prompt = min(PROMPT, token_budget, executor.context_length - 1) // size * size
    if not prompt:
        return
    short, long = size + 1, prompt + 1
    wanted = [Shape(0, 0, prompt), Shape(1, short), Shape(8, short), Shape(8, long)]
    wanted += [Shape(batch, short) for batch in (LARGEST_BATCH, 4, 16, 2)]
    for shape in wanted:
        # Each sequence writes its last block itself; the ones before it are read by all.
        blocks = -(-max(shape.context, shape.prompt) // size) + max(shape.batch - 1, 0)
        if blocks <= num_blocks and shape.batch <= min(largest_batch, token_budget, LARGEST_BATCH):
            yield shape


def _plan(shape: Shape, size: int) -> Plan:
    if shape.prompt:
        blocks = tuple(range(-(-shape.prompt // size)))
        return Plan((Chunk(0, (0,) * shape.prompt, 0, blocks, _GREEDY),))
    shared = -(-shape.context // size) - 1
    return Plan(
        tuple(
            Chunk(number, (0,), shape.context - 1, (*range(shared), shared + number), _GREEDY)
            for number in range(shape.batch)
        )
    )
