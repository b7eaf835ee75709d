"""Byte-level BPE (`tokenizer.ggml.model` gpt2): text is cut into words, then the `tokenizers` library merges."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from busload_runtime.model.errors import ModelError
from busload_runtime.model.pieces import check_letters
from busload_runtime.model.vocabulary import USER_DEFINED, Vocabulary

_CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
_GPT2 = rf"{_CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,%d}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class Splitting:
    """How text is cut into words before merging (`tokenizer.ggml.pre`); each pattern cuts the pieces of the last."""

    patterns: tuple[str, ...]
    whole_words: bool = False
    """A word that is in the vocabulary is one token, without merging."""
    compose: bool = False
    """Unicode NFC first. GGUF does not say so, but the model was trained on composed text."""
    bos: bool = False
    """Prompts start with BOS when the file does not say."""


_LLAMA3 = Splitting((_CL100K % 3,), whole_words=True, bos=True)
_SPLITTINGS = {
    "smollm": Splitting((r"\p{N}", _GPT2)),
    "gpt-2": Splitting((_GPT2,)),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": Splitting((_CL100K % 1,), compose=True),
    # llama.cpp's own mixture, for files that were converted without saying what they need.
    "default": Splitting((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
}


def name_of_patterns(patterns: tuple[str, ...], then_gpt2: bool) -> str | None:
    """The name of the splitting by `patterns`, followed by GPT-2's own pattern if so; None if it is not known."""
    wanted = (*patterns, *((_GPT2,) if then_gpt2 else ()))
    for name, splitting in _SPLITTINGS.items():
        # "{1,1}" is how one template serves two models.
        if tuple(pattern.replace("{1,1}", "") for pattern in splitting.patterns) == wanted and name != "default":
            return name
    return None


def splitting_of(file: str, metadata: Mapping[str, Any]) -> Splitting:
    name = metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(name, str) or name not in _SPLITTINGS:
        raise ModelError(f"{file}: tokenizer.ggml.pre is {name!r:.80}; supported: {', '.join(sorted(_SPLITTINGS))}")
    return _SPLITTINGS[name]


def byte_level_encoder(vocabulary: Vocabulary, splitting: Splitting) -> Callable[[str], list[int]]:
    """Text -> token ids. Raises `ModelError` for merges that do not fit the vocabulary."""
    check_letters(vocabulary)
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    model = models.BPE(vocab=ids, merges=_merges(vocabulary, ids), ignore_merges=splitting.whole_words)
    engine = Tokenizer(model)
    if splitting.compose:
        engine.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in splitting.patterns]
    engine.pre_tokenizer = pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(False, use_regex=False)])
    engine.add_tokens([AddedToken(text, normalized=False) for text in vocabulary.texts_of(USER_DEFINED)])

    def encode(text: str) -> list[int]:
        # The batch call gives the GIL up while it works (`encode` holds it: a long prompt would stop every thread).
        found: list[int] = engine.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return found

    return encode


def _merges(vocabulary: Vocabulary, ids: Mapping[str, int]) -> list[tuple[str, str]]:
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
