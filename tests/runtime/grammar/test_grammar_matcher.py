"""Grammars over the bundled model's vocabulary: whatever is drawn from the masks is what was asked for."""

import json
import random
import re
from collections.abc import Callable

import jsonschema
import pytest
from schemas import FOLLOWED, HARMLESS, HOSTILE, REFUSED, Schema

from busload_runtime.grammar.errors import GrammarError
from busload_runtime.grammar.matcher import Vocabulary
from busload_runtime.grammar.text import (
    GrammarTextError,
    choice_expression,
    grammar,
    json_expression,
    regex_expression,
)
from busload_runtime.model.load import load_token_bytes
from busload_runtime.model.text import load_text_model

Draw = Callable[[str, int], str]


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary(*load_token_bytes("bundled:smollm2-135m-instruct"))


@pytest.fixture(scope="module")
def draw(vocabulary: Vocabulary) -> Draw:
    tokens, eos_ids = load_token_bytes("bundled:smollm2-135m-instruct")

    def drawn(text: str, seed: int) -> str:
        """A text of the grammar, by random tokens."""
        chance, state, answer = random.Random(seed), vocabulary.compile(text).fork(), b""
        for _ in range(400):
            token = chance.choice(allowed(state.mask()))
            if token in eos_ids:
                assert state.advance(token)
                break
            answer += tokens[token]
            if state.advance(token):
                break
        else:
            raise AssertionError(f"{text!r} does not end: {answer!r}")
        return answer.decode()

    return drawn


def allowed(mask: bytes) -> list[int]:
    return [8 * place + bit for place, byte in enumerate(mask) if byte for bit in range(8) if byte >> bit & 1]


def test_token_bytes_are_those_of_the_tokenizer() -> None:
    tokens, eos_ids = load_token_bytes("bundled:smollm2-135m-instruct")
    tokenizer = load_text_model("bundled:smollm2-135m-instruct").tokenizer
    assert tokens == [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
    assert eos_ids == tokenizer.eos_ids


@pytest.mark.parametrize("name", FOLLOWED)
def test_random_texts_of_a_schema_are_valid(draw: Draw, name: str) -> None:
    schema = FOLLOWED[name]
    jsonschema.Draft202012Validator.check_schema(schema)
    text = grammar(json_expression(schema))
    for seed in range(8):
        answer = draw(text, seed)
        jsonschema.Draft202012Validator(schema).validate(json.loads(answer))
        assert not re.search(r"\s{2}|^\s|\s$", re.sub(r'"(\\.|[^"\\])*"', '""', answer))


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_named(vocabulary: Vocabulary, name: str) -> None:
    schema, words = REFUSED[name]
    with pytest.raises(GrammarError, match=re.escape(words)) as error:
        vocabulary.compile(grammar(json_expression(schema)))
    assert "\n" not in str(error.value)
    assert "at 2(" not in str(error.value)


@pytest.mark.parametrize("name", HARMLESS)
def test_what_only_looks_hostile_is_followed_step_by_step(vocabulary: Vocabulary, name: str) -> None:
    state = vocabulary.compile(grammar(json_expression(HARMLESS[name])))
    chance = random.Random(1)
    for _ in range(50):
        if state.advance(chance.choice(allowed(state.mask()))):
            break


@pytest.mark.parametrize("pattern", [r"[0-9]{3}-[a-z]{2,4}", "a/b", r"a\/b", "line\nend", r"tab\tend|\\", "(a|b){5}"])
def test_random_texts_of_a_pattern_match_it(draw: Draw, pattern: str) -> None:
    for seed in range(5):
        assert re.fullmatch(pattern, draw(grammar(regex_expression(pattern)), seed))


def test_choices_are_taken_to_the_letter(draw: Draw) -> None:
    choices = ['say "yes"', "a\nb", "back\\slash", "日本", "/x/", "prefix", "prefix and more"]
    text = grammar(choice_expression(choices))
    assert {draw(text, seed) for seed in range(80)} == set(choices)


def test_no_control_token_is_ever_allowed_but_the_ends_of_a_whole_text(vocabulary: Vocabulary) -> None:
    tokens, eos_ids = load_token_bytes("bundled:smollm2-135m-instruct")
    control = {token for token, text in enumerate(tokens) if not text}
    state = vocabulary.compile(grammar(regex_expression("(ab)*")))
    for token, ends in ((tokens.index(b"a"), eos_ids), (tokens.index(b"b"), frozenset())):
        assert control & set(allowed(state.mask())) == ends
        state.advance(token)


def test_states_are_apart(vocabulary: Vocabulary) -> None:
    matcher = vocabulary.compile(grammar(choice_expression(["ab"])))
    first, second = matcher.fork(), matcher.fork()
    before = second.mask()
    first.advance(allowed(first.mask())[0])
    assert second.mask() == before == matcher.fork().mask()


def test_texts_that_are_too_long_or_no_unicode_are_refused_before_any_compiling() -> None:
    too_long: Schema = HOSTILE["a megabyte"]
    with pytest.raises(GrammarTextError, match=r"the schema takes \d+ bytes as JSON; at most 65536 are allowed"):
        json_expression(too_long)
    with pytest.raises(GrammarTextError, match="nested too deeply"):
        json_expression(deeper_than_python())
    with pytest.raises(GrammarTextError, match="surrogate"):
        grammar(choice_expression(["\ud800"]))
    with pytest.raises(GrammarTextError, match="surrogate"):
        json_expression({"const": "\ud800"})
    with pytest.raises(GrammarTextError, match="262144 bytes"):
        grammar(choice_expression(["x" * 300_000]))
    with pytest.raises(GrammarTextError, match="backslash"):
        regex_expression("ab\\")


def deeper_than_python() -> Schema:
    schema: Schema = {}
    for _ in range(100_000):
        schema = {"items": schema}
    return schema


def test_a_large_sentencepiece_vocabulary_is_followed_too() -> None:
    tokens, eos_ids = load_token_bytes("bundled:gemma3-270m")
    vocabulary = Vocabulary(tokens, eos_ids)
    schema = FOLLOWED["keys that need escapes"]
    matcher = vocabulary.compile(grammar(json_expression(schema)))
    for seed in range(3):
        chance, state, answer, whole = random.Random(seed), matcher.fork(), b"", False
        while not whole:
            token = chance.choice(allowed(state.mask()))
            answer += tokens[token]
            whole = state.advance(token)
        jsonschema.Draft202012Validator(schema).validate(json.loads(answer))
