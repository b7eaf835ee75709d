"""Tiny random Llama models written as GGUF files, with the dequantised weights under their transformers names."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType

TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass
class TinyLlama:
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    ffn: int = 96
    context: int = 256
    theta: float = 10000.0
    tied: bool = True
    precision: GGMLQuantizationType = GGMLQuantizationType.F32
    seed: int = 0
    metadata: dict[str, Any] = field(default_factory=dict)
    """Overrides of metadata values; None leaves the key out."""
    extra_tensors: dict[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    """Tensors to leave out."""

    @property
    def hidden(self) -> int:
        return self.heads * self.head_dim

    @property
    def tokens(self) -> list[str]:
        letters = sorted(_byte_letters())
        return [*letters, "th", "the", "Ġthe", "<|im_start|>", "<|im_end|>", "<|endoftext|>"]

    def write(self, path: Path) -> dict[str, Any]:
        """Writes the file; returns the weights that it holds, as transformers names them."""
        writer = gguf.GGUFWriter(path, "llama", use_temp_file=False)
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
        for key, value in (self._defaults() | self.metadata).items():
            if key == "general.architecture":
                writer.kv_data[0][key].value = value
            elif value is not None:
                (writer.add_bool if isinstance(value, bool) else add[type(value)])(key, value)
        weights = {}
        for name, theirs, value in self._tensors():
            raw, kept = self._store(value)
            weights[theirs] = kept
            if "attn_q" in name or "attn_k" in name:
                raw = _as_pairs(raw, self.head_dim)
            if name not in self.without:
                writer.add_tensor(name, raw, raw_dtype=self.precision if value.ndim > 1 else None)
        for name, value in self.extra_tensors.items():
            writer.add_tensor(name, value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return weights

    def _defaults(self) -> dict[str, Any]:
        return {
            "llama.block_count": self.layers,
            "llama.context_length": self.context,
            "llama.embedding_length": self.hidden,
            "llama.feed_forward_length": self.ffn,
            "llama.attention.head_count": self.heads,
            "llama.attention.head_count_kv": self.kv_heads,
            "llama.attention.layer_norm_rms_epsilon": 1e-5,
            "llama.rope.freq_base": self.theta,
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smollm",
            "tokenizer.ggml.tokens": self.tokens,
            "tokenizer.ggml.token_type": [1] * (len(self.tokens) - 3) + [3] * 3,
            "tokenizer.ggml.merges": ["t h", "th e", "Ġ the"],
            "tokenizer.ggml.bos_token_id": len(self.tokens) - 3,
            "tokenizer.ggml.eos_token_id": len(self.tokens) - 2,
            "tokenizer.ggml.add_bos_token": False,
            "tokenizer.chat_template": TEMPLATE,
        }

    def _tensors(self) -> Any:
        rng = np.random.default_rng(self.seed)

        def matrix(rows: int, columns: int) -> Any:
            return (rng.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)

        def gain() -> Any:
            return (1 + 0.2 * rng.standard_normal(self.hidden)).astype(np.float32)

        kv = self.kv_heads * self.head_dim
        shapes = {
            "attn_q": (self.hidden, self.hidden),
            "attn_k": (kv, self.hidden),
            "attn_v": (kv, self.hidden),
            "attn_output": (self.hidden, self.hidden),
            "ffn_gate": (self.ffn, self.hidden),
            "ffn_up": (self.ffn, self.hidden),
            "ffn_down": (self.hidden, self.ffn),
        }
        yield "token_embd.weight", "model.embed_tokens.weight", 8 * matrix(len(self.tokens), self.hidden)
        for index in range(self.layers):
            for ours, theirs in _LAYER_NAMES.items():
                value = 2 * matrix(*shapes[ours]) if ours in shapes else gain()
                yield f"blk.{index}.{ours}.weight", f"model.layers.{index}.{theirs}.weight", value
        yield "output_norm.weight", "model.norm.weight", gain()
        if not self.tied:
            yield "output.weight", "lm_head.weight", matrix(len(self.tokens), self.hidden)

    def _store(self, value: Any) -> tuple[Any, Any]:
        """The bytes as they go into the file, and the fp32 values they stand for."""
        if value.ndim == 1:
            return value, value
        raw = gguf.quants.quantize(value, self.precision)
        return raw, gguf.quants.dequantize(raw, self.precision).reshape(value.shape)


def _as_pairs(rows: Any, head_dim: int) -> Any:
    """llama.cpp's order of query and key rows: those that rotate together are neighbours."""
    halves = rows.reshape(len(rows) // head_dim, 2, head_dim // 2, -1)
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def _byte_letters() -> list[str]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return list(bytes_to_unicode().values())
