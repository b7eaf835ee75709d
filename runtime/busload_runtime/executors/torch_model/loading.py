"""From a model file to a decoder on a device, layer by layer: a layer is the most that is held twice."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from busload_kernels.gpu.linear import interleave_gate_up, pack_int4
from busload_runtime.executors.errors import ExecutorError
from busload_runtime.executors.torch_model.decoder import Decoder, DecoderLayer
from busload_runtime.executors.torch_model.ops import HeadNorms, Tensor, Weight
from busload_runtime.executors.torch_model.quantise import quantise_matrix
from busload_runtime.model.architectures.description import Activation
from busload_runtime.model.config import ModelConfig
from busload_runtime.model.errors import ModelError
from busload_runtime.model.progress import LoadProgress
from busload_runtime.model.weights import WeightFile

QUANTISED = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
FLOATS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Int4:
    """A matrix in 4 bits: codes [outputs, inputs] int8 from -8 to 7 times scales [outputs, inputs / group]."""

    codes: Tensor
    scales: Tensor

    def dequantised(self) -> Tensor:
        """fp32"""
        groups = self.codes.unflatten(1, (self.scales.shape[1], -1)).float()
        return (groups * self.scales.float()[..., None]).flatten(1)


Matrix: TypeAlias = Tensor | Int4


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """A layer as files have it. Matrices are [outputs, inputs], heads laid out for rotation by halves."""

    attention_norm: Tensor
    ffn_norm: Tensor
    qkv: tuple[Matrix, ...]
    """[(heads + 2 kv_heads) * head_dim, hidden] in parts: queries, keys, values."""
    qkv_bias: tuple[Tensor, ...]
    """In parts; none without bias."""
    query_norm: Tensor | None
    key_norm: Tensor | None
    attention_output: Matrix
    gate: Matrix
    up: Matrix
    down: Matrix


class Checkpoint(Protocol):
    """A checked model file, of any format. Tensors are read when asked for, on the CPU."""

    config: ModelConfig

    @property
    def path(self) -> str: ...

    def embedding(self) -> Tensor:
        """[vocab, hidden]"""

    def output(self) -> Tensor:
        """[vocab, hidden]; not there when `config.tied_embeddings`."""

    def final_norm(self) -> Tensor:
        """[hidden]"""

    def layer(self, index: int) -> LayerTensors: ...

    def rope_frequencies(self) -> Tensor:
        """[head_dim / 2] fp32, radians per position."""


class GgufCheckpoint:
    """Implements `Checkpoint` on a GGUF file."""

    def __init__(self, weights: WeightFile) -> None:
        self._weights = weights
        self.config = weights.config

    @property
    def path(self) -> str:
        return self._weights.file.path

    def embedding(self) -> Tensor:
        return torch.from_numpy(self._weights.embedding())

    def output(self) -> Tensor:
        return torch.from_numpy(self._weights.output())

    def final_norm(self) -> Tensor:
        return torch.from_numpy(self._weights.final_norm())

    def rope_frequencies(self) -> Tensor:
        return torch.from_numpy(self._weights.rope_frequencies()[0])

    def layer(self, index: int) -> LayerTensors:
        layer = self._weights.layer(index)
        vectors = layer.vectors
        gate, up = torch.from_numpy(layer.gate_up).chunk(2)

        def optional(vector: NDArray[np.float32] | None) -> Tensor | None:
            return None if vector is None else torch.from_numpy(vector)

        return LayerTensors(
            attention_norm=torch.from_numpy(vectors.attention_norm),
            ffn_norm=torch.from_numpy(vectors.ffn_norm),
            qkv=(torch.from_numpy(layer.qkv),),
            qkv_bias=() if vectors.qkv_bias is None else (torch.from_numpy(vectors.qkv_bias),),
            query_norm=optional(vectors.query_norm),
            key_norm=optional(vectors.key_norm),
            attention_output=torch.from_numpy(layer.attention_output),
            gate=gate,
            up=up,
            down=torch.from_numpy(layer.down),
        )


@dataclass(frozen=True, slots=True)
class Placement:
    """Where weights go and as what."""

    device: torch.device
    activations: torch.dtype
    precision: str
    """Of the matrices: a name of `QUANTISED`, or that of the activations."""

    def weight(self, parts: Sequence[Matrix], bias: Sequence[Tensor] = (), gated: bool = False) -> Weight:
        """Parts on top of each other on the device, or gate and up row by row; quantised there by rows if asked."""
        moved = self.vector(torch.cat(tuple(bias))) if bias else None
        packed = [part for part in parts if isinstance(part, Int4)]
        if len(packed) == len(parts) and len({part.codes.shape[1] // part.scales.shape[1] for part in packed}) == 1:
            codes = _joined([part.codes.to(self.device) for part in packed], gated)
            scales = _joined([part.scales.to(self.device, self.activations) for part in packed], gated)
            group = codes.shape[1] // scales.shape[1]
            return Weight(pack_int4(codes, group), scales.contiguous(), moved)
        floats = [part.dequantised() if isinstance(part, Int4) else part for part in parts]
        there = _joined([part.to(self.device) for part in floats], gated)
        if self.precision not in QUANTISED:
            return Weight(there.to(self.activations).contiguous(), None, moved)
        return Weight(*quantise_matrix(there, QUANTISED[self.precision]), moved)

    def vector(self, vector: Tensor) -> Tensor:
        return vector.to(self.device, self.activations)

    def num_bytes(self, config: ModelConfig) -> int:
        """Of all weights, without the few of vectors."""
        size = QUANTISED.get(self.precision, self.activations).itemsize
        table = config.vocab_size * config.hidden_size
        embedding = table * self.activations.itemsize
        own_output = size != self.activations.itemsize or not config.tied_embeddings
        layers = config.num_layers * matrix_numbers(config) * size
        output = table * size if own_output else 0
        return int(layers + embedding + output + config.context_length * config.head_dim * 4)


def load_decoder(checkpoint: Checkpoint, placement: Placement) -> Decoder:
    """Raises `ModelError` for values that are not finite."""
    config = checkpoint.config
    per_layer = matrix_numbers(config)
    progress = LoadProgress(checkpoint.path, config.num_layers * per_layer * placement.activations.itemsize)
    layers = []
    for index in range(config.num_layers):
        layers.append(_layer(checkpoint.layer(index), config, placement))
        progress.add(per_layer * placement.activations.itemsize)
    embedding = placement.vector(checkpoint.embedding())
    if config.tied_embeddings and placement.precision not in QUANTISED:
        output = Weight(embedding)
    else:
        output = placement.weight([embedding if config.tied_embeddings else checkpoint.output()])
    progress.finish()
    decoder = Decoder(
        embedding=embedding,
        layers=tuple(layers),
        final_norm=placement.vector(checkpoint.final_norm()),
        output=output,
        cos_sin=_cos_sin(checkpoint.rope_frequencies().to(placement.device), config.context_length),
        norm_eps=config.norm_eps,
        attention_scale=config.attention_scale,
    )
    _check_finite(checkpoint.path, decoder)
    return decoder


def check_family(config: ModelConfig) -> None:
    """Raises `ExecutorError` for what `Decoder` does not compute."""
    has = config.architecture
    if has.post_norms or has.scales_embedding or has.activation is not Activation.SILU or len(config.ropes) > 1:
        raise ExecutorError(
            f"the model's architecture is {has.name!r}; the cuda executor computes the Llama family (llama, mistral, "
            "qwen2, qwen3); choose --executor cpu"
        )


def matrix_numbers(config: ModelConfig) -> int:
    """Numbers in the matrices of one layer."""
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return config.hidden_size * (2 * q_size + 2 * kv_size + 3 * config.ffn_size)


def _joined(parts: Sequence[Tensor], gated: bool) -> Tensor:
    if gated:
        return interleave_gate_up(*parts)
    return torch.cat(tuple(parts)) if len(parts) > 1 else parts[0]


def _layer(layer: LayerTensors, config: ModelConfig, placement: Placement) -> DecoderLayer:
    norms = None
    if layer.query_norm is not None and layer.key_norm is not None:
        norms = HeadNorms(placement.vector(layer.query_norm), placement.vector(layer.key_norm))
    return DecoderLayer(
        attention_norm=placement.vector(layer.attention_norm),
        qkv=placement.weight(layer.qkv, layer.qkv_bias),
        head_norms=norms,
        attention_output=placement.weight([layer.attention_output]),
        ffn_norm=placement.vector(layer.ffn_norm),
        gate_up=placement.weight([layer.gate, layer.up], gated=True),
        down=placement.weight([layer.down]),
    )


def _cos_sin(frequencies: Tensor, positions: int) -> Tensor:
    angles = torch.arange(positions, device=frequencies.device, dtype=torch.float32)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), 1)


def _check_finite(path: str, decoder: Decoder) -> None:
    """Fp16 ends at 65504, where bf16 and fp32 go on: a model may be sound and still not fit."""
    for index, layer in enumerate(decoder.layers):
        for name in ("qkv", "attention_output", "gate_up", "down"):
            weight: Weight = getattr(layer, name)
            tested = weight.values if weight.scales is None else weight.scales
            if not torch.isfinite(tested).all():
                raise ModelError(
                    f"{path}: layer {index} has {name} weights that are not finite as {tested.dtype}; the file is "
                    "corrupt, download it again, or its values need a wider type"
                )


def context_length(config: ModelConfig) -> int:
    """Longest sequence that is served: attention here has no sliding window, and up to its length none is needed."""
    windows = [layer.window for layer in config.layers if layer.window]
    return min([config.context_length, *windows])
