"""The weights of a Hugging Face folder: safetensors files, memory-mapped, checked by their headers before any is read.

Format: https://github.com/huggingface/safetensors. Queries and keys lie there as our rotation wants them.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from busload_runtime.executors.torch_model.int4_checkpoint import PackedInt4, packing_of
from busload_runtime.executors.torch_model.loading import LayerTensors, Matrix
from busload_runtime.executors.torch_model.ops import Tensor
from busload_runtime.model.config import ModelConfig
from busload_runtime.model.errors import ModelError
from busload_runtime.model.folder import Llama3Scaling, ModelFolder, read_json

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_FLOATS = ("F32", "F16", "BF16")
_IGNORED = ("rotary_emb.inv_freq", "lm_head.weight")
"""Ends of names that older files carry though nothing is computed with them; the output head only if it is tied."""


@dataclass(frozen=True, slots=True)
class _Entry:
    file: Any
    """What `safe_open` returned."""
    shape: tuple[int, ...]
    dtype: str


class FolderCheckpoint:
    """Implements `loading.Checkpoint` on a folder."""

    def __init__(self, folder: ModelFolder, allow_int4: bool = False) -> None:
        """Raises `ModelError` unless the files hold exactly the tensors of the config, in types that are read."""
        self.path = folder.path
        self.config = folder.config
        self._scaling = folder.scaling
        self._packing = packing_of(f"{folder.path}/config.json", folder.quantisation, allow_int4)
        self._entries = _open_files(folder.path)
        self._check()

    def embedding(self) -> Tensor:
        return self._tensor("model.embed_tokens.weight")

    def output(self) -> Tensor:
        return self._tensor("lm_head.weight")

    def final_norm(self) -> Tensor:
        return self._tensor("model.norm.weight")

    def layer(self, index: int) -> LayerTensors:
        has = self.config.architecture
        prefix = f"model.layers.{index}"

        def norm(name: str) -> Tensor:
            return self._tensor(f"{prefix}.{name}.weight")

        def matrix(name: str) -> Matrix:
            return self._matrix(f"{prefix}.{name}")

        parts = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        return LayerTensors(
            attention_norm=norm("input_layernorm"),
            ffn_norm=norm("post_attention_layernorm"),
            qkv=tuple(map(matrix, parts)),
            qkv_bias=tuple(self._tensor(f"{prefix}.{part}.bias") for part in parts if has.qkv_bias),
            query_norm=norm("self_attn.q_norm") if has.query_key_norm else None,
            key_norm=norm("self_attn.k_norm") if has.query_key_norm else None,
            attention_output=matrix("self_attn.o_proj"),
            gate=matrix("mlp.gate_proj"),
            up=matrix("mlp.up_proj"),
            down=matrix("mlp.down_proj"),
        )

    def rope_frequencies(self) -> Tensor:
        (rope,) = self.config.ropes
        half = self.config.head_dim // 2
        exponents = torch.arange(half, dtype=torch.float64) / half
        frequencies = rope.theta**-exponents / rope.linear_factor
        if self._scaling is not None:
            frequencies = slowed(frequencies, self._scaling)
        return frequencies.float()

    def _tensor(self, name: str) -> Tensor:
        try:
            return self._entries[name].file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{self.path}: tensor {name} cannot be read: {error}; download the model again") from None

    def _matrix(self, name: str) -> Matrix:
        if self._packing is None:
            return self._tensor(f"{name}.weight")
        parts = {
            part: self._tensor(f"{name}.{part}") for part in self._packing.parts if f"{name}.{part}" in self._entries
        }
        return self._packing.unpack(f"{self.path}: {name}", parts)

    def _check(self) -> None:
        wanted, matrices = _shapes(self.config)
        types: dict[str, str] = {}
        for name, shape in wanted.items():
            if name in matrices and self._packing is not None and "layers." in name:
                self._check_packed(self._packing, name.removesuffix(".weight"), shape)
                continue
            entry = self._entry(name, shape)
            if entry.dtype not in _FLOATS:
                raise ModelError(
                    f"{self.path}: tensor {name} is {entry.dtype}; supported: {', '.join(_FLOATS)}, and 4-bit GPTQ and "
                    "AWQ; choose such a checkpoint"
                )
            if name in matrices:
                types.setdefault(entry.dtype, name)
        if len(types) > 1:
            (one, first), (other, second) = list(types.items())[:2]
            raise ModelError(
                f"{self.path}: tensor {first} is {one} and {second} is {other}; the matrices of a checkpoint have one "
                "type: it is put together from different ones, save it again in one"
            )
        strangers = sorted(name for name in set(self._entries) - self._known(wanted) if not name.endswith(_IGNORED))
        if strangers:
            raise ModelError(
                f"{self.path}: tensor {strangers[0]!r:.120} is not part of a plain {self.config.num_layers}-layer "
                f"{self.config.architecture.name} model; other biases, experts and additions are not supported"
            )

    def _entry(self, name: str, shape: Sequence[int]) -> _Entry:
        entry = self._entries.get(name)
        if entry is None:
            raise ModelError(f"{self.path}: tensor {name} is missing; the folder is incomplete, download it again")
        if entry.shape != tuple(shape):
            raise ModelError(f"{self.path}: tensor {name} has shape {entry.shape}; config.json says {tuple(shape)}")
        return entry

    def _check_packed(self, packing: PackedInt4, name: str, shape: tuple[int, int]) -> None:
        for part, size in packing.shapes(f"{self.path}: {name}", *shape).items():
            self._entry(f"{name}.{part}", size)

    def _known(self, wanted: Mapping[str, Any]) -> set[str]:
        known = set(wanted)
        if self._packing is not None:
            known |= {name.removesuffix("weight") + part for name in wanted for part in self._packing.parts}
        return known


def slowed(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Llama 3.1's frequencies: wavelengths above `original_context / low_freq_factor` are stretched by `factor`, those
    below `original_context / high_freq_factor` stay, and between the two it goes linearly in the frequency."""
    turns = scaling.original_context * frequencies / (2 * math.pi)
    share = ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)
    return frequencies * (share + (1 - share) / scaling.factor)


def _shapes(config: ModelConfig) -> tuple[dict[str, Any], set[str]]:
    """Shapes by name of all tensors, in the order of use, and which are matrices of layers or tables."""
    has, hidden, ffn = config.architecture, config.hidden_size, config.ffn_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    table = (config.vocab_size, hidden)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": table, "model.norm.weight": (hidden,)}
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = table
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}"
        attention = {"q_proj": (queries, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden)}
        for part, shape in attention.items():
            shapes[f"{prefix}.self_attn.{part}.weight"] = shape
            if has.qkv_bias:
                shapes[f"{prefix}.self_attn.{part}.bias"] = shape[:1]
        if has.query_key_norm:
            shapes |= {f"{prefix}.self_attn.{part}_norm.weight": (config.head_dim,) for part in "qk"}
        shapes |= {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.self_attn.o_proj.weight": (hidden, queries),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
            f"{prefix}.mlp.gate_proj.weight": (ffn, hidden),
            f"{prefix}.mlp.up_proj.weight": (ffn, hidden),
            f"{prefix}.mlp.down_proj.weight": (hidden, ffn),
        }
    return shapes, {name for name, shape in shapes.items() if len(shape) == 2}


def _open_files(path: str) -> dict[str, _Entry]:
    """All tensors of the folder's files."""
    entries: dict[str, _Entry] = {}
    for name in _file_names(path):
        file = f"{path}/{name}"
        try:
            opened: Any = safe_open(file, framework="pt")
            for tensor in opened.keys():  # noqa: SIM118 - not a mapping
                view = opened.get_slice(tensor)
                if tensor in entries:
                    raise ModelError(f"{file}: tensor {tensor!r:.120} is in another file too; the folder is corrupt")
                entries[tensor] = _Entry(opened, tuple(view.get_shape()), view.get_dtype())
        except FileNotFoundError:
            raise ModelError(f"{file}: no such file; the folder is incomplete, download it again") from None
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file}: is not a safetensors file: {error}; download it again") from None
    return entries


def _file_names(path: str) -> list[str]:
    if not os.path.exists(f"{path}/{_INDEX}"):
        return [_SINGLE]
    names = read_json(f"{path}/{_INDEX}").get("weight_map")
    if not isinstance(names, dict) or not names:
        raise ModelError(f"{path}/{_INDEX}: weight_map must name a file for each tensor; download it again")
    files = sorted({str(name) for name in names.values()})
    for file in files:
        if os.path.basename(file) != file or not file.endswith(".safetensors"):
            raise ModelError(f"{path}/{_INDEX}: names the file {file!r:.120}; must be NAME.safetensors in the folder")
    return files
