"""The decoder of the Llama family on one page: Llama 2 and 3, Mistral, Qwen 2 and 3, SmolLM.

RMSNorm, grouped-query attention with rotary positions, a gated feed-forward (Touvron et al. 2023); Qwen 2 adds biases
to queries, keys and values, Qwen 3 a norm over each query and key head. Which operations compute it is not known here.
"""

from dataclasses import dataclass

import torch

from busload_runtime.executors.torch_model.kv_cache import KvCache
from busload_runtime.executors.torch_model.ops import HeadNorms, Ops, Tensor, Weight
from busload_runtime.executors.torch_model.step import Step


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    attention_norm: Tensor
    """[hidden]"""
    qkv: Weight
    """[(heads + 2 kv_heads) * head_dim, hidden]"""
    head_norms: HeadNorms | None
    attention_output: Weight
    """[hidden, heads * head_dim]"""
    ffn_norm: Tensor
    """[hidden]"""
    gate_up: Weight
    """[2 ffn, hidden]: row 2 i of the gate, row 2 i + 1 of up."""
    down: Weight
    """[hidden, ffn]"""

    @property
    def num_bytes(self) -> int:
        vectors = [self.attention_norm, self.ffn_norm]
        if self.head_norms is not None:
            vectors += [self.head_norms.query, self.head_norms.key]
        matrices = (self.qkv, self.attention_output, self.gate_up, self.down)
        return int(sum(vector.nbytes for vector in vectors)) + sum(matrix.num_bytes for matrix in matrices)


@dataclass(frozen=True, slots=True)
class Decoder:
    """The weights of a model, and how they are applied."""

    embedding: Tensor
    """[vocab, hidden], of the type of the activations"""
    layers: tuple[DecoderLayer, ...]
    final_norm: Tensor
    """[hidden]"""
    output: Weight
    """[vocab, hidden]"""
    cos_sin: Tensor
    """[positions, head_dim] fp32: cosines, then sines"""
    norm_eps: float
    attention_scale: float

    @property
    def num_bytes(self) -> int:
        tables = {table.data_ptr(): int(table.nbytes) for table in (self.embedding, self.final_norm, self.cos_sin)}
        tables[self.output.values.data_ptr()] = self.output.num_bytes  # once, where the embedding is the output head
        return sum(tables.values()) + sum(layer.num_bytes for layer in self.layers)

    def logits(self, step: Step, cache: KvCache, ops: Ops) -> Tensor:
        """Logits [R, vocab] fp32 of the drawing rows, after writing keys and values of all tokens."""
        eps = self.norm_eps
        residual = torch.nn.functional.embedding(step.tokens, self.embedding)
        x = ops.norm(residual, self.layers[0].attention_norm, eps)
        next_norms = [*(layer.attention_norm for layer in self.layers[1:]), self.final_norm]
        for index, (layer, next_norm) in enumerate(zip(self.layers, next_norms, strict=True)):
            pages = cache.layer(index)
            qkv = ops.linear(x, layer.qkv)
            queries = ops.rope_and_write(qkv, self.cos_sin, step, pages, layer.head_norms, eps)
            attended = ops.attend(queries, step, pages, self.attention_scale).flatten(1)
            x = ops.add_norm(ops.linear(attended, layer.attention_output), residual, layer.ffn_norm, eps)
            x = ops.add_norm(ops.linear(ops.gated(x, layer.gate_up), layer.down), residual, next_norm, eps)
        return ops.logits(x.index_select(0, step.rows), self.output)
