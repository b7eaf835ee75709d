"""Writes a tiny random Llama model as GGUF: real file, real tokeniser, a step in about a millisecond."""

from pathlib import Path

import numpy as np
from gguf import GGUFWriter

HIDDEN, HEADS, KV_HEADS, FFN, LAYERS = 64, 2, 1, 64, 1
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS = 2
MERGES = ("h e", "l l", "he ll", "hell o", "\u0120 w", "o r")


def write_tiny_model(path: Path, context_length: int = 65536, seed: int = 7) -> Path:
    """A model whose output is printable ASCII only: the output rows of all other tokens are zero."""
    random = np.random.default_rng(seed)
    alphabet = _byte_alphabet()
    tokens = [*CONTROL, *alphabet, *(merge.replace(" ", "") for merge in MERGES)]
    types = [3] * len(CONTROL) + [1] * (len(tokens) - len(CONTROL))
    writer = GGUFWriter(str(path), "llama")
    writer.add_name("tiny")
    writer.add_context_length(context_length)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(EOS)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)

    def tensor(name: str, *shape: int) -> None:
        writer.add_tensor(name, random.normal(0, 1 / np.sqrt(shape[-1]), shape).astype(np.float32))

    writer.add_tensor("token_embd.weight", random.normal(0, 1, (len(tokens), HIDDEN)).astype(np.float32))
    kv = HIDDEN // HEADS * KV_HEADS
    for layer in range(LAYERS):
        prefix = f"blk.{layer}."
        for part, shape in {
            "attn_q": (HIDDEN, HIDDEN),
            "attn_k": (kv, HIDDEN),
            "attn_v": (kv, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN),
            "ffn_gate": (FFN, HIDDEN),
            "ffn_up": (FFN, HIDDEN),
            "ffn_down": (HIDDEN, FFN),
        }.items():
            tensor(f"{prefix}{part}.weight", *shape)
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"{prefix}{norm}.weight", np.ones(HIDDEN, np.float32))
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, np.float32))
    head = random.normal(0, 1, (len(tokens), HIDDEN)).astype(np.float32)
    head[[i for i, token in enumerate(tokens) if not (len(token) == 1 and "!" <= token <= "~")]] = 0
    writer.add_tensor("output.weight", head)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _byte_alphabet() -> list[str]:
    """The 256 printable characters that stand for the 256 bytes in byte-level BPE vocabularies, in byte order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
