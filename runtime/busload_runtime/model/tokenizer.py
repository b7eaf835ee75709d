"""Text to token ids and back, from the vocabulary inside a GGUF file."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from busload_runtime.model.control_text import ControlTexts
from busload_runtime.model.errors import ModelError
from busload_runtime.model.pieces import piece_of
from busload_runtime.model.vocabulary import CONTROL, Vocabulary

# Control tokens that end an answer besides the declared EOS: chat models end a turn with one of these.
_END_OF_TURN = frozenset(
    ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>", "</s>")
)


class TextTokenizer:
    """Safe to share between threads."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        encode_plain: Callable[[str], list[int]],
        piece: Callable[[str, int], bytes],
        eos_ids: frozenset[int],
        add_bos: bool,
        drop_first_space: bool,
    ) -> None:
        """`encode_plain`: text without control tokens -> ids; `piece`: text and type of a token -> what it adds."""
        self._tokens, self._types = vocabulary.tokens, vocabulary.types
        self._encode_plain = encode_plain
        self._piece = piece
        self._pieces: dict[int, bytes] = {}
        self._control_ids = vocabulary.texts_of(CONTROL)
        self._control = ControlTexts(self._control_ids)
        self._drop_first_space = drop_first_space
        self.add_bos = add_bos
        self.bos_id = vocabulary.token_id("bos_token_id")
        self.eos_ids = eos_ids
        """Any of these ends the output."""

    @property
    def vocab_size(self) -> int:
        return len(self._tokens)

    def longest_token(self) -> int:
        """At most so many bytes of a text are one token."""
        return max(len(token.encode()) for token in self._tokens)

    def encode(self, text: str, special: bool, mark: str = "", bos: bool = True) -> list[int]:
        """Token ids of a whole prompt.

        `special` turns the text of control tokens (`<|im_start|>`) into those tokens: for the output of a chat
        template only. Otherwise it is ordinary text, as are those that `hide_control` marked with `mark`.
        BOS is put in front when the file asks for it and it is not there, unless `bos` is False.
        """
        ids: list[int] = []
        for part in self._control.split(text) if special else (text,):
            if isinstance(part, int):
                ids.append(part)
            elif plain := _without(part, mark) if special else part:
                ids += self._encode_plain(plain)
        if bos and self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes that the token adds to a text: maybe part of a character, empty for control tokens.

        Raises `IndexError` for an id outside the vocabulary.
        """
        known = self._pieces.get(token_id)
        if known is not None:
            return known
        if token_id < 0:
            raise IndexError(f"token id {token_id} is negative")
        return self._pieces.setdefault(token_id, self._piece(self._tokens[token_id], self._types[token_id]))

    def control_id(self, text: str) -> int | None:
        """The control token of this name, if there is one."""
        return self._control_ids.get(text)

    def written(self, token_id: int) -> str:
        """The token as the vocabulary writes it: a space may be a letter there, a control token has its name.

        Raises `IndexError` for an id outside the vocabulary.
        """
        if token_id < 0:
            raise IndexError(f"token id {token_id} is negative")
        return self._tokens[token_id]

    def decode(self, ids: Iterable[int], control: bool = False) -> str:
        """The text of `ids`, without control tokens or with their names; bytes that are no UTF-8 become U+FFFD."""
        piece = self._named_bytes if control else self.token_bytes
        raw = b"".join(map(piece, ids))
        if self._drop_first_space:
            raw = raw.removeprefix(b" ")
        return raw.decode(errors="replace")

    def _named_bytes(self, token_id: int) -> bytes:
        return self._tokens[token_id].encode() if self._types[token_id] == CONTROL else self.token_bytes(token_id)

    def hide_control(self, text: str, mark: str) -> str:
        """`text` with `mark` inside each control-token text, so that `encode(special=True, mark=mark)` sees none."""
        return self._control.hide(text, mark)


def _without(text: str, mark: str) -> str:
    return text.replace(mark, "") if mark else text


def tokenizer_from_metadata(file: str, metadata: Mapping[str, Any]) -> TextTokenizer:
    """Builds the tokenizer of `file` from its GGUF `metadata`. Raises `ModelError` for kinds that are not known."""
    vocabulary = Vocabulary.read(file, metadata)
    piece = piece_of(vocabulary)
    # Imported here: each kind has its own library, and a server needs one of them.
    if metadata["tokenizer.ggml.model"] == "gpt2":
        from busload_runtime.model.byte_level import byte_level_encoder, splitting_of

        splitting = splitting_of(file, metadata)
        encode_plain, add_bos, drop_first_space = byte_level_encoder(vocabulary, splitting), splitting.bos, False
    else:
        from busload_runtime.model.sentence_piece import sentence_piece_encoder

        add_space = vocabulary.flag("add_space_prefix", True)
        encode_plain, add_bos, drop_first_space = sentence_piece_encoder(vocabulary, add_space), True, add_space
    return TextTokenizer(
        vocabulary=vocabulary,
        encode_plain=encode_plain,
        piece=piece,
        eos_ids=end_ids(vocabulary),
        add_bos=vocabulary.flag("add_bos_token", add_bos),
        drop_first_space=drop_first_space,
    )


def end_ids(vocabulary: Vocabulary) -> frozenset[int]:
    """Tokens that end an answer. Raises `ModelError` when there is none."""
    ends = {index for text, index in vocabulary.texts_of(CONTROL).items() if text in _END_OF_TURN}
    ends |= {index for key in ("eos_token_id", "eot_token_id") if (index := vocabulary.token_id(key)) is not None}
    if not ends:
        raise ModelError(
            f"{vocabulary.file}: tokenizer.ggml.eos_token_id is missing; without it no answer would ever end"
        )
    return frozenset(ends)
