"""What a model needs, from the header of its GGUF file: shapes and tensor types, no weights are read.

For the CPU engine the figures are those of its own layout (`kernels/busload_kernels/cpu/csrc/layout.h`, and `lay_out`
in `engine.cpp` for a step's buffers); tests compare them with what the engine says. For a GPU they follow from the
sizes of the elements that the caller names.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from busload_operator.tuning.planner import ModelFacts, StepMemory
from busload_runtime.model.bundled import PREFIX, resolve_source
from busload_runtime.model.config import ModelConfig, config_from_metadata
from busload_runtime.model.errors import ModelError
from busload_runtime.model.gguf_file import GgufFile, TensorInfo, open_gguf

MIB = 2**20

# Weights: tiles of 16 outputs x 32 inputs, of 4 or 8 bits and with their scales.
_TILE_BYTES = {4: 4 * 64 + 2 * 16 * 2, 8: 8 * 64 + 16 * 2}
_NIBBLES = frozenset({"Q4_0", "Q4_1", "Q4_K"})
_UNIT_ROWS, _GROUP, _BLOCK_TOKENS = 32, 32, 32
# Of a step's buffers: rows that each thread quantises for itself; bytes of a tile that is unpacked for a large batch,
# and of how many groups of inputs two such tiles are kept.
_OWN_ROWS, _WIDE_BYTES, _WIDE_GROUPS = 5, 8 * 64 + 2 * 16 * 4, 24
# Rows of activations in a panel. Panels that are taken through a matrix at once: so many inputs in all, and at least so
# many panels.
_PANEL_ROWS, _BLOCK_INPUTS, _LEAST_BLOCK = 48, 3 << 17, 2
# Sums of long contexts that are computed in segments: how many, and floats of each beside those of its rows.
_PARTIALS, _PARTIAL_HEAD = 512, 48
_ALIGNMENT = 64

# Two processes, measured on x86-64 after loading with vocabularies of 49,152 and 262,144 tokens (182 and 308 MiB, the
# 64 MiB that a pod keeps for growth included), with some room: a plan should rather be too careful.
_PROCESS_BYTES = 180 * MIB
_BYTES_PER_VOCABULARY_ENTRY = 576

GPU_OVERHEAD_BYTES = 1536 * MIB
"""Context, libraries' workspaces, captured graphs and what the allocator keeps, of one process on a GPU: the usual
order of size, no measurement. A pod measures its own at start."""
_GPU_BLOCK_TOKENS = 64
_GPU_ACTIVATION_BYTES = 2
_GPU_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class GpuElements:
    """Sizes that decide about GPU memory. None, the engine's default: 8 bits, of weights with an fp32 scale for each
    row and of keys and values with one for each token and head. A number of bits includes its scales."""

    weight_bits: float | None = None
    kv_bits: int | None = None
    overhead_bytes: int = GPU_OVERHEAD_BYTES


def read_header(source: str) -> tuple[str, GgufFile, ModelConfig]:
    """Name, file and shape of `bundled:NAME` or FILE.gguf. Raises `ModelError` with one line for the user."""
    file = open_gguf(resolve_source(source))
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ModelError(f"{file.path}: tokenizer.ggml.tokens is missing; the file has no vocabulary")
    tied = "output.weight" not in file.tensors
    config = config_from_metadata(file.path, file.metadata, len(tokens), tied)
    return source.removeprefix(PREFIX), file, config


def cpu_facts(name: str, file: GgufFile, config: ModelConfig) -> ModelFacts:
    """What the C++ engine needs. Raises `ModelError` when a tensor is missing."""
    step, table = _packed_bytes(file, config)
    return ModelFacts(
        name=name,
        weight_bytes=step + table,
        step_weight_bytes=step,
        # int8 keys and values, and an fp32 scale of each for every token and head.
        kv_bytes_per_token=config.num_layers * config.num_kv_heads * (2 * config.head_dim + 8),
        block_tokens=_BLOCK_TOKENS,
        context_length=config.context_length,
        step_memory=_cpu_step(config),
        overhead_bytes=_PROCESS_BYTES + _BYTES_PER_VOCABULARY_ENTRY * config.vocab_size,
    )


def gpu_facts(name: str, file: GgufFile, config: ModelConfig, elements: GpuElements) -> ModelFacts:
    """What an engine on a GPU needs whose weights, keys and values have elements of these sizes."""
    sizes = {key: _gpu_bytes(tensor, elements.weight_bits) for key, tensor in file.tensors.items()}
    table = _tensor(file, "token_embd.weight")
    output = sizes.pop("token_embd.weight")
    # The embedding is looked up as exact as activations are. If the output head is the same in fewer bits, both exist.
    embedding = _gpu_bytes(table, 8 * _GPU_ACTIVATION_BYTES)
    multiplied = sum(sizes.values()) + (output if config.tied_embeddings else 0)
    shared = config.tied_embeddings and elements.weight_bits == 8 * _GPU_ACTIVATION_BYTES
    rotations = 4 * config.context_length * config.head_dim
    weights = multiplied + rotations + (0 if shared else embedding)
    attended = config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    # Residual, norm and branch; queries, keys, values and what was attended; gate, up and their product.
    row = 3 * config.hidden_size + 2 * attended + 2 * keys + 3 * config.ffn_size
    heads = 2 * config.num_layers * config.num_kv_heads
    head = config.head_dim + _GPU_SCALE_BYTES if elements.kv_bits is None else config.head_dim * elements.kv_bits / 8
    return ModelFacts(
        name=name,
        weight_bytes=weights,
        step_weight_bytes=multiplied,
        kv_bytes_per_token=math.ceil(heads * head),
        block_tokens=_GPU_BLOCK_TOKENS,
        context_length=config.context_length,
        # Logits are fp32, and sampling needs a copy of them.
        step_memory=StepMemory(per_token=row * _GPU_ACTIVATION_BYTES, per_request=2 * 4 * config.vocab_size),
        overhead_bytes=elements.overhead_bytes,
    )


def _gpu_bytes(tensor: TensorInfo, weight_bits: float | None) -> int:
    count = math.prod(tensor.shape)
    if len(tensor.shape) < 2:
        return count * _GPU_ACTIVATION_BYTES
    if weight_bits is None:
        return count + tensor.shape[0] * _GPU_SCALE_BYTES
    return round(count * weight_bits / 8)


def _packed_bytes(file: GgufFile, config: ModelConfig) -> tuple[int, int]:
    """Bytes of packed weights that every step reads, and of an embedding table that it only looks up in."""
    total = 0
    for index in range(config.num_layers):
        for parts in (("attn_q", "attn_k", "attn_v"), ("attn_output",), ("ffn_gate", "ffn_up"), ("ffn_down",)):
            total += _matrix_bytes(_tensor(file, f"blk.{index}.{part}.weight") for part in parts)
    table = _matrix_bytes([_tensor(file, "token_embd.weight")])
    if config.tied_embeddings:
        return total + table, 0
    return total + _matrix_bytes([_tensor(file, "output.weight")]), table


def _matrix_bytes(parts: Iterable[TensorInfo]) -> int:
    """Tensors packed on top of each other: 4 bits if all of them are, else 8."""
    tensors = list(parts)
    bits = 4 if all(tensor.type_name in _NIBBLES for tensor in tensors) else 8
    rows, cols = sum(tensor.shape[0] for tensor in tensors), tensors[0].shape[1]
    return -(-rows // _UNIT_ROWS) * 2 * (cols // _GROUP) * _TILE_BYTES[bits]


def _tensor(file: GgufFile, name: str) -> TensorInfo:
    tensor = file.tensors.get(name)
    if tensor is None or len(tensor.shape) != 2:
        raise ModelError(
            f"{file.path}: tensor {name} is missing or no matrix; the file is incomplete, download it again"
        )
    return tensor


def _cpu_step(config: ModelConfig) -> StepMemory:
    """Buffers of a step as the engine lays them out; each rounded up to a cache line and for an odd row stride."""
    attended = config.num_heads * config.head_dim
    qkv = attended + 2 * config.num_kv_heads * config.head_dim
    widths = (config.hidden_size, attended, config.ffn_size)
    quantised = sum(map(_quantised, widths))
    per_token = (
        2 * 4 * config.hidden_size  # residual and branch
        + 4 * _whole_units(qkv)
        + 4 * len(config.ropes) * config.head_dim  # cosines and sines
        + attended
        + 2 * 4 * config.num_heads  # queries
    )
    per_thread = _OWN_ROWS * _quantised(config.hidden_size) + _WIDE_GROUPS * 2 * _WIDE_BYTES + 2 * 4 * config.vocab_size
    per_request = (
        4 * _whole_units(config.vocab_size)  # logits
        + 4 * config.hidden_size  # residual of the last layer
    )
    partial = _PARTIAL_HEAD + config.num_heads // config.num_kv_heads * (config.head_dim + 16)
    return StepMemory(
        fixed=4 * _PARTIALS * (partial + 1) + 28 * _ALIGNMENT,
        per_thread=per_thread + 12 * _ALIGNMENT,
        per_token=per_token,
        per_token_and_thread=2 * 4 * _UNIT_ROWS,
        tokens_at_once=max(_BLOCK_INPUTS // config.hidden_size // _PANEL_ROWS, _LEAST_BLOCK) * _PANEL_ROWS,
        per_request=per_request,
        per_row_of_tokens=quantised,
        per_row_of_requests=_quantised(attended),  # of the last layer
        panel=_PANEL_ROWS,
    )


def _quantised(cols: int) -> int:
    """Bytes of one row of activations: a byte each; scale, offset and sum for every 32."""
    return cols + cols // _GROUP * 12


def _whole_units(rows: int) -> int:
    return -(-rows // _UNIT_ROWS) * _UNIT_ROWS
