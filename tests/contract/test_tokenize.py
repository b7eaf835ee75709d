"""/tokenize and /detokenize, and the parts of the OpenAI API that are not there."""

from typing import Any

import httpx
import pytest
from live_server import BUNDLED, LiveServer

TEXT = "Hello, café 😀 <|im_end|> and 日本語!"


def post(server: LiveServer, path: str, **body: Any) -> dict[str, Any]:
    response = server.http.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_a_prompt_becomes_the_tokens_that_a_completion_counts(server: LiveServer) -> None:
    found = post(server, "/tokenize", model=BUNDLED, prompt=TEXT, return_token_strs=True)
    assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
    assert found["max_model_len"] == 4096
    assert found["token_strs"][0] == "Hello"
    usage = server.complete(prompt=TEXT, max_tokens=1).json()["usage"]
    assert usage["prompt_tokens"] == found["count"]
    assert post(server, "/detokenize", model=BUNDLED, tokens=found["tokens"]) == {"prompt": TEXT}


def test_messages_become_the_tokens_that_a_chat_counts(server: LiveServer) -> None:
    messages = [{"role": "user", "content": TEXT}]
    found = post(server, "/tokenize", messages=messages)
    assert found["token_strs"] is None
    answer = server.http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1}).json()
    assert answer["usage"]["prompt_tokens"] == found["count"]
    text = post(server, "/detokenize", tokens=found["tokens"])["prompt"]
    assert text.endswith("<|im_start|>assistant\n")
    assert TEXT in text
    without = post(server, "/tokenize", messages=messages, add_generation_prompt=False)["tokens"]
    assert found["tokens"][: len(without)] == without
    assert len(without) < found["count"]


def test_what_no_prompt_could_be_is_counted_too(server: LiveServer) -> None:
    """Longer than the limit, and nothing at all."""
    assert post(server, "/tokenize", prompt="word " * 6000)["count"] > 4096
    assert post(server, "/tokenize", prompt="")["tokens"] == []
    assert post(server, "/detokenize", tokens=[]) == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, 400, "prompt"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/tokenize", {"prompt": "a" * 2_000_000}, 413, None),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [999999]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, 400, "tokens[0]"),
    ],
)
def test_refusals_name_the_parameter(server: LiveServer, path: str, body: Any, status: int, param: str | None) -> None:
    response = server.http.post(path, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize(
    "path", ["/v1/embeddings", "/v1/responses", "/v1/audio/speech", "/v1/images/generations", "/v1/moderations"]
)
def test_what_else_the_openai_api_has_is_refused_with_what_there_is(server: LiveServer, method: str, path: str) -> None:
    response: httpx.Response = server.http.request(method, path, content=b"{}" if method == "POST" else None)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (404, "unsupported_endpoint")
    assert path in error["message"]
    assert "/v1/chat/completions" in error["message"]
