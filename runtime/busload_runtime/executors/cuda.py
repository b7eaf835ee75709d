"""The GPU executor: a torch model whose operations are Triton kernels (busload_kernels.gpu).

On device `cpu` the same model runs on plain torch operations in fp32, to test it where there is no GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray

from busload_runtime.engine.plan import Chunk, Plan, Sampled
from busload_runtime.executors.errors import ExecutorError
from busload_runtime.executors.plan_check import check_chunks
from busload_runtime.executors.sampling import masks_of
from busload_runtime.executors.torch_model import draw, loading
from busload_runtime.executors.torch_model.device import Device, measure_copy_bandwidth, open_device
from busload_runtime.executors.torch_model.kv_cache import BLOCK_SIZE, CacheShape, KvCache
from busload_runtime.executors.torch_model.loading import FLOATS, QUANTISED, Checkpoint, Placement
from busload_runtime.executors.torch_model.ops import Tensor
from busload_runtime.executors.torch_model.step import Staging, arrange, in_order, step_of
from busload_runtime.executors.torch_model.torch_ops import TorchOps
from busload_runtime.executors.torch_model.triton_ops import TritonOps


@dataclass(frozen=True, slots=True)
class CudaOptions:
    device: str = "cuda"
    """A name of `device.DEVICES`."""
    weight_precision: str | None = None
    """int8, fp8, or that of the activations: bf16 on a GPU, fp32 on the CPU. None: int8 on a GPU, fp32 on the CPU."""
    kv_precision: str | None = None
    """The same for keys and values."""
    room: int | None = None
    """Bytes that weights may take; None: what the device has free, on the CPU any number."""


class CudaExecutor:
    """Implements `contract.Executor`."""

    def __init__(self, checkpoint: Checkpoint, options: CudaOptions = CudaOptions()) -> None:
        """Raises `ExecutorError` for a model that the kernels do not compute, a device that is not there or too small,
        and a precision that is not known."""
        config = checkpoint.config
        loading.check_family(config)
        self._device = open_device(options.device)
        placement = Placement(
            self._device.torch,
            FLOATS[self._device.float_name],
            _precision("--weight-precision", options.weight_precision, self._device),
        )
        kv_precision = _precision("--kv-precision", options.kv_precision, self._device)
        self._cache_shape = CacheShape(
            config.num_layers, config.num_kv_heads, config.head_dim, (QUANTISED | FLOATS)[kv_precision]
        )
        self._ops = TritonOps(self._device.name, config, self._cache_shape.dtype) if self._device.is_gpu else TorchOps()
        _check_room(checkpoint, placement.num_bytes(config), options.room, self._device)
        self._model = loading.load_decoder(checkpoint, placement)
        self._config = config
        self.block_size = BLOCK_SIZE
        self.bytes_per_block = self._cache_shape.bytes_per_block
        self.weight_bytes = self._model.num_bytes
        self.vocab_size = config.vocab_size
        self.context_length = loading.context_length(config)
        self.copy_bandwidth = measure_copy_bandwidth(self._device.torch)
        self.reserve(0)

    def activation_bytes(self, token_budget: int, batch_size: int) -> int:
        config, size = self._config, FLOATS[self._device.float_name].itemsize
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        # Each term counts the arrays that are alive at once in `Decoder.logits`.
        per_token = 4 * config.hidden_size + 3 * (q_size + kv_size) + 2 * config.ffn_size
        logits = 3 * batch_size * config.vocab_size * 4
        if self._device.is_gpu:
            return int(size * token_budget * per_token + logits + 2**28)
        # Plain operations compute in fp32, on dequantised copies of a matrix and of a request's cache.
        matrices = max(config.vocab_size, 2 * config.ffn_size, q_size + 2 * kv_size) * config.hidden_size
        scores = 3 * config.num_heads * token_budget * config.context_length
        cached = 6 * kv_size * config.context_length
        return 4 * (2 * token_budget * per_token + 2 * matrices + scores + cached) + logits + 2**24

    def reserve(self, max_blocks: int) -> None:
        self._cache = KvCache(self._cache_shape, max(1, max_blocks))

    def resize(self, num_blocks: int) -> None:
        self._cache.resize(num_blocks)

    def run(self, plan: Plan) -> Sequence[Sampled]:
        check_chunks(plan.chunks, self._cache.num_blocks, BLOCK_SIZE, self.vocab_size)
        masks = masks_of(plan, self.vocab_size)
        chunks = in_order(plan.chunks)
        ends = accumulate(len(chunk.tokens) for chunk in chunks)
        rows = [(chunk, end - 1) for chunk, end in zip(chunks, ends, strict=True) if chunk.sampling is not None]
        drawing = [chunk for chunk, _ in rows]
        if not chunks:
            return []
        with torch.inference_mode():
            logits, tensors = self._compute(chunks, [row for _, row in rows], drawing)
            draws = draw.draws_of(tensors)
            if draw.needs_shaping(drawing, masks):
                tokens = draw.draw_shaped(logits, drawing, masks, draws, self._ops)
            else:
                tokens = draw.draw(logits, draws, self._ops)
            answers = draw.sampled(drawing, tokens.tolist(), logits)
        by_request = {answer.request_id: answer for answer in answers}
        return [by_request[chunk.request_id] for chunk in plan.chunks if chunk.sampling is not None]

    def logits(self, chunks: Sequence[Chunk], rows: Sequence[int]) -> NDArray[np.float32]:
        """Logits [len(rows), vocab] of a step's `rows` (indices of tokens over all chunks); nothing is drawn."""
        if not chunks:
            return np.empty((0, self.vocab_size), np.float32)
        order = sorted(range(len(chunks)), key=lambda index: len(chunks[index].tokens) > 1)
        first = np.cumsum([0, *(len(chunk.tokens) for chunk in chunks)])
        moved = np.concatenate([np.arange(first[index], first[index + 1]) for index in order]).argsort()
        with torch.inference_mode():
            logits, _ = self._compute([chunks[index] for index in order], moved[list(rows)].tolist(), [])
        found: NDArray[np.float32] = logits.cpu().numpy()
        return found

    def _compute(
        self, chunks: Sequence[Chunk], rows: Sequence[int], drawing: Sequence[Chunk]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Logits of `rows`, and all that was uploaded for the step."""
        arrays = arrange(chunks, rows, BLOCK_SIZE)
        arrays |= self._ops.extras(arrays)
        staging = Staging.of(arrays | draw.draw_arrays(drawing), self._device.torch)
        return self._model.logits(step_of(staging.device), self._cache, self._ops), staging.device


def _precision(flag: str, wanted: str | None, device: Device) -> str:
    if wanted is None:
        return "int8" if device.is_gpu else device.float_name
    allowed = (*QUANTISED, device.float_name)
    if wanted not in allowed:
        raise ExecutorError(
            f"{flag} is {wanted!r:.80}; the cuda executor on device {device.torch.type} has {', '.join(allowed)}; "
            "choose one"
        )
    return wanted


def _check_room(checkpoint: Checkpoint, needed: int, room: int | None, device: Device) -> None:
    if device.is_gpu:
        free, total = torch.cuda.mem_get_info(device.torch)
        room, where = free, f"{device.name} has {free / 2**20:.0f} of its {total / 2**20:.0f} MiB free"
    elif room is not None:
        where = f"the memory limit leaves {max(0, room) / 2**20:.0f} MiB for it"
    if room is not None and needed > room:
        raise ExecutorError(
            f"{checkpoint.path} takes {needed / 2**20:.0f} MiB as weights and {where}; choose a smaller model, a "
            f"smaller --weight-precision ({', '.join(QUANTISED)}) or more memory"
        )
