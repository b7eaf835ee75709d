"""The CPU executor: one C++ call per engine step (busload_kernels.cpu)."""

import ctypes
import os
import struct
from array import array
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from busload_kernels.cpu import library as native
from busload_kernels.cpu.errors import KernelError
from busload_runtime.engine.plan import Chunk, Logprobs, Plan, Sampled, SamplingParams, Shaping, mask_bytes
from busload_runtime.executors.contract import DeviceMemory
from busload_runtime.executors.cpu_model import PackedModel
from busload_runtime.executors.cpu_threads import usable_threads
from busload_runtime.executors.errors import ExecutorError, wrong_plan
from busload_runtime.executors.sampling import answers_of, history_of, masks_of, not_a_number, scored_rows
from busload_runtime.model.weights import WeightFile

_SAMPLING = "dddQQqQQQ"  # native.Sampling
_GREEDY = (0.0, 1.0, 0.0, 0, 0, 0, 0, 0, 0)
_KV_FORMATS = {"int8": native.KV_INT8, "fp32": native.KV_FP32}
_BANDWIDTH_BYTES = 2**26
_BANDWIDTH_SECONDS = 0.05


class CpuExecutor:
    """Implements `contract.Executor`.

    A token's result does not depend on what else is in its step, nor on how its prompt was cut: equal bits.
    """

    def __init__(
        self,
        weights: WeightFile,
        threads: int | None = None,
        isa: str | None = None,
        kv_precision: str = "int8",
        room: int | None = None,
    ) -> None:
        """`threads` and `isa` default to `BUSLOAD_THREADS` or the CPUs given, `BUSLOAD_CPU_ISA` or the best there is.

        `kv_precision` is that of the KV cache: "int8", with one scale per token and head, or "fp32", which takes almost
        four times the memory and does not round. `room` is how many bytes the weights may take; None: any number.
        Raises `ExecutorError` for a model that the engine cannot compute or that takes more, a precision it does not
        know and an instruction set that is not here.
        """
        self.threads = threads or usable_threads()
        wanted = isa if isa is not None else os.environ.get("BUSLOAD_CPU_ISA", "")
        try:
            self._library = native.load()
        except KernelError as error:
            raise ExecutorError(str(error)) from None
        if wanted and wanted not in native.usable_isas():
            raise ExecutorError(
                f"BUSLOAD_CPU_ISA is {wanted!r:.80}; this CPU runs {', '.join(native.usable_isas())}; choose one"
            )
        if kv_precision not in _KV_FORMATS:
            raise ExecutorError(
                f"--kv-precision is {kv_precision!r:.80}; the cpu executor has {', '.join(_KV_FORMATS)}; choose one"
            )
        self._model = PackedModel(weights, self.threads, room)
        self._model.struct.kv_format = _KV_FORMATS[kv_precision]
        self._engine = self._library.bl_create(ctypes.byref(self._model.struct), self.threads, wanted.encode())
        if not self._engine:
            raise ExecutorError(f"cannot start {self.threads} threads; lower BUSLOAD_THREADS")
        self.isa: str = self._library.bl_isa(self._engine).decode()
        self.block_size = native.BLOCK_TOKENS
        self.bytes_per_block: int = self._library.bl_kv_block_bytes(ctypes.byref(self._model.struct))
        self.weight_bytes = self._model.weight_bytes
        self.vocab_size = weights.config.vocab_size
        self.context_length = weights.config.context_length
        self.device_memory: DeviceMemory | None = None
        self._max_blocks = self._num_blocks = 0

    def __del__(self) -> None:
        if getattr(self, "_engine", None):
            self._library.bl_destroy(self._engine)

    @cached_property
    def copy_bandwidth(self) -> float:
        return self.measure_bandwidth(copy=True)

    def activation_bytes(self, token_budget: int, batch_size: int) -> int:
        """Exactly the scratch memory that the engine takes for such a step."""
        model = ctypes.byref(self._model.struct)
        size: int = self._library.bl_scratch_bytes(model, self.threads, token_budget, min(batch_size, token_budget))
        return size

    def reserve(self, max_blocks: int) -> None:
        if self._library.bl_kv_reserve(self._engine, max(1, max_blocks)):
            raise ExecutorError(
                f"cannot reserve {max_blocks} KV blocks ({max_blocks * self.bytes_per_block} bytes of address space); "
                "lower --memory or raise the address space limit (ulimit -v)"
            )
        self._max_blocks, self._num_blocks = max_blocks, 0

    def resize(self, num_blocks: int) -> None:
        if not 0 <= num_blocks <= self._max_blocks:
            raise ExecutorError(f"cannot resize the KV cache to {num_blocks} blocks; reserved: {self._max_blocks}")
        if num_blocks < self._num_blocks:
            self._library.bl_kv_release_from(self._engine, num_blocks)
        self._num_blocks = num_blocks

    def run(self, plan: Plan) -> Sequence[Sampled]:
        ends = list(accumulate(len(chunk.tokens) for chunk in plan.chunks))
        drawing = [
            (chunk, chunk.sampling, end - 1)
            for chunk, end in zip(plan.chunks, ends, strict=True)
            if chunk.sampling is not None
        ]
        shaped = [_Shaping(chunk, params.shaping) if params.shaping else None for chunk, params, _ in drawing]
        scored = [
            None if params.logprobs is None else _Logprobs(params.logprobs, self.vocab_size) for _, params, _ in drawing
        ]
        masks = {request_id: _Mask(mask) for request_id, mask in masks_of(plan, self.vocab_size).items()}
        sampling = [
            _sampling(
                params,
                chunk.sample_index,
                shape.address if shape else 0,
                score.address if score else 0,
                masks[chunk.request_id].address if chunk.request_id in masks else 0,
            )
            for (chunk, params, _), shape, score in zip(drawing, shaped, scored, strict=True)
        ]
        # To score a token is to draw where no other may be.
        targets = [
            (chunk, _Target(token, chunk.scoring.num_top, self.vocab_size))
            for chunk in plan.chunks
            if chunk.scoring is not None
            for token in chunk.scoring.targets
        ]
        rows = [row for _, _, row in drawing] + scored_rows(plan.chunks)
        tokens = self._step(plan.chunks, rows, sampling + [target.sampling for _, target in targets], None)
        owners = [chunk for chunk, _, _ in drawing] + [chunk for chunk, _ in targets]
        for token, chunk in zip(tokens, owners, strict=True):
            if token < 0:
                raise ExecutorError(not_a_number(chunk))
        drawn = [
            Sampled(chunk.request_id, token, score.read() if score else None)
            for token, (chunk, _, _), score in zip(tokens, drawing, scored, strict=False)
        ]
        if not targets:
            return drawn
        return answers_of(plan, drawn, plan.chunks, [target.logprobs.read() for _, target in targets])

    def logits(self, chunks: Sequence[Chunk], rows: Sequence[int]) -> NDArray[np.float32]:
        """Logits [len(rows), vocab] of a step's `rows` (indices of tokens over all chunks); nothing is drawn."""
        result = np.empty((len(rows), self.vocab_size), np.float32)
        self._step(chunks, rows, [_GREEDY] * len(rows), result.ctypes.data)
        return result

    def measure_bandwidth(self, copy: bool) -> float:
        """Bytes per second that all threads together read plus write (`copy`), or read."""
        buffer = self._library.bl_map(_BANDWIDTH_BYTES)
        if not buffer:
            raise ExecutorError(f"cannot get {_BANDWIDTH_BYTES} bytes to measure bandwidth; raise the memory limit")
        try:
            ctypes.memset(buffer, 1, _BANDWIDTH_BYTES)
            return float(
                self._library.bl_bandwidth(buffer, _BANDWIDTH_BYTES, self.threads, _BANDWIDTH_SECONDS, int(copy))
            )
        finally:
            self._library.bl_unmap(buffer, _BANDWIDTH_BYTES)

    def take_profile(self) -> dict[str, NDArray[np.float64]]:
        """Seconds [threads, 2] of each phase of the steps since the last call: CPU time of the work, and time that a
        thread waited or had no core. Empty unless the engine was built with `BUSLOAD_CPU_PROFILE=1`."""
        phases: int = self._library.bl_profile(self._engine, None)
        seconds = np.zeros((self.threads, phases, 2))
        self._library.bl_profile(self._engine, seconds.ctypes.data)
        return {self._library.bl_phase_name(phase).decode(): seconds[:, phase] for phase in range(phases)}

    def _step(
        self, chunks: Sequence[Chunk], rows: Sequence[int], sampling: Sequence[tuple[float, ...]], logits: int | None
    ) -> list[int]:
        """One call of the engine; the tokens drawn for `rows`, -1 where the logits are not finite."""
        tokens: list[int] = []
        blocks: list[int] = []  # lists first: an array takes a list at once, but a tuple number by number
        table_starts = []
        for chunk in chunks:
            tokens += chunk.tokens
            table_starts.append(len(blocks))
            blocks += chunk.blocks
        table_starts.append(len(blocks))
        starts = [chunk.start for chunk in chunks]
        arrays = [array("i", part) for part in (tokens, [len(c.tokens) for c in chunks], starts, table_starts, blocks)]
        sampled, sample_rows = array("i", [0]) * len(rows), array("i", rows)
        packed = struct.pack(_SAMPLING * len(rows), *[value for one in sampling for value in one])
        step = native.Step(
            len(chunks),
            len(rows),
            *(values.buffer_info()[0] for values in arrays),
            self._num_blocks,
            sample_rows.buffer_info()[0],
            ctypes.cast(ctypes.c_char_p(packed), ctypes.c_void_p),
            sampled.buffer_info()[0],
            logits,
        )
        code = self._library.bl_step(self._engine, ctypes.byref(step))
        if code == -2:
            raise ExecutorError(wrong_plan(self._num_blocks))
        if code:
            needed = self.activation_bytes(len(tokens), len(rows))
            raise ExecutorError(f"cannot get {needed} bytes for a step of {len(tokens)} tokens; raise the memory limit")
        return sampled.tolist()


class _Shaping:
    """`native.Shaping` of a chunk, with the arrays that it points to."""

    def __init__(self, chunk: Chunk, shaping: Shaping) -> None:
        self._tokens = array("i", [token for token, _ in shaping.logit_bias])
        self._biases = array("d", [bias for _, bias in shaping.logit_bias])
        self._history = history_of(chunk)
        num_drawn = min(chunk.sample_index, len(self._history))
        self._struct = native.Shaping(
            shaping.frequency_penalty,
            shaping.presence_penalty,
            shaping.repetition_penalty,
            self._history.buffer_info()[0],
            len(self._history) - num_drawn,
            num_drawn,
            self._tokens.buffer_info()[0],
            self._biases.buffer_info()[0],
            len(self._tokens),
        )
        self.address = ctypes.addressof(self._struct)


class _Logprobs:
    """`native.Logprobs` of a chunk, with the arrays that it points to."""

    def __init__(self, num_top: int, vocab_size: int) -> None:
        num_top = min(num_top, vocab_size)
        self._tokens, self._top = array("i", [0]) * num_top, array("f", [0.0]) * num_top
        self._struct = native.Logprobs(self._tokens.buffer_info()[0], self._top.buffer_info()[0], num_top)
        self.address = ctypes.addressof(self._struct)

    def read(self) -> Logprobs:
        return Logprobs(self._struct.drawn, tuple(zip(self._tokens, self._top, strict=True)))


class _Mask:
    """One of `Plan.masks` where the engine can read it."""

    def __init__(self, mask: bytes) -> None:
        self._words = array("I", mask)
        self.address = self._words.buffer_info()[0]


class _Target:
    """The sampling of a row that predicts a known token."""

    def __init__(self, token: int, num_top: int, vocab_size: int) -> None:
        mask = bytearray(mask_bytes(vocab_size))
        mask[token // 8] = 1 << token % 8
        self._mask, self.logprobs = _Mask(bytes(mask)), _Logprobs(num_top, vocab_size)
        self.sampling = (*_GREEDY[:-2], self.logprobs.address, self._mask.address)


def _sampling(params: SamplingParams, sample_index: int, shaping: int, logprobs: int, mask: int) -> tuple[float, ...]:
    top_k, seed = min(params.top_k, 2**31 - 1), params.seed % 2**64
    return params.temperature, params.top_p, params.min_p, seed, sample_index, top_k, shaping, logprobs, mask
