"""What a stream's events are on the wire."""

import json

import httpx
from hypothesis import given
from hypothesis import strategies as st
from live_server import LiveServer

from busload_runtime.server.answer import _encode_line, _event

ENDS = "\n\r\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"
"""Of lines, by Python's `str.splitlines`."""


@given(st.text(st.sampled_from(f'{ENDS}a\u2026\u00c5\\"') | st.characters(exclude_categories=["Cs"])))
def test_no_client_takes_what_a_model_says_for_the_end_of_a_line(text: str) -> None:
    assert [json.loads(line) for line in _encode_line(text).decode().splitlines()] == [text]
    (line, empty) = _event({"text": text}).decode().splitlines()
    assert json.loads(line.removeprefix("data: ")) == {"text": text}
    assert empty == ""


def test_other_characters_are_sent_as_they_are() -> None:
    assert _encode_line("\u2026\u00c5").decode() == '"\u2026\u00c5"'


def test_an_answer_with_such_characters_reaches_a_client_that_splits_lines_so(smol: LiveServer) -> None:
    prompt = f"one{ENDS}two"
    body = {"prompt": prompt, "echo": True, "max_tokens": 1, "temperature": 0, "stream": True}
    with httpx.stream("POST", f"{smol.url}/v1/completions", json=body, timeout=60) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    text = "".join(choice["text"] for line in lines[:-1] for choice in json.loads(line)["choices"])
    assert text.startswith(prompt)
