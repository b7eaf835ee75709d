"""Text to token ids and back, from the vocabulary inside a GGUF file. The `tokenizers` library merges."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from busload_runtime.model.errors import ModelError

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_SPACE = "\u2581"  # SentencePiece writes a space as this

_CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
_GPT2 = rf"{_CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,%d}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class _Splitting:
    """How text is cut into words before merging (`tokenizer.ggml.pre`); each pattern cuts the pieces of the last."""

    patterns: tuple[str, ...]
    whole_words: bool = False
    """A word that is in the vocabulary is one token, without merging."""
    compose: bool = False
    """Unicode NFC first. GGUF does not say so, but the model was trained on composed text."""
    bos: bool = False
    """Prompts start with BOS when the file does not say."""


_LLAMA3 = _Splitting((_CL100K % 3,), whole_words=True, bos=True)
_SPLITTINGS = {
    "smollm": _Splitting((r"\p{N}", _GPT2)),
    "gpt-2": _Splitting((_GPT2,)),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _Splitting((_CL100K % 1,), compose=True),
    # llama.cpp's own mixture, for files that were converted without saying what they need.
    "default": _Splitting((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
}

# Control tokens that end an answer besides the declared EOS: chat models end a turn with one of these.
_END_OF_TURN = frozenset(
    ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>", "</s>")
)


class TextTokenizer:
    """Immutable and safe to share between threads."""

    def __init__(
        self,
        engine: Tokenizer,
        pieces: tuple[bytes, ...],
        control: Mapping[str, int],
        bos_id: int | None,
        eos_ids: frozenset[int],
        add_bos: bool,
        drop_first_space: bool,
    ) -> None:
        self._engine = engine
        self._pieces = pieces
        self._control = control
        self._control_pattern = _alternatives(control)
        self._drop_first_space = drop_first_space
        self.add_bos = add_bos
        self.bos_id = bos_id
        self.eos_ids = eos_ids
        """Any of these ends the output."""

    @property
    def vocab_size(self) -> int:
        return len(self._pieces)

    def encode(self, text: str, special: bool, mark: str = "") -> list[int]:
        """Token ids of a whole prompt.

        `special` turns the text of control tokens (`<|im_start|>`) into those tokens: for the output of a chat
        template only. Otherwise it is ordinary text, as are those that `hide_control` marked with `mark`.
        BOS is put in front when the file asks for it and it is not there.
        """
        ids: list[int] = []
        if special and self._control_pattern is not None:
            for index, piece in enumerate(self._control_pattern.split(text)):
                ids += [self._control[piece]] if index % 2 else self._encode_plain(_without(piece, mark))
        else:
            ids = self._encode_plain(text)
        if self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes that the token adds to a text: maybe part of a character, empty for control tokens.

        Raises `IndexError` for an id outside the vocabulary.
        """
        if token_id < 0:
            raise IndexError(f"token id {token_id} is negative")
        return self._pieces[token_id]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids` without control tokens; bytes that are no UTF-8 become U+FFFD."""
        raw = b"".join(map(self.token_bytes, ids))
        if self._drop_first_space:
            raw = raw.removeprefix(b" ")
        return raw.decode(errors="replace")

    def hide_control(self, text: str, mark: str) -> str:
        """`text` with `mark` inside each control-token text, so that `encode(special=True, mark=mark)` sees none."""
        if self._control_pattern is None:
            return text
        return self._control_pattern.sub(lambda match: match[0][0] + mark + match[0][1:], text)

    def _encode_plain(self, text: str) -> list[int]:
        if not text:
            return []
        # The batch call gives the GIL up while it works (`encode` holds it: a long prompt would stop every thread).
        ids: list[int] = self._engine.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids


def _without(text: str, mark: str) -> str:
    return text.replace(mark, "") if mark else text


def tokenizer_from_metadata(file: str, metadata: Mapping[str, Any]) -> TextTokenizer:
    """Builds the tokenizer of `file` from its GGUF `metadata`. Raises `ModelError` for kinds that are not known."""
    vocabulary = _Vocabulary.read(file, metadata)
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        splitting = _splitting(file, metadata)
        engine = _byte_level(vocabulary, splitting)
        pieces = vocabulary.pieces(_byte_level_bytes)
        add_bos, drop_first_space = splitting.bos, False
    elif kind == "llama":
        add_space = vocabulary.flag("add_space_prefix", True)
        engine = _sentence_piece(vocabulary, add_space)
        pieces = vocabulary.pieces(_sentence_piece_bytes)
        add_bos, drop_first_space = True, add_space
    else:
        raise ModelError(
            f"{file}: tokenizer.ggml.model is {kind!r:.80}; supported: 'gpt2' (byte-level BPE), "
            "'llama' (SentencePiece BPE)"
        )
    control = vocabulary.texts_of(_CONTROL)
    eos_ids = {index for text, index in control.items() if text in _END_OF_TURN}
    eos_ids |= {index for key in ("eos_token_id", "eot_token_id") if (index := vocabulary.token_id(key)) is not None}
    if not eos_ids:
        raise ModelError(f"{file}: tokenizer.ggml.eos_token_id is missing; without it no answer would ever end")
    return TextTokenizer(
        engine=engine,
        pieces=pieces,
        control=control,
        bos_id=vocabulary.token_id("bos_token_id"),
        eos_ids=frozenset(eos_ids),
        add_bos=vocabulary.flag("add_bos_token", add_bos),
        drop_first_space=drop_first_space,
    )


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """The checked `tokenizer.ggml.*` fields."""

    file: str
    metadata: Mapping[str, Any]
    tokens: list[str]
    types: list[int]

    @classmethod
    def read(cls, file: str, metadata: Mapping[str, Any]) -> "_Vocabulary":
        tokens = metadata.get("tokenizer.ggml.tokens")
        if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) and token for token in tokens):
            raise ModelError(
                f"{file}: tokenizer.ggml.tokens must be a list of texts; the file has no usable vocabulary"
            )
        if len(set(tokens)) != len(tokens):
            raise ModelError(f"{file}: tokenizer.ggml.tokens holds a token twice; the file is corrupt")
        types = metadata.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
        known = range(_NORMAL, _BYTE + 1)
        if not isinstance(types, list) or len(types) != len(tokens) or not all(kind in known for kind in types):
            raise ModelError(f"{file}: tokenizer.ggml.token_type must hold one type from 1 to 6 for each of the tokens")
        return cls(file, metadata, tokens, types)

    def token_id(self, key: str) -> int | None:
        value = self.metadata.get(f"tokenizer.ggml.{key}")
        if value is None or (isinstance(value, int) and 0 <= value < len(self.tokens)):
            return value
        raise ModelError(f"{self.file}: tokenizer.ggml.{key} is {value!r:.80}; must be below {len(self.tokens)}")

    def flag(self, key: str, default: bool) -> bool:
        return bool(self.metadata.get(f"tokenizer.ggml.{key}", default))

    def texts_of(self, kind: int) -> dict[str, int]:
        return {token: index for index, token in enumerate(self.tokens) if self.types[index] == kind}

    def pieces(self, to_bytes: Callable[[str, int], bytes]) -> tuple[bytes, ...]:
        try:
            return tuple(map(to_bytes, self.tokens, self.types))
        except ValueError as error:
            raise ModelError(f"{self.file}: tokenizer.ggml.tokens holds {error}; the file is corrupt") from None

    def add_user_defined(self, engine: Tokenizer) -> Tokenizer:
        engine.add_tokens([AddedToken(text, normalized=False) for text in self.texts_of(_USER_DEFINED)])
        return engine


def _splitting(file: str, metadata: Mapping[str, Any]) -> _Splitting:
    name = metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(name, str) or name not in _SPLITTINGS:
        raise ModelError(f"{file}: tokenizer.ggml.pre is {name!r:.80}; supported: {', '.join(sorted(_SPLITTINGS))}")
    return _SPLITTINGS[name]


def _byte_level(vocabulary: _Vocabulary, splitting: _Splitting) -> Tokenizer:
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    model = models.BPE(vocab=ids, merges=_merges(vocabulary, ids), ignore_merges=splitting.whole_words)
    engine = Tokenizer(model)
    if splitting.compose:
        engine.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in splitting.patterns]
    engine.pre_tokenizer = pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(False, use_regex=False)])
    return vocabulary.add_user_defined(engine)


def _merges(vocabulary: _Vocabulary, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    where = f"{vocabulary.file}: tokenizer.ggml.merges"
    lines = vocabulary.metadata.get("tokenizer.ggml.merges")
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        raise ModelError(f"{where} must be a list of texts; the file has no usable vocabulary")
    merges = []
    for line in lines:
        left, _, right = line.partition(" ")
        if left not in ids or right not in ids or left + right not in ids:
            raise ModelError(f"{where} holds {line!r:.80}, whose parts are not all tokens; the file is corrupt")
        merges.append((left, right))
    return merges


def _sentence_piece(vocabulary: _Vocabulary, add_space: bool) -> Tokenizer:
    """SentencePiece BPE: of all adjacent pairs that form a token, the one with the best score merges first."""
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    scores = vocabulary.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(ids) or not all(isinstance(score, float) for score in scores):
        raise ModelError(f"{vocabulary.file}: tokenizer.ggml.scores must hold one number for each of the tokens")
    unknown = next(iter(vocabulary.texts_of(_UNKNOWN)), None)
    if missing := next((byte for byte in range(256) if f"<0x{byte:02X}>" not in ids), None):
        raise ModelError(f"{vocabulary.file}: tokenizer.ggml.tokens lacks <0x{missing:02X}>; all 256 bytes are needed")
    mergeable = {text: index for text, index in ids.items() if vocabulary.types[index] in (_NORMAL, _USER_DEFINED)}
    merges = [
        (-scores[index], index, text[:cut], text[cut:])
        for text, index in mergeable.items()
        for cut in range(1, len(text))
        if text[:cut] in mergeable and text[cut:] in mergeable
    ]
    merges.sort()
    model = models.BPE(
        vocab=ids,
        merges=[(left, right) for *_, left, right in merges],
        unk_token=unknown,
        byte_fallback=True,
        fuse_unk=True,
    )
    engine = Tokenizer(model)
    steps = [normalizers.Replace(" ", _SPACE)]
    engine.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), *steps] if add_space else steps)
    return vocabulary.add_user_defined(engine)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes (Radford et al. 2019): Latin-1's printable ones are themselves."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTES = _byte_alphabet()


def _byte_level_bytes(token: str, kind: int) -> bytes:
    if kind == _CONTROL:
        return b""
    if kind in (_USER_DEFINED, _UNUSED, _UNKNOWN):
        return token.encode()
    try:
        return bytes(_BYTES[character] for character in token)
    except KeyError as error:
        raise ValueError(f"{token!r:.80} with the character {error.args[0]!r}, which stands for no byte") from None


def _sentence_piece_bytes(token: str, kind: int) -> bytes:
    if kind in (_CONTROL, _UNKNOWN):
        return b""
    if kind == _BYTE:
        if not re.fullmatch("<0x[0-9A-F]{2}>", token):
            raise ValueError(f"the byte token {token!r:.80}, which is not written as <0xHH>")
        return bytes([int(token[3:5], 16)])
    return token.replace(_SPACE, " ").encode()


def _alternatives(control: Mapping[str, int]) -> re.Pattern[str] | None:
    if not control:
        return None
    return re.compile("(" + "|".join(map(re.escape, sorted(control, key=len, reverse=True))) + ")")
