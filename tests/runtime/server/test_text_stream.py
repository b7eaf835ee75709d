from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from busload_runtime.server.text import TextStream


def run(pieces: list[bytes], stop: list[str] = [], min_tokens: int = 0) -> tuple[list[str], bool]:  # noqa: B006
    """Feeds one token per piece; what came out, and whether a stop string was found."""
    stream = TextStream(pieces.__getitem__, stop, min_tokens)
    out = []
    for token in range(len(pieces)):
        out.append(stream.push(token))
        if stream.stopped:
            return out, True
    out.append(stream.finish())
    return out, False


def cut(text: str, stop: list[str]) -> str:
    """Oracle: the text in front of the stop string that is complete first."""
    ends = [(text.find(word) + len(word), text.find(word)) for word in stop if word in text]
    return text[: min(ends)[1]] if ends else text


@pytest.mark.parametrize("text", ["a😀b", "日本語", "e\u0301a\u0308", "👩‍👩‍👧‍👦!"])
def test_characters_that_span_tokens_come_out_whole(text: str) -> None:
    out, _ = run([bytes([byte]) for byte in text.encode()])
    assert "".join(out) == text
    assert "\ufffd" not in "".join(out)


def test_an_unfinished_character_at_the_end_is_dropped() -> None:
    assert run([b"ab", "😀".encode()[:3]]) == (["ab", "", ""], False)


def test_text_that_may_begin_a_stop_string_is_held_and_flushed() -> None:
    assert run([b"a", b"EN", b"D"], ["ENDE"]) == (["a", "", "", "END"], False)


def test_held_text_is_released_once_it_cannot_match() -> None:
    assert run([b"aE", b"N", b"x"], ["END"]) == (["a", "", "ENx", ""], False)


def test_stop_string_over_several_tokens_never_leaks() -> None:
    assert run([b"hi E", b"N", b"D and more"], ["END"]) == (["hi ", "", ""], True)


def test_min_tokens_hides_the_first_tokens_from_matching() -> None:
    assert run([b"END", b"x", b"END"], ["END"], min_tokens=1) == (["END", "x", ""], True)


def test_the_stop_string_complete_first_counts() -> None:
    assert run([b"xabc"], ["abc", "b"]) == (["xa"], True)


@given(st.text("abc😀", max_size=30), st.lists(st.text("abc😀", min_size=1, max_size=4), max_size=4), st.data())
def test_text_does_not_depend_on_the_split_into_tokens(text: str, stop: list[str], data: st.DataObject) -> None:
    raw = text.encode()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(raw)))) | {0, len(raw)})
    out, stopped = run([raw[a:b] for a, b in pairwise(cuts)], stop)
    assert "".join(out) == cut(text, stop)
    assert stopped == any(word in text for word in stop)
