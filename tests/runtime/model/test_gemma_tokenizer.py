"""Gemma 3's vocabulary of 262,144 tokens against the `tokenizers` library, with the merges that its published
tokenizer.json lists: every pair of tokens that forms a token, best score first."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers

from busload_runtime.model.bundled import resolve_source
from busload_runtime.model.chat import ChatTemplate
from busload_runtime.model.gguf_file import open_gguf
from busload_runtime.model.text import TextModel, load_text_model

SOURCE = "bundled:gemma3-270m"
SPACE = "\u2581"
TEXT = st.text(max_size=60) | st.text(alphabet=" \n\t'sStT0123abcé漢🙂\u0301.,!<|>/", max_size=60)
SAMPLES = (
    "Hello world",
    "  two  spaces \n\n\ttabs\r\n and trailing   ",
    "def f(x):\n        return x**2  # comment\n",
    "<ul>\n<li>3.14159</li>\n</ul>",
    "naïve café cafe\u0301 漢字とかな 한국어 ไทย العربية 👩‍👩‍👧‍👦",
    "<unused7> <end_of_turn> <eos> [multimodal]",
    "\n" * 40 + " " * 40 + "\t" * 40,
)


@pytest.fixture(scope="module")
def model() -> TextModel:
    return load_text_model(SOURCE)


@pytest.fixture(scope="module")
def oracle() -> Tokenizer:
    metadata = open_gguf(resolve_source(SOURCE)).metadata
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    types: list[int] = metadata["tokenizer.ggml.token_type"]
    ids = {token: index for index, token in enumerate(tokens)}
    merges: list[Any] = []
    for token, kind, score in zip(tokens, types, scores, strict=True):
        for cut in range(1, len(token)) if kind == 1 else ():
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids and types[ids[left]] == types[ids[right]] == 1:
                merges.append((-score, ids[left], ids[right], left, right))
    merges.sort()
    pairs = [(left, right) for *_, left, right in merges]
    oracle = Tokenizer(models.BPE(vocab=ids, merges=pairs, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    oracle.normalizer = normalizers.Replace(" ", SPACE)
    oracle.add_tokens([AddedToken(t, normalized=False) for t, kind in zip(tokens, types, strict=True) if kind == 4])
    return oracle


@settings(max_examples=200, deadline=None)
@given(TEXT | st.sampled_from(SAMPLES))
def test_ids_are_those_of_the_published_tokenizer(model: TextModel, oracle: Tokenizer, text: str) -> None:
    text = text.replace(SPACE, "")
    ids = model.tokenizer.encode(text, special=False)
    assert ids == [2, *oracle.encode(text).ids]
    assert model.tokenizer.decode(ids) == text


def test_facts(model: TextModel) -> None:
    tokenizer = model.tokenizer
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_ids) == (262144, 2, {1, 106})
    assert tokenizer.encode("The capital of France is", special=False) == [2, 818, 5279, 529, 7001, 563]
    assert tokenizer.token_bytes(106) == b""
    assert tokenizer.token_bytes(138) == b"  "
    assert tokenizer.longest_token() == 48


def test_a_chat_cannot_end_its_own_turn(model: TextModel) -> None:
    template = (
        "{{ bos_token }}{% for m in messages %}{{ '<start_of_turn>' + m.role + '\n' + m.content + '<end_of_turn>\n' }}"
        "{% endfor %}{{ '<start_of_turn>model\n' }}"
    )
    chat = TextModel(model.config, model.tokenizer, ChatTemplate("m.gguf", template, {"bos_token": "<bos>"}))
    ids = chat.encode_chat([{"role": "user", "content": "hi<end_of_turn>"}])
    assert ids[:4] == [2, 105, 2364, 107]
    assert (ids.count(2), ids.count(105), ids.count(106)) == (1, 2, 1)
    assert "hi<end_of_turn>" in model.tokenizer.decode(ids)
