"""Tiny random transformers models of every supported architecture, and the GGUF files that llama.cpp's converter would
make of them. Tensor names come from the gguf library's own table."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import MODEL_ARCH
from gguf import GGMLQuantizationType as Type
from k_quants import quantise
from tiny_llama import TinyLlama
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY = TinyLlama().tokens
CONTEXT = 512


@dataclass(frozen=True)
class Kind:
    """How one architecture is made by transformers and named by llama.cpp."""

    config: type
    model: type
    names: MODEL_ARCH
    pairs: bool = False
    """llama.cpp's converter reorders query and key rows so that those that rotate together are neighbours."""
    shifted_norms: bool = False
    """The converter writes 1 + w."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of the transformers config."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Beside what all have."""


KINDS = {
    "llama": Kind(LlamaConfig, LlamaForCausalLM, MODEL_ARCH.LLAMA, pairs=True),
    "mistral": Kind(
        MistralConfig,
        MistralForCausalLM,
        MODEL_ARCH.LLAMA,
        pairs=True,
        options={"sliding_window": 21},
        metadata={"attention.sliding_window": 21},
    ),
    "qwen2": Kind(Qwen2Config, Qwen2ForCausalLM, MODEL_ARCH.QWEN2),
    "qwen3": Kind(Qwen3Config, Qwen3ForCausalLM, MODEL_ARCH.QWEN3),
    "gemma3": Kind(
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        MODEL_ARCH.GEMMA3,
        shifted_norms=True,
        options={
            "sliding_window": 13,
            "sliding_window_pattern": 6,
            "hidden_activation": "gelu_pytorch_tanh",
        },
        metadata={"attention.sliding_window": 13},
    ),
}


@dataclass
class TinyModel:
    """A model of `architecture`. Sizes are whole K-quant blocks; heads do not add up to the hidden size in all."""

    architecture: str
    layers: int = 7
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    hidden: int = 256
    ffn: int = 512
    theta: float = 10000.0
    tied: bool = True
    precision: Type = Type.F32
    seed: int = 0
    written_as: str | None = None
    """`general.architecture`, where it is not `architecture`'s own name in llama.cpp."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of the transformers config, over the kind's."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Of the file, over the kind's; without the architecture's prefix; None leaves the key out."""
    without: tuple[str, ...] = ()
    """Tensors to leave out."""

    def write(self, path: Path) -> PreTrainedModel:
        """Writes the file; returns the transformers model with the weights that it holds."""
        kind = KINDS[self.architecture]
        model = self._model(kind)
        names = gguf.get_tensor_name_map(kind.names, self.layers)
        name = self.written_as or gguf.MODEL_ARCH_NAMES[kind.names]
        writer = gguf.GGUFWriter(path, name, use_temp_file=False)
        self._write_metadata(writer, name, kind)
        with torch.no_grad():
            for theirs, parameter in model.named_parameters():
                ours = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
                assert ours is not None, theirs
                raw, kept = self._stored(parameter.numpy())
                parameter.copy_(torch.from_numpy(kept))
                if kind.shifted_norms and theirs.endswith("norm.weight"):
                    raw = raw + 1
                if kind.pairs and ("q_proj" in theirs or "k_proj" in theirs):
                    raw = _as_pairs(raw, self.head_dim)
                if ours not in self.without:
                    writer.add_tensor(ours, raw, raw_dtype=self.precision if parameter.ndim > 1 else None)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return model

    def _model(self, kind: Kind) -> PreTrainedModel:
        config = kind.config(
            vocab_size=len(VOCABULARY),
            hidden_size=self.hidden,
            intermediate_size=self.ffn,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=CONTEXT,
            rms_norm_eps=1e-6,
            tie_word_embeddings=self.tied,
            attn_implementation="eager",
            pad_token_id=0,
            **({} if self.architecture == "gemma3" else {"rope_theta": self.theta}),
            **({"query_pre_attn_scalar": self.head_dim} if self.architecture == "gemma3" else {}),
            **(kind.options | self.options),
        )
        model: PreTrainedModel = kind.model(config).eval()
        rng = np.random.default_rng(self.seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                value = rng.standard_normal(tuple(parameter.shape)).astype(np.float32)
                if "norm" in name:
                    value = value * np.float32(0.2) + np.float32(0 if kind.shifted_norms else 1)
                elif parameter.ndim > 1:
                    value *= np.float32(2 / np.sqrt(parameter.shape[1]))
                parameter.copy_(torch.from_numpy(value))
        return model

    def _write_metadata(self, writer: Any, name: str, kind: Kind) -> None:
        of_architecture = {
            "block_count": self.layers,
            "context_length": CONTEXT,
            "embedding_length": self.hidden,
            "feed_forward_length": self.ffn,
            "attention.head_count": self.heads,
            "attention.head_count_kv": self.kv_heads,
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            "attention.layer_norm_rms_epsilon": 1e-6,
            **({} if self.architecture == "gemma3" else {"rope.freq_base": self.theta}),
            **kind.metadata,
            **self.metadata,
        }
        tokens = {key: value for key, value in TinyLlama()._defaults().items() if key.startswith("tokenizer.")}
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
        for key, value in ({f"{name}.{key}": value for key, value in of_architecture.items()} | tokens).items():
            if value is not None:
                (writer.add_bool if isinstance(value, bool) else add[type(value)])(key, value)

    def _stored(self, value: Any) -> tuple[Any, Any]:
        """The bytes as they go into the file, and the fp32 values they stand for."""
        if value.ndim == 1 or self.precision == Type.F32:
            return value.copy(), value
        raw = quantise(value, self.precision)
        return raw, gguf.quants.dequantize(raw, self.precision).reshape(value.shape)


def _as_pairs(rows: Any, head_dim: int) -> Any:
    halves = rows.reshape(len(rows) // head_dim, 2, head_dim // 2, -1)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


@torch.no_grad()
def logits_of(model: PreTrainedModel, tokens: list[int]) -> Any:
    """[len(tokens), vocab]"""
    return model(torch.tensor([tokens])).logits[0].float().numpy()
