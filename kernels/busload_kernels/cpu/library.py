"""The C interface of `csrc/abi.h` for ctypes. Structs and signatures mirror it field by field."""

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_double, c_float, c_int32, c_int64, c_uint64, c_void_p
from functools import cache

from busload_kernels.cpu.build import library_path
from busload_kernels.cpu.errors import KernelError

W4, W8 = 0, 1
SILU, GELU_TANH = 0, 1
KV_INT8, KV_FP32 = 0, 1
BLOCK_TOKENS = 32
GROUP = 32
UNIT_ROWS = 32
MAX_HEAD_DIM = 256
MAX_GROUP_HEADS = 16
"""Query heads per key-value head."""
ISAS = ("avx512", "avx2", "portable")


class Matrix(Structure):
    """`BlMatrix`: a packed weight matrix."""

    _fields_ = (("data", c_void_p), ("rows", c_int32), ("cols", c_int32), ("format", c_int32), ("reserved", c_int32))


class Layer(Structure):
    """`BlLayer`."""

    _fields_ = (
        *((name, Matrix) for name in ("qkv", "attention_output", "gate_up", "down")),
        *((name, c_void_p) for name in ("attention_norm", "ffn_norm", "qkv_bias", "query_norm", "key_norm")),
        *((name, c_void_p) for name in ("post_attention_norm", "post_ffn_norm")),
        ("window", c_int32),
        ("rope", c_int32),
    )


class Model(Structure):
    """`BlModel`."""

    _fields_ = (
        *((name, c_int32) for name in ("num_layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab")),
        *((name, c_int32) for name in ("num_ropes", "activation", "kv_format")),
        *((name, c_float) for name in ("norm_eps", "attention_scale", "embedding_scale", "reserved2")),
        ("rope_frequencies", c_void_p),
        ("layers", POINTER(Layer)),
        ("embedding", Matrix),
        ("output", Matrix),
        ("final_norm", c_void_p),
    )


class Shaping(Structure):
    """`BlShaping`."""

    _fields_ = (
        *((name, c_double) for name in ("frequency_penalty", "presence_penalty", "repetition_penalty")),
        ("history", c_void_p),
        ("prompt_tokens", c_int64),
        ("drawn_tokens", c_int64),
        ("bias_tokens", c_void_p),
        ("biases", c_void_p),
        ("num_biases", c_int64),
    )


class Logprobs(Structure):
    """`BlLogprobs`."""

    _fields_ = (("top_tokens", c_void_p), ("top", c_void_p), ("num_top", c_int32), ("drawn", c_float))


class Sampling(Structure):
    """`BlSampling`."""

    _fields_ = (
        ("temperature", c_double),
        ("top_p", c_double),
        ("min_p", c_double),
        ("seed", c_uint64),
        ("index", c_uint64),
        ("top_k", c_int64),
        ("shaping", c_void_p),
        ("logprobs", c_void_p),
        ("mask", c_void_p),
    )


class Step(Structure):
    """`BlStep`."""

    _fields_ = (
        ("num_chunks", c_int32),
        ("num_samples", c_int32),
        *((name, c_void_p) for name in ("tokens", "chunk_tokens", "chunk_start", "chunk_blocks", "blocks")),
        ("num_blocks", c_int64),
        *((name, c_void_p) for name in ("sample_rows", "sampling", "sampled", "logits")),
    )


_SIGNATURES: dict[str, tuple[type | None, tuple[object, ...]]] = {
    "bl_create": (c_void_p, (POINTER(Model), c_int32, c_char_p)),
    "bl_destroy": (None, (c_void_p,)),
    "bl_isa": (c_char_p, (c_void_p,)),
    "bl_isa_runs": (c_int32, (c_char_p,)),
    "bl_kv_reserve": (c_int32, (c_void_p, c_int64)),
    "bl_kv_release_from": (c_int32, (c_void_p, c_int64)),
    "bl_kv_block_bytes": (c_int64, (POINTER(Model),)),
    "bl_scratch_bytes": (c_int64, (POINTER(Model), c_int32, c_int64, c_int64)),
    "bl_step": (c_int32, (c_void_p, POINTER(Step))),
    "bl_profile": (c_int32, (c_void_p, c_void_p)),
    "bl_phase_name": (c_char_p, (c_int32,)),
    "bl_packed_bytes": (c_int64, (c_int32, c_int64, c_int64)),
    "bl_packed_format": (c_int32, (c_int32,)),
    "bl_pack_rows": (c_int32, (c_int32, c_void_p, c_int64, c_void_p, c_int64, c_int64, c_int32, c_void_p)),
    "bl_unpack_row": (None, (POINTER(Matrix), c_int64, c_void_p)),
    "bl_map": (c_void_p, (c_int64,)),
    "bl_unmap": (None, (c_void_p, c_int64)),
    "bl_bandwidth": (c_double, (c_void_p, c_int64, c_int32, c_double, c_int32)),
    "bl_uniform": (c_double, (c_uint64, c_uint64)),
}


@cache
def load() -> ctypes.CDLL:
    """The library with typed functions; built first if need be. Raises `KernelError`."""
    path = library_path()
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelError(
            f"cannot load the CPU engine {path}: {error}; delete the file to have it built again"
        ) from None
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def usable_isas() -> tuple[str, ...]:
    """The paths this CPU can run, fastest first."""
    return tuple(isa for isa in ISAS if load().bl_isa_runs(isa.encode()))
