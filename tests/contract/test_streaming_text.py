"""Text as it streams: whole characters, stop strings neither shown nor lost, the same as in one piece.

A model that recites makes every answer known beforehand: its tokens are bytes, so each character but the last spans two
to four of them, and a stop string up to twenty.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from live_server import LiveServer, running
from tiny_gguf import write_tiny_model

VERSE = "😀日éжe\u0308क!"
BYTES = len(VERSE.encode())
PATHS = ("/v1/completions", "/v1/chat/completions")
EXAMPLES = settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@pytest.fixture(scope="module")
def reciter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Continues every prompt with the verse, from its first character on."""
    directory = tmp_path_factory.mktemp("reciter")
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    model = write_tiny_model(directory / "reciter.gguf", recites=VERSE, chat_template=template)
    with running(directory, f"--model={model}", "--batch-size=32") as server:
        yield server


def body(path: str, text: str, **fields: Any) -> dict[str, Any]:
    prompt = {"prompt": text} if path == PATHS[0] else {"messages": [{"role": "user", "content": text}]}
    return {**prompt, "temperature": 0, **fields}


def whole(server: LiveServer, path: str, **fields: Any) -> tuple[str, str]:
    """Text and finish reason of an answer in one piece."""
    response = server.http.post(path, json=fields)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return choice["text"] if path == PATHS[0] else choice["message"]["content"], choice["finish_reason"]


def pieces(server: LiveServer, path: str, **fields: Any) -> tuple[list[str], str]:
    """Texts of the events and finish reason; the stream must end with the reason and [DONE], each once."""
    *chunks, done = server.stream(path, **fields)
    assert done == "[DONE]"
    choices = [chunk["choices"][0] for chunk in chunks if isinstance(chunk, dict)]
    assert [choice["finish_reason"] is None for choice in choices] == [True] * (len(choices) - 1) + [False]
    texts = [choice["text"] if path == PATHS[0] else choice["delta"].get("content", "") for choice in choices]
    return texts, choices[-1]["finish_reason"]


def cut(text: str, stop: list[str], min_tokens: int) -> tuple[str, str]:
    """Oracle: what is in front of the stop string that is complete first, behind the first tokens, and the reason."""
    first = said(min_tokens)
    rest = text.removeprefix(first)
    ends = [(rest.find(word) + len(word), rest.find(word)) for word in stop if word in rest]
    return (first + rest[: min(ends)[1]], "stop") if ends else (text, "length")


def said(max_tokens: int) -> str:
    """The verse over and over, as far as whole characters go."""
    data = (VERSE.encode() * (max_tokens // BYTES + 1))[:max_tokens]
    return data.decode(errors="ignore")


@pytest.mark.parametrize("path", PATHS)
def test_no_broken_character_at_any_length(reciter: LiveServer, path: str) -> None:
    for max_tokens in range(1, 2 * BYTES + 1):
        fields = body(path, "!", max_tokens=max_tokens)
        texts, reason = pieces(reciter, path, **fields)
        assert [text for text in texts if text] == list(said(max_tokens)), "an event for each, once it is whole"
        assert ("".join(texts), reason) == whole(reciter, path, **fields) == (said(max_tokens), "length")


words = st.tuples(st.integers(0, 2 * len(VERSE)), st.integers(1, 5)).map(lambda cut: (VERSE * 3)[cut[0] : sum(cut)])
stops = st.lists(words | st.builds(lambda word: word + "x", words), min_size=1, max_size=4)


@EXAMPLES
@given(
    path=st.sampled_from(PATHS),
    stop=stops,
    max_tokens=st.integers(1, 2 * BYTES),
    min_tokens=st.just(0) | st.integers(0, BYTES),
    scored=st.booleans(),
)
def test_stop_strings_over_many_tokens_neither_leak_nor_take(
    reciter: LiveServer, path: str, stop: list[str], max_tokens: int, min_tokens: int, scored: bool
) -> None:
    """Those that never complete (they end in an x) take nothing away at the end of the text. The same with
    log-probabilities, and behind `min_tokens`, whose text no stop string is looked for in."""
    fields = body(path, "!", stop=stop, max_tokens=max_tokens, min_tokens=min(min_tokens, max_tokens))
    if scored:
        fields["logprobs"] = 1 if path == PATHS[0] else True
    texts, reason = pieces(reciter, path, **fields)
    assert (
        ("".join(texts), reason) == whole(reciter, path, **fields) == cut(said(max_tokens), stop, fields["min_tokens"])
    )


@pytest.mark.parametrize("path", PATHS)
def test_a_stream_is_what_comes_in_one_piece_whatever_is_drawn(server: LiveServer, path: str) -> None:
    """The bundled model, hot enough to draw from all scripts: at every length, each a beginning of the next."""
    for seed, prompt in enumerate(
        ("Translate to Japanese: good morning! 日本", "😀 🎉 emoji list: 👩‍👩‍👧‍👦", "e\u0301 ñ क्ष")
    ):
        fields = body(path, prompt, seed=seed, temperature=1.8, ignore_eos=True)
        answers = [whole(server, path, **fields, max_tokens=n)[0] for n in range(1, 13)]
        assert all(longer.startswith(shorter) for shorter, longer in pairwise(answers))
        for n in (1, 2, 3, 5, 8, 12):
            assert "".join(pieces(server, path, **fields, max_tokens=n)[0]) == answers[n - 1]


def test_every_choice_of_a_stream_ends_and_so_does_the_stream(reciter: LiveServer) -> None:
    """Up to the sequence limit, behind a prompt that fills most of it."""
    fields = body(PATHS[0], "!" * 1500, n=4, max_tokens=5000)
    chunks = reciter.stream(**fields, stream_options={"include_usage": True})
    assert chunks[-1] == "[DONE]"
    ends = [c for chunk in chunks if isinstance(chunk, dict) for c in chunk["choices"] if c["finish_reason"]]
    assert sorted((choice["index"], choice["finish_reason"]) for choice in ends) == [(i, "length") for i in range(4)]
    assert chunks[-2]["usage"]["completion_tokens"] == 4 * (2048 - 1500)  # type: ignore[index]
