"""Greedy texts of several prompts, decoded together, as the engine would have an executor do it."""

from collections.abc import Sequence

from busload_runtime.engine.plan import Chunk, Plan, SamplingParams
from busload_runtime.executors.cpu import CpuExecutor
from busload_runtime.executors.cuda import CudaExecutor
from busload_runtime.executors.reference import ReferenceExecutor

AnyExecutor = CpuExecutor | CudaExecutor | ReferenceExecutor
GREEDY = SamplingParams(temperature=0)


def sized(executor: AnyExecutor, blocks: int) -> AnyExecutor:
    executor.reserve(blocks)
    executor.resize(blocks)
    return executor


def generate(executor: AnyExecutor, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """`count` greedy tokens for each prompt. Blocks of different requests lie between each other."""
    outputs: list[list[int]] = [[] for _ in prompts]
    for _ in range(count):
        for sampled in executor.run(Plan(next_chunks(executor, prompts, outputs))):
            outputs[sampled.request_id].append(sampled.token)
    return outputs


def next_chunks(
    executor: AnyExecutor, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]
) -> tuple[Chunk, ...]:
    """The step after `outputs`: whole prompts first, then one token each. Request ids are positions in `prompts`."""
    chunks = []
    for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        new = output[-1:] or prompt
        start = len(prompt) + len(output) - len(new)
        needed = -(-(start + len(new)) // executor.block_size)
        blocks = tuple(index + len(prompts) * place for place in range(needed))
        chunks.append(Chunk(index, tuple(new), start, blocks, GREEDY, len(output)))
    return tuple(chunks)
