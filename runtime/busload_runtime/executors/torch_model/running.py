"""A step that the device was told to run, and what comes back of it."""

from collections.abc import Sequence

import torch

from busload_runtime.engine.plan import Chunk, Plan, Sampled
from busload_runtime.executors.sampling import answers_of, score_all
from busload_runtime.executors.torch_model import draw
from busload_runtime.executors.torch_model.ops import Tensor


class RunningStep:
    """Implements `contract.Pending`. What is wanted of the device's results is told to be copied when this is made:
    the next step writes its own to the same places."""

    def __init__(self, plan: Plan, chunks: Sequence[Chunk], tokens: Tensor, logits: Tensor, scored: Tensor) -> None:
        """`chunks`: those of `plan`, in the order of rows. `tokens` [R] and `logits` [R, vocab] of those that draw;
        `scored` [rows that score, vocab], which is nobody else's."""
        self._plan, self._chunks, self._scored = plan, chunks, scored
        self._drawing = [chunk for chunk in chunks if chunk.sampling is not None]
        self._tokens = _on_its_way(tokens)
        self._logits = {
            row: _on_its_way(logits[row])
            for row, chunk in enumerate(self._drawing)
            if draw.params_of(chunk).logprobs is not None
        }
        self._arrived: torch.cuda.Event | None = None
        if tokens.is_cuda:
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def result(self) -> Sequence[Sampled]:
        """Raises `ExecutorError` where the model's output is not a number."""
        if self._arrived is not None:
            self._arrived.synchronize()
        logits = {row: host.numpy() for row, host in self._logits.items()}
        drawn = draw.sampled(self._drawing, self._tokens.tolist(), logits)
        scores = score_all(self._chunks, (row.cpu().numpy() for row in self._scored))
        return answers_of(self._plan, drawn, self._chunks, scores)


def _on_its_way(tensor: Tensor) -> Tensor:
    """A copy on the host, complete once the device has come so far; pinned, or the host would wait for it here."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor, non_blocking=True)
