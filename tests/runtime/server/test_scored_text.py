"""Text with log-probabilities: the same text as without them, and the tokens that it is made of."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from busload_runtime.engine.plan import Logprobs
from busload_runtime.server.logprobs import ScoredText, ScoredToken
from busload_runtime.server.text import TextStream

PIECES = [b"", b"a", b"b", b"ab", b" ", b"END", b"EN", b"D", b"\xf0\x9f", b"\x98\x80", b"\xc3", b"\xa9", "é€".encode()]
CONTROL = 0


class Vocabulary:
    """A tokenizer whose tokens are `PIECES`; the first is a control token."""

    def token_bytes(self, token: int) -> bytes:
        return PIECES[token]

    def written(self, token: int) -> str:
        return "<|end|>" if token == CONTROL else repr(PIECES[token])


def scored(stop: tuple[str, ...] = ()) -> tuple[TextStream, ScoredText]:
    vocabulary: Any = Vocabulary()
    text = TextStream(vocabulary.token_bytes, stop)
    return text, ScoredText(text, vocabulary)


def logprobs(token: int) -> Logprobs:
    return Logprobs(-float(token), ((token, -float(token)), (CONTROL, -50.0)))


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.integers(0, len(PIECES) - 1), max_size=25),
    st.lists(st.sampled_from(["END", "ab", "a b", "😀", "bb", " é"]), max_size=3).map(tuple),
)
def test_tokens_joined_are_the_text_in_every_piece(drawn: list[int], stop: tuple[str, ...]) -> None:
    plain = TextStream(Vocabulary().token_bytes, stop)
    expected = "".join(plain.push(token) for token in drawn)
    expected += "" if plain.stopped else plain.finish()
    text, both = scored(stop)
    pieces = []
    for token in drawn:
        pieces.append(both.push(token, logprobs(token)))
        if text.stopped:
            break
    else:
        pieces.append(both.finish())
    assert "".join(piece for piece, _ in pieces) == expected
    for piece, tokens in pieces:
        assert "".join(token.text for token in tokens) == piece
    seen = [token for _, tokens in pieces for token in tokens]
    assert [token.logprob for token in seen] == [-float(token) for token in drawn[: len(seen)]]
    if not stop:
        assert b"".join(token.data for token in seen) == b"".join(PIECES[token] for token in drawn)


def test_a_character_counts_with_the_token_that_completes_it() -> None:
    _, both = scored()
    assert both.push(8, logprobs(8)) == ("", [])
    text, tokens = both.push(9, logprobs(9))
    assert text == "😀"
    assert [(token.text, token.data) for token in tokens] == [("", b"\xf0\x9f"), ("😀", b"\x98\x80")]


def test_a_token_that_a_stop_string_cuts_is_written_up_to_the_cut() -> None:
    _, both = scored(("b a",))
    assert both.push(3, logprobs(3)) == ("", [])
    assert both.push(4, logprobs(4)) == ("", [])
    text, tokens = both.push(1, logprobs(1))
    assert text == "a"
    assert [(token.text, token.data, token.logprob) for token in tokens] == [("a", b"a", -3.0)]


@pytest.mark.parametrize(("token", "text"), [(CONTROL, "<|end|>"), (8, "bytes:\\xf0\\x9f"), (5, "END"), (12, "é€")])
def test_other_tokens_are_written_as_themselves(token: int, text: str) -> None:
    _, both = scored()
    _, (drawn,) = both.push(1, Logprobs(-1.0, ((token, -0.5), (1, -1.0))))
    assert drawn.top == (
        ScoredToken(text, PIECES[token] or text.encode(), -0.5),
        ScoredToken("a", b"a", -1.0),
    )
