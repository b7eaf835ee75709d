"""Log-probabilities as the official client sees them."""

import math
from typing import Any

import httpx
import openai
import pytest
from live_server import BUNDLED, LiveServer, events

PROMPT = "Once upon a time there was a"


def chat(text: str) -> dict[str, Any]:
    return {"model": BUNDLED, "messages": [{"role": "user", "content": text}]}


def test_chat_streams_the_logprobs_that_it_gives_whole(client: openai.OpenAI) -> None:
    request = {**chat("Write an emoji and the word café."), "max_tokens": 24, "temperature": 0}
    request |= {"logprobs": True, "top_logprobs": 3, "extra_body": {"ignore_eos": True}}
    (whole,) = client.chat.completions.create(**request).choices
    assert whole.logprobs is not None
    content = whole.logprobs.content or []
    assert "".join(token.token for token in content) == whole.message.content
    assert len(content) == 24
    for token in content:
        assert len(token.top_logprobs) == 3
        best = token.top_logprobs[0]  # temperature 0
        assert (best.token, best.logprob, best.bytes) == (token.token, token.logprob, token.bytes)
        values = [other.logprob for other in token.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert sum(map(math.exp, values)) <= 1.0001
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**request, stream=True)]
    streamed = []
    for chunk in chunks:
        tokens = (chunk.logprobs.content or []) if chunk.logprobs else []
        assert "".join(token.token for token in tokens) == (chunk.delta.content or "")
        streamed += tokens
    assert streamed == content


def test_completions_have_offsets_into_their_text(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {"model": BUNDLED, "prompt": [PROMPT, "1, 2, 3,"], "max_tokens": 12, "n": 2, "seed": 5}
    for choice in client.completions.create(**request, logprobs=2).choices:
        check_offsets(choice.text, choice.logprobs, most=3)
    plain = [choice.text for choice in client.completions.create(**request).choices]
    none = client.completions.create(**request, logprobs=0).choices
    assert [choice.text for choice in none] == plain
    for choice in none:
        check_offsets(choice.text, choice.logprobs, most=1)


def check_offsets(text: str, logprobs: Any, most: int) -> None:
    assert "".join(logprobs.tokens) == text
    for token, at, value, top in zip(
        logprobs.tokens, logprobs.text_offset, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        assert text[at : at + len(token)] == token
        assert value == top[token] <= 0
        assert 1 <= len(top) <= most


@pytest.mark.parametrize("length", [1, 3, 7])
def test_stop_text_is_in_neither_and_both_stay_in_step(client: openai.OpenAI, length: int) -> None:
    """The stop text begins within a token and is held back while it may still come."""
    request: dict[str, Any] = {"model": BUNDLED, "prompt": PROMPT, "max_tokens": 30, "temperature": 0, "logprobs": 1}
    text = client.completions.create(**request).choices[0].text
    stop = text[10 : 10 + length]
    request |= {"stop": [stop, text[40] + "never comes"]}
    (whole,) = client.completions.create(**request).choices
    assert whole.finish_reason == "stop"
    assert whole.text == text[: text.index(stop)]
    check_offsets(whole.text, whole.logprobs, most=2)
    tokens, offsets, streamed = [], [], ""
    for chunk in client.completions.create(**request, stream=True):
        (choice,) = chunk.choices
        if choice.logprobs is not None:
            assert "".join(choice.logprobs.tokens or []) == choice.text
            tokens += choice.logprobs.tokens or []
            offsets += choice.logprobs.text_offset or []
        streamed += choice.text
    assert whole.logprobs is not None
    assert (streamed, tokens, offsets) == (whole.text, whole.logprobs.tokens, whole.logprobs.text_offset)


def test_values_are_the_models_own_whatever_shapes_the_draw(client: openai.OpenAI) -> None:
    """A bias and a temperature change which token comes, not how likely the model found it."""
    request: dict[str, Any] = {"model": BUNDLED, "prompt": PROMPT, "max_tokens": 1, "logprobs": 5}
    plain = client.completions.create(**request, temperature=0).choices[0].logprobs
    hot = client.completions.create(**request, temperature=2, seed=1, presence_penalty=1).choices[0].logprobs
    assert plain is not None
    assert hot is not None
    assert plain.tokens is not None
    assert plain.top_logprobs is not None
    assert hot.top_logprobs is not None
    best = dict(plain.top_logprobs[0])
    assert max(best, key=best.__getitem__) == plain.tokens[0]
    assert best == pytest.approx({token: hot.top_logprobs[0][token] for token in best}, abs=1e-4)


@pytest.mark.parametrize("length", [1, 7, 60])
def test_a_prompt_is_scored_as_the_same_tokens_were_when_they_were_drawn(server: LiveServer, length: int) -> None:
    """The last tokens of the prompt are an earlier answer: whatever its pieces are, the values are the same."""
    given = server.http.post("/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    fields = {"temperature": 0, "logprobs": 3, "ignore_eos": True}
    (drawn,) = server.complete(prompt=given, max_tokens=length, **fields).json()["choices"]
    again = server.http.post("/tokenize", json={"prompt": PROMPT + drawn["text"]}).json()["tokens"]
    assert len(again) == len(given) + length, "the answer is tokenised as it was drawn; choose another prompt"
    answer = server.complete(prompt=again, max_tokens=1, echo=True, **fields).json()
    (choice,) = answer["choices"]
    scored = choice["logprobs"]
    check_echo(choice, len(again) + 1)
    assert choice["text"].startswith(PROMPT + drawn["text"])
    for key in ("tokens", "token_logprobs", "top_logprobs"):
        assert scored[key][len(given) : -1] == drawn["logprobs"][key], key
    assert [at - len(PROMPT) for at in scored["text_offset"][len(given) : -1]] == drawn["logprobs"]["text_offset"]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_stream_scores_each_prompt_in_front_of_its_answer(server: LiveServer) -> None:
    """Several prompts with several choices each, one of them a single token, one with characters of several tokens."""
    body: dict[str, Any] = {"prompt": [PROMPT, "The", "é 😀 日本"], "n": 2, "seed": 3, "max_tokens": 5, "logprobs": 1}
    whole = server.complete(**body, echo=True).json()["choices"]
    plain = server.complete(**body).json()["choices"]
    parts: dict[int, list[dict[str, Any]]] = {}
    for event in server.stream(**body, echo=True):
        for choice in event["choices"] if isinstance(event, dict) else ():
            parts.setdefault(choice["index"], []).append(choice)
    assert sorted(parts) == list(range(6))
    for choice, other in zip(whole, plain, strict=True):
        streamed = parts[choice["index"]]
        assert "".join(part["text"] for part in streamed) == choice["text"]
        for key, values in choice["logprobs"].items():
            assert [value for part in streamed for value in (part["logprobs"] or {}).get(key, [])] == values
        assert choice["text"].endswith(other["text"])
        count = len(other["logprobs"]["tokens"])
        values = choice["logprobs"]["token_logprobs"]
        assert values[len(values) - count :] == other["logprobs"]["token_logprobs"]


def check_echo(choice: dict[str, Any], length: int) -> None:
    """Each token of prompt and answer has its place in the text, and all but the first a value."""
    logprobs = choice["logprobs"]
    assert {len(values) for values in logprobs.values()} == {length}
    assert "".join(logprobs["tokens"]) == choice["text"]
    assert (logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (None, None)
    for token, value, top in list(zip(*list(logprobs.values())[:3], strict=True))[1:]:
        assert value <= 0
        assert top[token] >= value


def test_the_longest_prompt_is_scored_beside_others(server: LiveServer) -> None:
    """No step takes more memory for it than one of a full batch, and who streams meanwhile gets its tokens."""
    with server.http.stream(
        "POST", "/v1/completions", json={"prompt": PROMPT, "max_tokens": 3000, "ignore_eos": True, "stream": True}
    ) as response:
        other = events(response)
        next(other)
        before = server.level("busload_generated_tokens_total")
        body = {"prompt": [50 + i % 900 for i in range(1500)], "max_tokens": 1, "logprobs": 5, "echo": True}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        check_echo(answer.json()["choices"][0], 1501)
        beside = server.level("busload_generated_tokens_total") - before
        assert "choices" in next(other)
    assert beside > 10


def test_a_chat_without_logprobs_has_none(server: LiveServer) -> None:
    body = {**chat("hi"), "max_tokens": 2}
    for more in ({}, {"logprobs": False}, {"logprobs": None, "top_logprobs": None}, {"top_logprobs": 0}):
        answer = server.http.post("/v1/chat/completions", json={**body, **more}).json()
        assert answer["choices"][0]["logprobs"] is None
    (choice,) = server.http.post("/v1/chat/completions", json={**body, "logprobs": True}).json()["choices"]
    assert all(token["top_logprobs"] == [] for token in choice["logprobs"]["content"])


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("/v1/chat/completions", {"top_logprobs": 2}, "top_logprobs"),
        ("/v1/chat/completions", {"logprobs": 1}, "logprobs"),
        ("/v1/completions", {"logprobs": 6}, "logprobs"),
        ("/v1/completions", {"prompt": ["long " * 3000] * 20, "logprobs": 5, "echo": True}, "logprobs"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(server: LiveServer, path: str, fields: Any, param: str) -> None:
    body = {**chat("hi"), "prompt": "hi", "max_tokens": 1, **fields}
    response: httpx.Response = server.http.post(path, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
