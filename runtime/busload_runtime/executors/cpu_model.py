"""A model file packed for the C++ engine: which tensor rows go where, and the structs that describe the result."""

import ctypes
import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from busload_kernels.cpu import library as native
from busload_runtime.executors.errors import ExecutorError
from busload_runtime.model.architectures.description import Activation
from busload_runtime.model.config import ModelConfig
from busload_runtime.model.errors import ModelError
from busload_runtime.model.gguf_file import TensorInfo
from busload_runtime.model.progress import LoadProgress
from busload_runtime.model.weights import WeightFile

Rows: TypeAlias = NDArray[np.int32]

_TASK_ROWS = 4096
_ACTIVATIONS = {Activation.SILU: native.SILU, Activation.GELU_TANH: native.GELU_TANH}


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows `rows` of a tensor, to become consecutive rows of a packed matrix."""

    tensor: TensorInfo
    rows: Rows


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A packed matrix in the making."""

    parts: tuple[_Part, ...]
    cols: int

    @property
    def num_rows(self) -> int:
        return sum(len(part.rows) for part in self.parts)

    @property
    def packed_format(self) -> int:
        """4 bits if all parts are, else all of them become int8."""
        kinds = {native.load().bl_packed_format(part.tensor.type_id) for part in self.parts}
        return native.W4 if kinds == {native.W4} else native.W8

    @property
    def num_bytes(self) -> int:
        size: int = native.load().bl_packed_bytes(self.packed_format, self.num_rows, self.cols)
        return size


class PackedModel:
    """Weights in memory of their own, and `struct`, which `bl_create` takes. Both live as long as this object."""

    def __init__(self, weights: WeightFile, threads: int, room: int | None = None) -> None:
        """Packs with `threads` threads, in at most `room` bytes.

        Raises `ExecutorError` for a model that the engine cannot compute or that takes more.
        """
        config = weights.config
        check_shapes(config)
        self._library = native.load()
        self._arrays: list[NDArray[np.float32]] = []
        matrices = list(_matrices(weights))
        self.weight_bytes = sum(matrix.num_bytes for matrix in matrices)
        if room is not None and self.weight_bytes > room:
            raise ExecutorError(
                f"{weights.file.path} takes {self.weight_bytes / 2**20:.0f} MiB in memory and the memory limit leaves "
                f"{max(0, room) / 2**20:.0f} MiB for it beside what both processes need; raise the limit by at least "
                f"{-(-(self.weight_bytes - room) >> 20)} MiB and what the KV cache is to have, or choose a "
                "smaller model"
            )
        self._memory = self._library.bl_map(self.weight_bytes)
        if not self._memory:
            raise ExecutorError(f"cannot get {self.weight_bytes} bytes for the weights; raise the memory limit")
        packed = self._pack(weights, matrices, threads)
        self.struct = self._describe(weights, packed)
        # Nothing of the file is needed any more; its pages would count as this process's memory.
        weights.file.data.madvise(mmap.MADV_DONTNEED)

    def __del__(self) -> None:
        if getattr(self, "_memory", None):
            self._library.bl_unmap(self._memory, self.weight_bytes)

    def _pack(self, weights: WeightFile, matrices: list[_Matrix], threads: int) -> list[native.Matrix]:
        """One stretch of memory in the order of use, so that what is fetched ahead of one matrix is the next."""
        source = np.frombuffer(weights.file.data, np.uint8).ctypes.data
        progress = LoadProgress(weights.file.path, self.weight_bytes)
        packed, tasks, address = [], [], self._memory
        for matrix in matrices:
            rows = -(-matrix.num_rows // native.UNIT_ROWS) * native.UNIT_ROWS
            packed.append(native.Matrix(address, rows, matrix.cols, matrix.packed_format))
            tasks += [self._task(weights.file.path, source, matrix, address, chunk) for chunk in _chunks(matrix.parts)]
            address += matrix.num_bytes
        with ThreadPoolExecutor(min(threads, os.cpu_count() or 1)) as pool:
            for num_bytes in pool.map(lambda task: task(), tasks):
                progress.add(num_bytes)
        progress.finish()
        return packed

    def _task(
        self, file: str, source: int, matrix: _Matrix, address: int, chunk: list[tuple[int, _Part]]
    ) -> Callable[[], int]:
        def pack() -> int:
            """Returns the packed bytes."""
            for first, part in chunk:
                code = self._library.bl_pack_rows(
                    part.tensor.type_id,
                    source + part.tensor.offset,
                    matrix.cols,
                    part.rows.ctypes.data,
                    len(part.rows),
                    first,
                    matrix.packed_format,
                    address,
                )
                if code == -2:
                    raise ModelError(
                        f"{file}: tensor {part.tensor.name} holds values that are not finite; the file is corrupt, "
                        "download it again"
                    )
                if code:
                    raise ExecutorError(
                        f"tensor {part.tensor.name} has type {part.tensor.type_name}, which the CPU engine does not "
                        "read; quantise the model to another, or choose --executor reference"
                    )
            return matrix.num_bytes * sum(len(part.rows) for _, part in chunk) // matrix.num_rows

        return pack

    def _describe(self, weights: WeightFile, packed: list[native.Matrix]) -> native.Model:
        config = weights.config
        self._layers = (native.Layer * config.num_layers)()
        for index, attention in enumerate(config.layers):
            layer, vectors = self._layers[index], weights.vectors(index)
            layer.qkv, layer.attention_output, layer.gate_up, layer.down = packed[4 * index : 4 * index + 4]
            for field in fields(vectors):
                if (vector := getattr(vectors, field.name)) is not None:
                    setattr(layer, field.name, self._keep(vector))
            layer.window, layer.rope = attention.window, attention.rope
        return native.Model(
            num_layers=config.num_layers,
            hidden=config.hidden_size,
            ffn=config.ffn_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            vocab=config.vocab_size,
            num_ropes=len(config.ropes),
            activation=_ACTIVATIONS[config.activation],
            norm_eps=config.norm_eps,
            attention_scale=config.attention_scale,
            embedding_scale=config.embedding_scale,
            rope_frequencies=self._keep(weights.rope_frequencies()),
            layers=ctypes.cast(self._layers, ctypes.POINTER(native.Layer)),
            output=packed[4 * config.num_layers],
            embedding=packed[-1],
            final_norm=self._keep(weights.final_norm()),
        )

    def _keep(self, array: NDArray[np.float32]) -> int:
        self._arrays.append(np.ascontiguousarray(array, np.float32))
        return self._arrays[-1].ctypes.data


def check_shapes(config: ModelConfig) -> None:
    """Raises `ExecutorError` naming the first dimension that the kernels do not compute."""
    group_heads = config.num_heads // config.num_kv_heads
    limits = (
        ("embedding_length", config.hidden_size, config.hidden_size % native.GROUP == 0, "a multiple of 32"),
        ("feed_forward_length", config.ffn_size, config.ffn_size % native.GROUP == 0, "a multiple of 32"),
        (
            "attention.key_length",
            config.head_dim,
            config.head_dim % native.GROUP == 0 and config.head_dim <= native.MAX_HEAD_DIM,
            f"a multiple of 32 up to {native.MAX_HEAD_DIM}",
        ),
        (
            "attention.head_count / head_count_kv",
            group_heads,
            group_heads <= native.MAX_GROUP_HEADS,
            f"at most {native.MAX_GROUP_HEADS}",
        ),
    )
    for name, value, fits, allowed in limits:
        if not fits:
            raise ExecutorError(
                f"the model's {name} is {value}; the CPU engine computes {allowed}; choose --executor reference"
            )


def _matrices(weights: WeightFile) -> Iterator[_Matrix]:
    """In the order in which a step reads them."""
    config, tensors = weights.config, weights.file.tensors
    attended = config.num_heads * config.head_dim
    for index in range(config.num_layers):
        layer = {
            part: tensors[f"blk.{index}.{part}.weight"]
            for part in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
        }
        queries_and_keys = (_rotated_rows(layer[part], config) for part in ("attn_q", "attn_k"))
        yield _Matrix((*queries_and_keys, _all_rows(layer["attn_v"])), config.hidden_size)
        yield _Matrix((_all_rows(layer["attn_output"]),), attended)
        yield _Matrix(tuple(_interleaved(layer["ffn_gate"], layer["ffn_up"])), config.hidden_size)
        yield _Matrix((_all_rows(layer["ffn_down"]),), config.ffn_size)
    embedding = _Matrix((_all_rows(tensors["token_embd.weight"]),), config.hidden_size)
    if config.tied_embeddings:
        yield embedding
    else:
        yield _Matrix((_all_rows(tensors["output.weight"]),), config.hidden_size)
        yield embedding


def _all_rows(tensor: TensorInfo) -> _Part:
    return _Part(tensor, np.arange(tensor.shape[0], dtype=np.int32))


def _rotated_rows(tensor: TensorInfo, config: ModelConfig) -> _Part:
    """Rows of a head that turn together as (i, i + head_dim / 2), however the file has them."""
    if not config.architecture.rotates_pairs:
        return _all_rows(tensor)
    pairs = np.arange(tensor.shape[0], dtype=np.int32).reshape(-1, config.head_dim // 2, 2)
    return _Part(tensor, np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(-1))


def _interleaved(gate: TensorInfo, up: TensorInfo) -> Iterator[_Part]:
    """32 rows of gate, 32 of up, and so on: whoever computes them can multiply and quantise at once."""
    for first in range(0, gate.shape[0], native.UNIT_ROWS):
        rows = np.arange(first, first + native.UNIT_ROWS, dtype=np.int32)
        yield _Part(gate, rows)
        yield _Part(up, rows)


def _chunks(parts: Iterable[_Part]) -> Iterator[list[tuple[int, _Part]]]:
    """Pieces of about `_TASK_ROWS` rows, each part with the packed row at which it begins."""
    chunk: list[tuple[int, _Part]] = []
    size = first = 0
    for part in parts:
        for begin in range(0, len(part.rows), _TASK_ROWS):
            rows = part.rows[begin : begin + _TASK_ROWS]
            chunk.append((first, _Part(part.tensor, rows)))
            first += len(rows)
            size += len(rows)
            if size >= _TASK_ROWS:
                yield chunk
                chunk, size = [], 0
    if chunk:
        yield chunk
