"""The OpenAPI document says what the server does: its routes, its answers, its statuses."""

from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import msgspec
import pytest
from live_server import BUNDLED, LiveServer, events

from busload_runtime.server import responses

CHAT = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 4}
PROMPT = {"prompt": "Hello", "max_tokens": 4, "stop": ["\n\n\n"]}
ANSWERS: list[tuple[str, str, Any, type]] = [
    ("POST", "/v1/chat/completions", CHAT, responses.ChatCompletion),
    ("POST", "/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2, "n": 2}, responses.ChatCompletion),
    ("POST", "/v1/completions", PROMPT, responses.Completion),
    ("POST", "/v1/completions", {**PROMPT, "logprobs": 2, "n": 2}, responses.Completion),
    ("POST", "/v1/completions", {**PROMPT, "logprobs": 2, "echo": True}, responses.Completion),
    ("POST", "/tokenize", {"prompt": "Hello", "return_token_strs": True}, responses.Tokenized),
    ("POST", "/detokenize", {"tokens": [5]}, responses.Detokenized),
    ("GET", "/v1/models", None, responses.ModelList),
    ("GET", f"/v1/models/{BUNDLED}", None, responses.Model),
    ("GET", "/health/live", None, responses.Health),
    ("GET", "/openapi.json", None, responses.Document),
    ("GET", "/v1/embeddings", None, responses.Error),
    ("OPTIONS", "/v1/chat/completions", None, responses.Error),
    ("POST", "/v1/completions", {}, responses.Error),
    ("POST", "/v1/completions", [], responses.Error),
    ("POST", "/v1/chat/completions", {"messages": [{"role": "user"}]}, responses.Error),
    ("POST", "/v1/chat/completions", {**CHAT, "n_predict": 1}, responses.Error),
    ("GET", "/v1/completions", None, responses.Error),
    ("POST", "/v1/completions", {"prompt": ""}, responses.Error),
    ("POST", "/v1/completions", {"prompt": "x", "model": "other"}, responses.Error),
    ("POST", "/v1/completions", {"prompt": "x" * 2_000_000}, responses.Error),
]


STATUSES = (200, 400, 401, 404, 405, 408, 413, 415, 429, 431, 500, 503)


def exactly(content: Any, kind: type) -> None:
    """`content` is a `kind`, and has nothing that `kind` does not name."""
    assert msgspec.to_builtins(msgspec.convert(content, kind)) == content


@pytest.fixture(scope="module")
def document(server: LiveServer) -> dict[str, Any]:
    found: dict[str, Any] = server.http.get("/openapi.json").json()
    return found


@pytest.mark.parametrize(("method", "path", "body", "kind"), ANSWERS)
def test_answers_are_of_the_declared_type_and_status(
    server: LiveServer, document: dict[str, Any], method: str, path: str, body: Any, kind: type
) -> None:
    response: httpx.Response = server.http.request(method, path, json=body)
    exactly(response.json(), kind)
    operations = document["paths"].get(path.replace(BUNDLED, "{name}"), {})
    # A method that a path does not have is declared by those that it has.
    operation = operations.get(method.lower()) or next(iter(operations.values()), None)
    if operation is None:
        assert response.status_code == 404
        return
    declared = operation["responses"][str(response.status_code)]
    assert kind.__name__ in declared["content"]["application/json"]["schema"]["$ref"]


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("/v1/chat/completions", {**CHAT, "logprobs": True}, responses.ChatCompletionChunk),
        ("/v1/completions", {**PROMPT, "logprobs": 1}, responses.CompletionChunk),
    ],
)
@pytest.mark.parametrize("usage", [True, False])
def test_events_of_a_stream_are_of_the_declared_type(
    server: LiveServer, document: dict[str, Any], path: str, body: Any, kind: type, usage: bool
) -> None:
    options = {"stream_options": {"include_usage": True}} if usage else {}
    with server.http.stream("POST", path, json={**body, "stream": True, **options}) as response:
        found = list(events(response))
    assert found.pop() == "[DONE]"
    for event in found:
        exactly(event, kind)
    content = document["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]
    assert kind.__name__ in str(content["schema"]["properties"]["data"])


def examples(document: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Path, name and value of each."""
    for path, operations in document["paths"].items():
        for operation in operations.values():
            for media in operation.get("requestBody", {}).get("content", {}).values():
                assert media["examples"], path
                yield from ((path, name, example["value"]) for name, example in media["examples"].items())


def test_examples_are_answered_as_declared(server: LiveServer, document: dict[str, Any]) -> None:
    found = list(examples(document))
    assert {path for path, _, _ in found} == {path for path, all_of in document["paths"].items() if "post" in all_of}
    for path, name, body in found:
        response = server.http.post(path, json=body)
        assert response.status_code == 200, (path, name, response.text)
        operation = document["paths"][path]["post"]
        jsonschema.validate(body, {**operation["requestBody"]["content"]["application/json"]["schema"], **document})
        if body.get("stream"):
            assert list(events(response))[-1] == "[DONE]"


def test_generation_declares_every_status_that_it_may_have(document: dict[str, Any]) -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        declared = document["paths"][path]["post"]["responses"]
        assert set(declared) == {str(status) for status in STATUSES}
        for status in ("429", "503"):
            assert "Retry-After" in declared[status]["headers"]
    assert "499" in document["info"]["description"]


def test_parameters_have_the_bounds_that_are_enforced(server: LiveServer, document: dict[str, Any]) -> None:
    fields = document["components"]["schemas"]["ChatRequest"]["properties"]
    bounds = next(kind for kind in fields["top_logprobs"]["anyOf"] if kind["type"] == "integer")
    assert (bounds["minimum"], bounds["maximum"]) == (0, 20)
    for value, status in ((20, 200), (21, 400)):
        body = {**CHAT, "logprobs": True, "top_logprobs": value}
        assert server.http.post("/v1/chat/completions", json=body).status_code == status
