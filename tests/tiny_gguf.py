"""Writes a tiny random Llama model as GGUF: real file, real tokeniser, a step in about a millisecond."""

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter
from numpy.typing import NDArray

HIDDEN, HEADS, KV_HEADS, FFN, LAYERS = 64, 2, 1, 64, 1
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS = 2
MERGES = ("h e", "l l", "he ll", "hell o", "\u0120 w", "o r")


def write_tiny_model(
    path: Path,
    context_length: int = 65536,
    seed: int = 7,
    chat_template: str = CHAT_TEMPLATE,
    recites: str = "",
    broken_token: int | None = None,
    more_control: tuple[str, ...] = (),
) -> Path:
    """A model whose output is printable ASCII only: the output rows of all other tokens are zero.

    With `recites`, a text in whose UTF-8 no byte comes twice, its greedy output is that text for ever: each of its
    bytes is a token and leads to the next one, whatever came before. A prompt must end with one of them.
    `more_control` are control tokens beside the usual ones.
    `broken_token` is one behind which no number comes out: a step that draws behind it fails.
    """
    random = np.random.default_rng(seed)
    normal = [*_byte_alphabet(), *(merge.replace(" ", "") for merge in MERGES)]
    tokens = [*CONTROL, *normal, *more_control]
    types = [3] * len(CONTROL) + [1] * len(normal) + [3] * len(more_control)
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
    writer.add_chat_template(chat_template)

    for name, weights in _weights(random, tokens, recites, broken_token).items():
        writer.add_tensor(f"{name}.weight", weights.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_token(byte: int) -> int:
    """The token of a single byte."""
    return len(CONTROL) + byte


def _weights(
    random: np.random.Generator, tokens: list[str], recites: str, broken_token: int | None
) -> dict[str, NDArray[np.floating[Any]]]:
    kv = HIDDEN // HEADS * KV_HEADS
    shapes = {
        "attn_q": (HIDDEN, HIDDEN),
        "attn_k": (kv, HIDDEN),
        "attn_v": (kv, HIDDEN),
        "attn_output": (HIDDEN, HIDDEN),
        "ffn_gate": (FFN, HIDDEN),
        "ffn_up": (FFN, HIDDEN),
        "ffn_down": (HIDDEN, FFN),
    }
    embedding = random.normal(0, 1, (len(tokens), HIDDEN))
    weights: dict[str, NDArray[np.floating[Any]]] = {"token_embd": embedding}
    for layer in range(LAYERS):
        for part, shape in shapes.items():
            weights[f"blk.{layer}.{part}"] = random.normal(0, 1 / np.sqrt(shape[-1]), shape)
        for norm in ("attn_norm", "ffn_norm"):
            weights[f"blk.{layer}.{norm}"] = np.ones(HIDDEN)
    head = random.normal(0, 1, (len(tokens), HIDDEN))
    head[[i for i, token in enumerate(tokens) if not (len(token) == 1 and "!" <= token <= "~")]] = 0
    weights |= {"output_norm": np.ones(HIDDEN), "output": head}
    if recites:
        data = recites.encode()
        assert len(set(data)) == len(data) <= HIDDEN, "a byte can lead to one other only"
        for layer in range(LAYERS):  # nothing is added to the embedding
            weights[f"blk.{layer}.attn_output"][:] = weights[f"blk.{layer}.ffn_down"][:] = 0
        head[:] = 0
        for place, byte in enumerate(data):
            embedding[byte_token(byte)] = np.eye(HIDDEN)[place]
            head[byte_token(data[(place + 1) % len(data)]), place] = 1
    if broken_token is not None:  # its place in the embedding overflows in the last norm, and is 0 for all others
        embedding[:, -1] = 0
        embedding[broken_token] = np.eye(HIDDEN)[-1]
        for layer in range(LAYERS):
            weights[f"blk.{layer}.attn_output"][-1] = weights[f"blk.{layer}.ffn_down"][-1] = 0
        weights["output_norm"][-1] = np.finfo(np.float32).max
    return weights


def _byte_alphabet() -> list[str]:
    """The 256 printable characters that stand for the 256 bytes in byte-level BPE vocabularies, in byte order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
