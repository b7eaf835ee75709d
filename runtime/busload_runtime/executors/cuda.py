"""The GPU executor: a torch model whose operations are Triton kernels (busload_kernels.gpu).

A step is launched without waiting for it: all its work is told to one stream of the device, in order, so each step sees
what those before it wrote, their drawn tokens (`draw.DrawnTokens`) among it.

On device `cpu` the same model runs on plain torch operations in fp32, to test it where there is no GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray

from busload_runtime.engine.plan import Chunk, Plan, Sampled
from busload_runtime.executors.contract import Computed, DeviceMemory, Pending
from busload_runtime.executors.errors import ExecutorError
from busload_runtime.executors.plan_check import check_chunks
from busload_runtime.executors.sampling import masks_of, scored_rows
from busload_runtime.executors.torch_model import draw, loading
from busload_runtime.executors.torch_model.device import Device, measure_copy_bandwidth, memory_enough, open_device
from busload_runtime.executors.torch_model.graphs import (
    DecodeGraphs,
    bucket_for,
    padded,
    recorder,
)
from busload_runtime.executors.torch_model.kv_cache import BLOCK_SIZE, CacheShape, DeviceCache, KvCache, new_cache
from busload_runtime.executors.torch_model.loading import FLOATS, QUANTISED, Checkpoint, Placement
from busload_runtime.executors.torch_model.ops import Tensor
from busload_runtime.executors.torch_model.running import RunningStep
from busload_runtime.executors.torch_model.step import Arrays, Staging, arrange, in_order, step_of, worst_case
from busload_runtime.executors.torch_model.torch_ops import TorchOps
from busload_runtime.executors.torch_model.triton_ops import TritonOps

MEASURED_SLACK = 1.1
"""How much more than was measured a step may allocate: the allocator rounds, and draws with bias copy logits."""
KEPT_FREE = 2**29
"""Bytes of a GPU that are left alone: compiled kernels, libraries' workspaces, fragments of the allocator."""


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
    """Implements `contract.Executor` and `contract.Overlapping`."""

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
        with memory_enough(f"while {checkpoint.path} was loaded"):
            self._model = loading.load_decoder(checkpoint, placement)
        self._config = config
        self.block_size = BLOCK_SIZE
        self.bytes_per_block = self._cache_shape.bytes_per_block
        self.weight_bytes = self._model.num_bytes
        self.vocab_size = config.vocab_size
        self.context_length = loading.context_length(config)
        self.copy_bandwidth = measure_copy_bandwidth(self._device.torch)
        self.device_memory = self._measure_memory()
        self._peaks: dict[tuple[int, int], int] = {}
        self._new_cache(1)

    def activation_bytes(self, token_budget: int, batch_size: int) -> int:
        """On a GPU measured, by a step of this size that writes nothing; on the CPU an upper bound by counting."""
        batch_size = min(batch_size, token_budget)
        if isinstance(self._cache, DeviceCache):
            # Beside a step's own memory, what the captured graphs keep between steps.
            step, graphs = self._peak(token_budget, batch_size), self._peak(batch_size, batch_size)
            return int(MEASURED_SLACK * (step + graphs)) + self._cache.rounding_bytes + self._split_bytes(batch_size)
        config = self._config
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        # Arrays that are alive at once in `Decoder.logits`; dequantised copies of a matrix and of a request's cache.
        per_token = 4 * config.hidden_size + 3 * (q_size + kv_size) + 2 * config.ffn_size
        logits = (3 + 2) * batch_size * config.vocab_size  # and copies of two steps for log-probabilities
        matrices = max(config.vocab_size, 2 * config.ffn_size, q_size + 2 * kv_size) * config.hidden_size
        scores = 3 * config.num_heads * token_budget * config.context_length
        cached = 6 * kv_size * config.context_length
        return 4 * (2 * token_budget * per_token + 2 * matrices + scores + cached + logits) + 2**24

    def reserve(self, max_blocks: int) -> None:
        if isinstance(self._cache, DeviceCache):
            self._graphs.clear()  # they know the old addresses
            self._cache.close()
        self._new_cache(max(1, max_blocks))

    def _new_cache(self, max_blocks: int) -> None:
        # Sequences may share blocks, and so have more tokens than the pool; beyond this a step goes without a graph.
        tokens = 2 * max_blocks * BLOCK_SIZE
        self._graphs = DecodeGraphs(
            self._decode,
            recorder(self._device.torch),
            self._device.torch,
            lambda bucket: self._ops.room(bucket, tokens, self.context_length),
        )
        self._cache = new_cache(self._device.torch, self._cache_shape, max_blocks)
        # Each request that draws writes a block of its own.
        self._drawn = draw.DrawnTokens(max_blocks, self._device.torch)

    def _split_bytes(self, batch: int) -> int:
        """What attention keeps between its launches for caches that fill the device, at most."""
        assert self.device_memory is not None
        tokens = 2 * self.device_memory.num_bytes // self.bytes_per_block * BLOCK_SIZE
        items = sum(self._ops.room(batch, tokens, self.context_length).values())
        return items * self._config.num_heads * (self._config.head_dim + 2) * 4

    def _peak(self, tokens: int, batch: int) -> int:
        """Most bytes that a step of this size has allocated at once beside weights and cache."""
        if (tokens, batch) not in self._peaks:
            device, scratch = self._device.torch, new_cache(self._device.torch, self._cache_shape, 1)
            scratch.resize(1)
            torch.cuda.synchronize(device)
            before = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
            self.run_worst_case(tokens, batch, scratch)
            torch.cuda.synchronize(device)
            self._peaks[tokens, batch] = torch.cuda.max_memory_allocated(device) - before
            if isinstance(scratch, DeviceCache):
                scratch.close()
        return self._peaks[tokens, batch]

    def run_worst_case(self, tokens: int, batch: int, cache: KvCache) -> None:
        """A step of `tokens` tokens with `batch` draws that reads block 0 of `cache` alone and writes nothing."""
        drawing = worst_case(tokens, batch, self.context_length)
        arrays = arrange(in_order(drawing), range(min(batch, tokens)), BLOCK_SIZE)
        arrays["slots"][:] = -1
        with torch.inference_mode(), memory_enough(f"in a step of {tokens} tokens, the most that limits allow"):
            self._decode(self._uploaded(arrays | draw.draw_arrays((), min(batch, tokens))), cache)

    def resize(self, num_blocks: int) -> None:
        self._cache.resize(num_blocks)

    def run(self, plan: Plan) -> Sequence[Sampled]:
        return self.launch(plan).result()

    def launch(self, plan: Plan) -> Pending:
        check_chunks(plan.chunks, self._cache.num_blocks, BLOCK_SIZE, self.vocab_size, self._drawn.places)
        masks = masks_of(plan, self.vocab_size)
        chunks = in_order(plan.chunks)
        if not chunks:
            return Computed([])
        ends = accumulate(len(chunk.tokens) for chunk in chunks)
        rows = [(chunk, end - 1) for chunk, end in zip(chunks, ends, strict=True) if chunk.sampling is not None]
        drawing = [chunk for chunk, _ in rows]
        with torch.inference_mode(), memory_enough(f"in a step of {plan.num_tokens} tokens"):
            wanted = [row for _, row in rows] + scored_rows(chunks)
            arrays = arrange(chunks, wanted, BLOCK_SIZE, self._drawn.places)
            all_tokens, all_logits, tensors = self._step(arrays, drawing)
            tokens, logits, scored = all_tokens[: len(rows)], all_logits[: len(rows)], all_logits[len(rows) :]
            if draw.needs_shaping(drawing, masks):
                draws = draw.draws_of(tensors, len(drawing))
                tokens = draw.draw_shaped(logits, drawing, masks, draws, self._ops)
            self._drawn.keep(drawing, tokens)
            return RunningStep(plan, chunks, tokens, logits, scored)

    def logits(self, chunks: Sequence[Chunk], rows: Sequence[int]) -> NDArray[np.float32]:
        """Logits [len(rows), vocab] of a step's `rows` (indices of tokens over all chunks); nothing is drawn."""
        if not chunks:
            return np.empty((0, self.vocab_size), np.float32)
        order = sorted(range(len(chunks)), key=lambda index: len(chunks[index].tokens) > 1)
        first = np.cumsum([0, *(len(chunk.tokens) for chunk in chunks)])
        moved = np.concatenate([np.arange(first[index], first[index + 1]) for index in order]).argsort()
        with torch.inference_mode():
            arrays = arrange([chunks[index] for index in order], moved[list(rows)].tolist(), BLOCK_SIZE)
            logits = self._model.logits(step_of(self._uploaded(arrays)), self._cache, self._ops)
        found: NDArray[np.float32] = logits.cpu().numpy()
        return found

    def _step(self, arrays: Arrays, drawing: Sequence[Chunk]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Tokens [R] and logits [R, vocab] of a step, and all that was uploaded for it."""
        rows = len(arrays["rows"])
        decodes = rows == len(arrays["tokens"]) == len(drawing)  # every token is a decode, and draws
        bucket = bucket_for(rows) if decodes else None
        if bucket is not None:
            wide = padded(arrays, bucket, -(-self.context_length // BLOCK_SIZE))
            found = self._graphs.run(bucket, wide | self._ops.extras(wide) | draw.draw_arrays(drawing, bucket))
            if found is not None:
                (tokens, logits), tensors = found
                return tokens[:rows], logits[:rows], tensors
        tensors = self._uploaded(arrays | draw.draw_arrays(drawing, rows))
        return *self._decode(tensors), tensors

    def _decode(self, tensors: dict[str, Tensor], cache: KvCache | None = None) -> tuple[Tensor, Tensor]:
        known = self._drawn.put_in(tensors["tokens"], tensors["sources"])
        logits = self._model.logits(step_of(tensors | {"tokens": known}), cache or self._cache, self._ops)
        return draw.draw(logits, draw.draws_of(tensors), self._ops), logits

    def _uploaded(self, arrays: Arrays) -> dict[str, Tensor]:
        return Staging.of(arrays | self._ops.extras(arrays), self._device.torch).device

    def _measure_memory(self) -> DeviceMemory | None:
        """What the GPU has and others take of it, once the weights are there."""
        if not self._device.is_gpu:
            return None
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device.torch)
        return DeviceMemory(self._device.name, total, max(0, total - free - self.weight_bytes) + KEPT_FREE)


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
