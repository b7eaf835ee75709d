"""What each token of a vocabulary adds to a text. No tokeniser's library is needed for that."""

from collections.abc import Callable

from busload_runtime.model.errors import ModelError
from busload_runtime.model.vocabulary import BYTE, CONTROL, UNKNOWN, UNUSED, USER_DEFINED, Vocabulary

Piece = Callable[[str, int], bytes]
"""Text and type of a token -> what it adds to a text: UTF-8, maybe part of a character, nothing for control tokens."""

SPACE = "\u2581"  # SentencePiece writes a space as this
_PLAIN = (USER_DEFINED, UNUSED, UNKNOWN)  # byte-level BPE writes these as themselves


def piece_of(vocabulary: Vocabulary) -> Piece:
    """Raises `ModelError` for kinds of vocabularies that are not known."""
    kind = vocabulary.metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        return _byte_level
    if kind == "llama":
        return _sentence_piece
    raise ModelError(
        f"{vocabulary.file}: tokenizer.ggml.model is {kind!r:.80}; supported: 'gpt2' (byte-level BPE), "
        "'llama' (SentencePiece BPE)"
    )


def token_bytes(vocabulary: Vocabulary) -> list[bytes]:
    """What each token adds to a text, by its id. Raises `ModelError`."""
    piece = piece_of(vocabulary)
    if piece is _byte_level:
        check_letters(vocabulary)
    return list(map(piece, vocabulary.tokens, vocabulary.types))


def check_letters(vocabulary: Vocabulary) -> None:
    """Raises `ModelError` when a byte-level vocabulary holds what stands for no byte."""
    for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True):
        if not _BYTES.keys() >= set(token) and kind not in (CONTROL, *_PLAIN):
            stranger = next(character for character in token if character not in _BYTES)
            raise ModelError(
                f"{vocabulary.file}: tokenizer.ggml.tokens holds {token!r:.80} with the character {stranger!r}, "
                "which stands for no byte; the file is corrupt"
            )


def _byte_level(token: str, kind: int) -> bytes:
    if kind == CONTROL:
        return b""
    if kind in _PLAIN:
        return token.encode()
    return bytes(map(_BYTES.__getitem__, token))


def _sentence_piece(token: str, kind: int) -> bytes:
    if kind in (CONTROL, UNKNOWN):
        return b""
    if kind == BYTE:
        return bytes([int(token[3:5], 16)])
    return token.replace(SPACE, " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes (Radford et al. 2019): Latin-1's printable ones are themselves."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTES = _byte_alphabet()
