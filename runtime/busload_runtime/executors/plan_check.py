"""Whether a plan keeps the promises of `engine.plan`, for executors whose arrays would not notice."""

from collections.abc import Container, Sequence

from busload_runtime.engine.plan import PENDING, Chunk
from busload_runtime.executors.errors import ExecutorError, wrong_plan
from busload_runtime.executors.sampling import history_of


def check_chunks(
    chunks: Sequence[Chunk], num_blocks: int, block_size: int, vocab_size: int, drawing: Container[int] = ()
) -> None:
    """Raises `ExecutorError` where an index would count from the end, or write a block that is not the request's.

    `drawing`: requests for which the step in flight draws, and which may have that token `PENDING`.
    """
    for chunk in chunks:
        shaping = chunk.sampling.shaping if chunk.sampling is not None else None
        history = history_of(chunk)
        biased = [token for token, _ in shaping.logit_bias] if shaping is not None else []
        pending = chunk.tokens == (PENDING,) and chunk.request_id in drawing
        needed = -(-chunk.length_after // block_size)
        if (
            not chunk.tokens
            or chunk.start < 0
            or len(chunk.blocks) < needed
            or not (pending or _all_below(vocab_size, chunk.tokens))
            or not _all_below(vocab_size, history)
            or not _all_below(vocab_size, biased)
            or not _all_below(num_blocks, chunk.blocks)
        ):
            raise ExecutorError(wrong_plan(num_blocks))


def _all_below(bound: int, numbers: Sequence[int]) -> bool:
    """Whether all are from 0 to `bound` - 1."""
    return not numbers or (min(numbers) >= 0 and max(numbers) < bound)
