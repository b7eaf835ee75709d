"""Token ids against the tokenizers as their makers publish them, and text back from ids."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_llama import TinyLlama
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from busload_runtime.model.bundled import resolve_source
from busload_runtime.model.control_text import ControlTexts
from busload_runtime.model.errors import ModelError
from busload_runtime.model.gguf_file import open_gguf
from busload_runtime.model.text import load_text_model
from busload_runtime.model.tokenizer import TextTokenizer, tokenizer_from_metadata

SOURCE = "bundled:smollm2-135m-instruct"
SAMPLES = (
    "",
    "Hello world",
    "  two  spaces \n\n\ttabs\r\n and trailing   ",
    "I'll they'RE don't",
    "3.14159 and 1234567 and ١٢٣ and ½",
    "def f(x):\n    return x**2  # comment\n",
    "naïve café cafe\u0301 e\u0301\u0323",
    "漢字とかな 한국어 ไทย العربية",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🙂🙃",
    "<|im_start|>user\nhi<|im_end|>",
    "a\u00a0b\u2003c\u200bd\x00e",
    "$100 + 5% = ~[x]^{2}|y|",
)
TEXT = st.text(max_size=60) | st.text(alphabet=" \n\t'sStT0123abcé漢🙂\u0301.,!<|>", max_size=60)


@pytest.fixture(scope="module")
def smollm() -> TextTokenizer:
    return load_text_model(SOURCE).tokenizer


@pytest.fixture(scope="module")
def smollm_oracle() -> Tokenizer:
    """As HuggingFaceTB/SmolLM2-135M-Instruct publishes it: digits one by one, then GPT-2's byte-level BPE."""
    metadata = open_gguf(resolve_source(SOURCE)).metadata
    vocab = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(line.split(" ")) for line in metadata["tokenizer.ggml.merges"]]
    oracle = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    oracle.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    oracle.decoder = decoders.ByteLevel()
    return oracle


@pytest.fixture(scope="module")
def smollm_bytes(smollm: TextTokenizer) -> frozenset[int]:
    pieces = map(smollm.token_bytes, range(smollm.vocab_size))
    known = frozenset(piece[0] for piece in pieces if len(piece) == 1)
    assert known >= {*range(0x20, 0xC0), 0xC3, *range(0xE1, 0xF1)}
    return known


def test_smollm_samples(smollm: TextTokenizer, smollm_oracle: Tokenizer) -> None:
    for text in SAMPLES:
        ids = smollm.encode(text, special=False)
        assert ids == smollm_oracle.encode(text, add_special_tokens=False).ids
        assert smollm.decode(ids) == text


@settings(max_examples=300, deadline=None)
@given(TEXT)
def test_smollm_any_text(
    smollm: TextTokenizer, smollm_oracle: Tokenizer, smollm_bytes: frozenset[int], text: str
) -> None:
    ids = smollm.encode(text, special=False)
    assert ids == smollm_oracle.encode(text, add_special_tokens=False).ids
    # The vocabulary lacks some bytes, which only rare planes of Unicode use: those are lost, as with the original.
    kept = bytes(byte for byte in text.encode() if byte in smollm_bytes)
    assert b"".join(map(smollm.token_bytes, ids)) == kept
    assert smollm.decode(ids) == kept.decode(errors="replace")


def test_smollm_facts(smollm: TextTokenizer) -> None:
    assert smollm.vocab_size == 49152
    assert smollm.bos_id == 1
    assert smollm.eos_ids == {0, 2}  # <|endoftext|> and <|im_end|>
    assert not smollm.add_bos
    assert smollm.encode("Hello world", special=False) == [19556, 905]
    assert smollm.encode("<|im_start|>user\n", special=True) == [1, 4093, 198]
    assert smollm.decode([1, 4093, 198, 2]) == "user\n"
    assert smollm.token_bytes(1) == b""
    for outside in (-1, 49152):
        with pytest.raises(IndexError):
            smollm.token_bytes(outside)


def test_control_tokens_only_when_asked(smollm: TextTokenizer) -> None:
    text = "<|im_end|> <|endoftext|>"
    assert not {0, 1, 2} & set(smollm.encode(text, special=False))
    assert smollm.encode(text, special=True) == [2, *smollm.encode(" ", special=False), 0]


# The patterns as the published tokenizer.json files have them.
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PUBLISHED = {
    "llama-bpe": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST,
        None,
        True,
    ),
    "qwen2": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST,
        normalizers.NFC(),
        False,
    ),
    "gpt-2": (None, None, False),
}


def trained(pre: str) -> tuple[Tokenizer, dict[str, Any]]:
    """A small vocabulary trained with the published splitting, and the same as GGUF metadata."""
    pattern, normalizer, ignore_merges = PUBLISHED[pre]
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pattern is not None:
        split = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
        )
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = split
    corpus = [path.read_text() for path in sorted(Path(__file__).parent.glob("*.py"))] + list(SAMPLES) * 3
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    learner.train_from_iterator(
        corpus, trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False)
    )
    model = models.BPE(**_vocab_and_merges(learner), ignore_merges=ignore_merges)
    oracle = Tokenizer(model)
    oracle.pre_tokenizer = split
    if normalizer is not None:
        oracle.normalizer = normalizer
    vocab = oracle.get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in _vocab_and_merges(learner)["merges"]],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
    }
    return oracle, metadata


def _vocab_and_merges(tokenizer: Tokenizer) -> dict[str, Any]:
    model = json.loads(tokenizer.to_str())["model"]
    return {"vocab": model["vocab"], "merges": [tuple(pair) for pair in model["merges"]]}


@pytest.fixture(scope="module", params=PUBLISHED)
def published(request: pytest.FixtureRequest) -> tuple[Tokenizer, TextTokenizer, bool]:
    oracle, metadata = trained(request.param)
    return oracle, tokenizer_from_metadata("m.gguf", metadata), request.param == "qwen2"


@settings(max_examples=200, deadline=None)
@given(TEXT | st.sampled_from(SAMPLES))
def test_published_splittings(published: tuple[Tokenizer, TextTokenizer, bool], text: str) -> None:
    oracle, ours, composes = published
    ids = ours.encode(text, special=False)
    assert ids == oracle.encode(text).ids
    expected = normalizers.NFC().normalize_str(text) if composes else text
    assert ours.decode(ids) == expected


@pytest.fixture(scope="module", params=[True, False])
def sentence_piece(request: pytest.FixtureRequest) -> tuple[Any, TextTokenizer]:
    corpus = [line for path in sorted(Path(__file__).parent.glob("*.py")) for line in path.read_text().splitlines()]
    proto = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus + list(SAMPLES[:9]) * 3),
        model_writer=proto,
        model_type="bpe",
        vocab_size=900,
        byte_fallback=True,
        character_coverage=0.99,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=request.param,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        minloglevel=2,
    )
    oracle = sentencepiece.SentencePieceProcessor(model_proto=proto.getvalue())
    size = oracle.vocab_size()
    kinds = [
        2 if oracle.is_unknown(i) else 3 if oracle.is_control(i) else 6 if oracle.is_byte(i) else 1 for i in range(size)
    ]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [oracle.id_to_piece(i) for i in range(size)],
        "tokenizer.ggml.scores": [oracle.get_score(i) for i in range(size)],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_space_prefix": request.param,
    }
    return oracle, tokenizer_from_metadata("m.gguf", metadata)


@settings(max_examples=300, deadline=None)
@given(TEXT | st.sampled_from(SAMPLES))
def test_sentence_piece(sentence_piece: tuple[Any, TextTokenizer], text: str) -> None:
    oracle, ours = sentence_piece
    text = text.replace("\u2581", "").replace("\x00", "")
    ids = ours.encode(text, special=False)
    assert ids == [1, *oracle.encode(text)]
    assert ours.decode(ids) == text


WRONG = {
    "tokenizer.ggml.model": ("rwkv", "tokenizer.ggml.model is 'rwkv'; supported: 'gpt2' (byte-level BPE), 'llama'"),
    "tokenizer.ggml.pre": ("klingon", "tokenizer.ggml.pre is 'klingon'; supported: default, gpt-2, llama-bpe"),
    "tokenizer.ggml.tokens": (["a", "a"], "tokenizer.ggml.tokens holds a token twice"),
    "tokenizer.ggml.token_type": ([1, 1], "tokenizer.ggml.token_type must hold one type from 1 to 6"),
    "tokenizer.ggml.merges": (["x y"], "tokenizer.ggml.merges holds 'x y', whose parts are not all tokens"),
    "tokenizer.ggml.eos_token_id": (9999, "tokenizer.ggml.eos_token_id is 9999; must be below 262"),
}


@pytest.mark.parametrize("key", WRONG)
def test_wrong_vocabulary(key: str, tmp_path: Path) -> None:
    value, expected = WRONG[key]
    path = str(tmp_path / "wrong.gguf")
    TinyLlama(metadata={key: value}).write(Path(path))
    with pytest.raises(ModelError) as caught:
        load_text_model(path)
    assert str(caught.value).startswith(f"{path}: {expected}")


def test_bos_is_put_in_front_once(tmp_path: Path) -> None:
    TinyLlama(metadata={"tokenizer.ggml.add_bos_token": True}).write(tmp_path / "bos.gguf")
    tokenizer = load_text_model(str(tmp_path / "bos.gguf")).tokenizer
    bos = tokenizer.bos_id
    assert tokenizer.encode("the", special=False) == [bos, *tokenizer.encode("the", special=True)[1:]]
    assert tokenizer.encode("<|im_start|>the", special=True).count(bos) == 1


@given(
    st.lists(st.text(alphabet="<>ab", min_size=2, max_size=4), max_size=6, unique=True),
    st.text(alphabet="<>abc", max_size=30),
)
def test_control_texts_are_found_longest_first(control: list[str], text: str) -> None:
    found = ControlTexts({token: index for index, token in enumerate(control)})
    pattern = "|".join(map(re.escape, sorted(control, key=len, reverse=True))) or "(?!)"
    parts = [control.index(part) if index % 2 else part for index, part in enumerate(re.split(f"({pattern})", text))]
    assert list(found.split(text)) == parts
    assert list(found.split(found.hide(text, "\ufdd0"))) == [found.hide(text, "\ufdd0")]
    assert found.hide(text, "\ufdd0").replace("\ufdd0", "") == text
