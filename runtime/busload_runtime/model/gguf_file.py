"""A thin, strict reader of GGUF files: metadata and tensor table parsed, tensor data memory-mapped.

The `gguf` library has a reader too; it builds one numpy object per metadata element (seconds for a vocabulary of 49k
tokens) and answers corrupt files with whatever exception comes first. Its dequantisation is used as it is.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import mmap
import os
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from busload_runtime.model.errors import ModelError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4
_F32 = 0

# Tensor types that are read: ggml type id -> (name, elements per block, bytes per block).
TENSOR_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One entry of the tensor table."""

    name: str
    shape: tuple[int, ...]
    """numpy order: rows first (GGUF stores the fastest dimension first)."""
    type_id: int
    offset: int
    """Of the first byte, from the start of the file."""
    num_bytes: int

    @property
    def type_name(self) -> str:
        return TENSOR_TYPES[self.type_id][0]


@dataclass(frozen=True, slots=True)
class GgufFile:
    """An open file. The data stays mapped as long as this object lives."""

    path: str
    metadata: dict[str, Any]
    """Integers, floats, booleans, strings and lists of them."""
    tensors: dict[str, TensorInfo]
    data: mmap.mmap

    def read(self, name: str, shape: tuple[int, ...]) -> "NDArray[np.float32]":
        """Tensor `name` dequantised to a fresh fp32 array.

        Raises `ModelError` if it is missing, not of `shape`, or holds what is not a finite number: one bad row of the
        embedding would let the model start and then end the engine with the first request that has this token.
        """
        import numpy as np  # here: the HTTP process reads only metadata

        self.check_shapes({name: shape})
        info = self.tensors[name]
        raw = np.frombuffer(self.data, np.uint8, info.num_bytes, info.offset)
        if info.type_id == _F32:
            values = raw.view(np.float32).reshape(shape).copy()
        else:
            # Here: what is norms and biases, all that the CPU engine reads in fp32, mostly is fp32 in the file.
            from gguf.constants import GGMLQuantizationType
            from gguf.quants import dequantize

            with np.errstate(all="ignore"):  # a corrupt scale may be inf or nan
                rows = dequantize(raw.reshape(math.prod(shape[:-1]), -1), GGMLQuantizationType(info.type_id))
            values = np.ascontiguousarray(rows, np.float32).reshape(shape)
        if not (np.isfinite(values.min()) and np.isfinite(values.max())):  # both are nan if any value is
            raise ModelError(
                f"{self.path}: tensor {name} holds values that are not finite; the file is corrupt, download it again"
            )
        return values

    def check_shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raises `ModelError` at the first tensor of `shapes` that is missing or has another shape."""
        for name, shape in shapes.items():
            info = self.tensors.get(name)
            if info is None:
                raise ModelError(f"{self.path}: tensor {name} is missing; the file is incomplete, download it again")
            if info.shape != shape:
                raise ModelError(f"{self.path}: tensor {name} has shape {info.shape}; the model's config says {shape}")


def open_gguf(path: str) -> GgufFile:
    """Maps `path` and parses its header. Raises `ModelError` for anything that is not a whole, known GGUF file."""
    try:
        with open(path, "rb", opener=_open_without_waiting) as file:
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode):
                raise ModelError(f"{path}: is not a regular file; give the path of a GGUF file or bundled:NAME")
            if about.st_size == 0:
                raise ModelError(f"{path}: the file is empty; expected a GGUF model")
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file; give the path of a GGUF file or bundled:NAME") from None
    except (OSError, ValueError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{path}: cannot be read: {error}") from None
    return _Parser(path, data).parse()


def _open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a FIFO would wait for a writer, for ever


class _Parser:
    """Walks the header. Every read is bounds-checked, so a wrong length is an error and never a huge allocation."""

    def __init__(self, path: str, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.position = 0

    def parse(self) -> GgufFile:
        if (magic := self.take(4, "magic")) != MAGIC:
            self.fail(f"starts with {magic!r} instead of {MAGIC!r}; it is not a GGUF model")
        version = self.scalar("<I", "version")
        if version not in _VERSIONS:
            hint = "a big-endian file" if version & 0xFFFF == 0 else "an unknown version"
            self.fail(f"GGUF version is {version} ({hint}); supported: {', '.join(map(str, _VERSIONS))}, little-endian")
        num_tensors = self.scalar("<Q", "tensor count")
        num_fields = self.scalar("<Q", "metadata count")
        metadata: dict[str, Any] = {}
        for index in range(num_fields):
            key = self.string(f"metadata key {index}")
            if key in metadata:
                self.fail(f"metadata key {key!r:.80} appears twice; the file is corrupt")
            metadata[key] = self.value(self.scalar("<I", key), key)
        entries = [self.tensor_entry(index) for index in range(num_tensors)]
        return GgufFile(self.path, metadata, self.place(entries, self.alignment(metadata)), self.data)

    def alignment(self, metadata: dict[str, Any]) -> int:
        value = metadata.get("general.alignment", 32)
        if not isinstance(value, int) or not 8 <= value <= 2**20 or value & (value - 1):
            self.fail(f"general.alignment is {value!r:.80}; must be a power of two from 8 to {2**20}")
        return value

    def tensor_entry(self, index: int) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string(f"name of tensor {index}")
        where = f"tensor {name!r:.80}"
        dimensions = self.scalar("<I", where)
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            self.fail(f"{where} has {dimensions} dimensions; allowed: 1 to {_MAX_DIMENSIONS}; the file is corrupt")
        shape = tuple(self.scalar("<Q", where) for _ in range(dimensions))[::-1]
        return name, shape, self.scalar("<I", where), self.scalar("<Q", where)

    def place(self, entries: list[tuple[str, tuple[int, ...], int, int]], alignment: int) -> dict[str, TensorInfo]:
        start = -(-self.position // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, shape, type_id, offset in entries:
            where = f"tensor {name!r:.80}"
            if name in tensors:
                self.fail(f"{where} appears twice; the file is corrupt")
            if type_id not in TENSOR_TYPES:
                names = ", ".join(kind[0] for kind in TENSOR_TYPES.values())
                self.fail(f"{where} has type {type_id}; supported: {names}; quantise the model to one of them")
            _, block, block_bytes = TENSOR_TYPES[type_id]
            if 0 in shape or shape[-1] % block:
                self.fail(f"{where} has shape {shape}; rows must be whole blocks of {block}; the file is corrupt")
            num_bytes = math.prod(shape) // block * block_bytes
            if offset % alignment:
                self.fail(f"{where} starts at offset {offset}, not a multiple of {alignment}; the file is corrupt")
            if start + offset + num_bytes > len(self.data):
                self.fail(
                    f"{where} ends at byte {start + offset + num_bytes} but the file has {len(self.data)} bytes; "
                    "it is truncated, download it again"
                )
            tensors[name] = TensorInfo(name, shape, type_id, start + offset, num_bytes)
        return tensors

    def value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self.string(key)
        if kind != _ARRAY:
            return self.scalar(self.scalar_format(kind, key), key)
        item_kind, length = self.scalar("<I", key), self.scalar("<Q", key)
        if item_kind == _STRING:
            return self.strings(length, key)
        layout = self.scalar_format(item_kind, key)
        width = struct.calcsize(layout)
        raw = self.take(length * width, key)
        return list(struct.unpack(f"<{length}{layout[-1]}", raw))

    def scalar_format(self, kind: int, key: str) -> str:
        if kind not in _SCALARS:
            self.fail(f"metadata {key!r:.80} has value type {kind}; the file is corrupt or newer than this reader")
        return _SCALARS[kind]

    def scalar(self, layout: str, what: str) -> Any:
        return struct.unpack(layout, self.take(struct.calcsize(layout), what))[0]

    def strings(self, count: int, what: str) -> list[str]:
        """`count` times `string`, without its cost per call: vocabularies have 262,144 of them."""
        data, position = self.data, self.position
        length_at = struct.Struct("<Q").unpack_from
        found = []
        try:
            for _ in range(count):
                begin = position + 8
                position = begin + length_at(data, position)[0]
                found.append(data[begin:position].decode())
        except (struct.error, UnicodeDecodeError, OverflowError, ValueError):
            position = len(data) + 1
        if position > len(data):  # again and slowly, for the error's sake
            return [self.string(what) for _ in range(count)]
        self.position = position
        return found

    def string(self, what: str) -> str:
        raw = self.take(self.scalar("<Q", what), what)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            self.fail(f"{what:.80} holds bytes that are not UTF-8 ({raw[:20]!r}); the file is corrupt")

    def take(self, count: int, what: str) -> bytes:
        end = self.position + count
        if end > len(self.data):
            self.fail(f"ends inside its header, at {what:.80}; it is truncated or corrupt, download it again")
        raw = self.data[self.position : end]
        self.position = end
        return raw

    def fail(self, problem: str) -> NoReturn:
        raise ModelError(f"{self.path}: {problem}")
