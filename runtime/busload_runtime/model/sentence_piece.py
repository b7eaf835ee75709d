"""SentencePiece BPE (`tokenizer.ggml.model` llama): the vocabulary goes back into the form that the `sentencepiece`
library loads, which merges as the makers of these vocabularies did and takes 262,144 tokens in a tenth of a second.

Fields: https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto
"""

import re
import struct
from collections.abc import Callable

from sentencepiece import SentencePieceProcessor

from busload_runtime.model.errors import ModelError
from busload_runtime.model.pieces import SPACE
from busload_runtime.model.vocabulary import BYTE, CONTROL, UNKNOWN, USER_DEFINED, Vocabulary

_VARINT, _FIXED32, _BYTES = 0, 5, 2  # wire types
_BPE = 2
_NOWHERE = "\0unknown"


def sentence_piece_encoder(vocabulary: Vocabulary, add_space: bool) -> Callable[[str], list[int]]:
    """Text -> token ids. Raises `ModelError` for scores or byte tokens that are not all there."""
    file, tokens = vocabulary.file, vocabulary.tokens
    scores = vocabulary.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens) or set(map(type, scores)) != {float}:
        raise ModelError(f"{file}: tokenizer.ggml.scores must hold one number for each of the tokens")
    written = vocabulary.texts_of(BYTE)
    for byte in range(256):
        if f"<0x{byte:02X}>" not in written:
            raise ModelError(f"{file}: tokenizer.ggml.tokens lacks <0x{byte:02X}>; all 256 bytes are needed")
    if wrong := next((token for token in written if not re.fullmatch("<0x[0-9A-F]{2}>", token)), None):
        raise ModelError(
            f"{file}: tokenizer.ggml.tokens holds the byte token {wrong!r:.80}, which is not written as <0xHH>; "
            "the file is corrupt"
        )
    try:
        processor = SentencePieceProcessor(model_proto=_model(vocabulary, scores, add_space))
    except (RuntimeError, ValueError) as error:
        raise ModelError(f"{file}: tokenizer.ggml.tokens is no SentencePiece vocabulary: {error}") from None

    def encode(text: str) -> list[int]:
        ids: list[int] = processor.encode(text)  # without the GIL
        return ids

    return encode


def _model(vocabulary: Vocabulary, scores: list[float], add_space: bool) -> bytes:
    """A serialised ModelProto."""
    tokens, types = list(vocabulary.tokens), list(vocabulary.types)
    for index in vocabulary.texts_of(USER_DEFINED).values():
        tokens[index] = tokens[index].replace(" ", SPACE)  # GGUF files have these as plain text
    unknown = vocabulary.token_id("unknown_token_id")
    if unknown is None:
        unknown = next(iter(vocabulary.texts_of(UNKNOWN).values()), None)
    if unknown is None:  # the library wants one; with all bytes in the vocabulary it is never used
        unknown, tokens, types, scores = len(tokens), [*tokens, _NOWHERE], [*types, UNKNOWN], [*scores, 0.0]
    for index in vocabulary.texts_of(UNKNOWN).values():
        types[index] = CONTROL
    types[unknown] = UNKNOWN
    trainer = _number(3, _BPE) + _number(35, 1)  # byte fallback
    trainer += _number(40, unknown) + b"".join(_number(field, -1) for field in (41, 42, 43))  # no BOS, EOS, padding
    trainer += _text(45, tokens[unknown].encode())
    normalizer = _text(1, b"identity") + _number(3, int(add_space)) + _number(4, 0) + _number(5, 1)
    return _pieces(tokens, scores, types) + _text(2, trainer) + _text(3, normalizer)


def _pieces(tokens: list[str], scores: list[float], types: list[int]) -> bytes:
    """Field 1, once per token: text (1), score (2), type (3). Types of GGUF are SentencePiece's."""
    numbers = struct.pack(f"<{len(scores)}f", *scores)
    records = []
    for index, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        raw = token.encode()
        size = len(raw)
        score = numbers[4 * index : 4 * index + 4]
        if size < 119:  # all lengths are one byte
            records.append(b"\n%c\n%c%b\x15%b\x18%c" % (size + 9, size, raw, score, kind))
        else:
            records.append(_text(1, _text(1, raw) + bytes([2 << 3 | _FIXED32]) + score + _number(3, kind)))
    return b"".join(records)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3 | _VARINT) + _varint(value % 2**64)


def _text(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | _BYTES) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)
