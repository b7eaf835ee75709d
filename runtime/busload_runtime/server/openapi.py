"""`/openapi.json`: every route with every status it answers, from the types that the server decodes.

https://spec.openapis.org/oas/v3.1.1.html, whose schemas are JSON Schema 2020-12, as msgspec writes it.
"""

from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import Any

import msgspec

from busload_runtime.server import responses
from busload_runtime.server.deadline import HEADER, MAX_SECONDS
from busload_runtime.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    unsupported_words,
)

Json = dict[str, Any]

_ERRORS = {
    400: "The request can never work as it is; `error.param` names the parameter, where there is one at fault.",
    401: "API keys are configured, and the request carries none of them.",
    404: "There is no such model.",
    405: "The path has other methods; `Allow` names them.",
    408: "The body did not arrive in time, or a time limit passed before the first token.",
    413: "The body is larger than the longest prompt allowed could be.",
    429: "The queue is full; `Retry-After` says when to come again.",
    500: "The engine failed on this request.",
    503: "The model is loading, or this replica shuts down; `Retry-After` says when to come again.",
}
_RETRY_AFTER = (408, 429, 503)
_READING = (400, 401, 404, 405, 408, 413, 429, 500, 503)

_DESCRIPTION = """\
The OpenAI API for text, of one model. Each answer has `X-Request-Id`, and those that are not 2xx the body of `Error`.
What takes GET takes HEAD.

A client that leaves ends its request at once, queued or running. Nobody reads an answer then: 499 appears in the access
log alone. What goes wrong once a stream has begun ends it with an event that holds an `Error`, and without `[DONE]`.

Parameters that are not listed are ignored if they say who asks or what to do besides (`user`, `metadata`, `store`,
`prompt_cache_key`, ...) or hint at how to go about it (`service_tier`, `reasoning_effort`, `verbosity`). Those that ask
for another answer and are not supported are refused, unless they ask for nothing: {unsupported}.
"""


@dataclass(frozen=True, slots=True)
class Operation:
    """One route: what it takes and what it answers."""

    method: str
    path: str
    name: str
    summary: str
    answer: type | str
    """The type of a 200, or the media type of one that is no JSON."""
    body: type | None = None
    errors: tuple[int, ...] = ()
    event: type | None = None
    """The type of a stream's events, where a stream can be asked for."""


OPERATIONS = (
    Operation(
        "post", "/v1/chat/completions", "createChatCompletion", "Answers a conversation",
        responses.ChatCompletion, ChatRequest, _READING, responses.ChatCompletionChunk,
    ),
    Operation(
        "post", "/v1/completions", "createCompletion", "Continues prompts",
        responses.Completion, CompletionRequest, _READING, responses.CompletionChunk,
    ),
    Operation(
        "post", "/tokenize", "tokenize", "Token ids of a prompt or a conversation",
        responses.Tokenized, TokenizeRequest, _READING,
    ),
    Operation(
        "post", "/detokenize", "detokenize", "The text of token ids",
        responses.Detokenized, DetokenizeRequest, _READING,
    ),
    Operation("get", "/v1/models", "listModels", "The model, with its limits", responses.ModelList, None, (401, 405)),
    Operation("get", "/v1/models/{name}", "getModel", "One model", responses.Model, None, (401, 404, 405)),
    Operation("get", "/health", "health", "The same as /health/ready", responses.Health, None, (405,)),
    Operation("get", "/health/startup", "startup", "Whether a real token was produced", responses.Health, None, (405,)),
    Operation("get", "/health/ready", "ready", "Whether new requests are welcome", responses.Health, None, (405,)),
    Operation("get", "/health/live", "live", "Whether the engine makes progress", responses.Health, None, (405,)),
    Operation("get", "/metrics", "metrics", "Prometheus metrics", "text/plain", None, (405,)),
    Operation("get", "/openapi.json", "openapi", "This document", responses.Document, None, (401, 405)),
)  # fmt: skip


@cache
def document() -> bytes:
    """The OpenAPI document. Made when it is first asked for: no start should wait for it."""
    return msgspec.json.encode(_document())


def _document() -> Json:
    kinds: list[type] = [responses.Error, responses.Unhealthy]
    for operation in OPERATIONS:
        parts = (operation.answer, operation.body, operation.event)
        kinds += [kind for kind in parts if isinstance(kind, type) and kind not in kinds]
    references, schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    of = dict(zip(kinds, references, strict=True))
    paths: Json = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, of)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "busload",
            "version": version("busload"),
            "description": _DESCRIPTION.format(unsupported=unsupported_words()),
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "description": "Where keys are configured."}
            },
        },
    }


def _operation(operation: Operation, of: dict[type, Any]) -> Json:
    answer = operation.answer
    content = {answer: {"schema": {"type": "string"}}} if isinstance(answer, str) else _json(of[answer])
    if operation.event is not None:
        content["text/event-stream"] = {"schema": _event([of[operation.event], of[responses.Error]])}
    answers: Json = {"200": {"description": "As asked.", "content": content}}
    for status in operation.errors:
        answers[str(status)] = _error(status, of[responses.Error])
    if operation.answer is responses.Health:
        answers["503"] = {"description": "Not so; `reason` says why.", "content": _json(of[responses.Unhealthy])}
    found: Json = {"operationId": operation.name, "summary": operation.summary, "responses": answers}
    if operation.body is not None:
        found["requestBody"] = {"required": True, "content": _json(of[operation.body])}
    if "{name}" in operation.path:
        found["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    elif operation.event is not None:
        found["parameters"] = [_TIMEOUT]
    if 401 in operation.errors:
        found["security"] = [{}, {"key": []}]
    return found


_TIMEOUT: Json = {
    "name": HEADER,
    "in": "header",
    "description": "Seconds that the whole request may take; the server has limits of its own beside it.",
    "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_SECONDS},
}


def _event(kinds: list[Json]) -> Json:
    """The schema of one server-sent event, in the way of https://spec.openapis.org/oas/v3.2.0.html#server-sent-events;
    what 3.1 says nothing about."""
    content = {"contentMediaType": "application/json", "contentSchema": {"anyOf": kinds}}
    return {
        "type": "object",
        "description": "One of the server-sent events.",
        "required": ["data"],
        "properties": {"data": {"type": "string", "anyOf": [{"const": "[DONE]"}, content]}},
    }


def _error(status: int, schema: Json) -> Json:
    answer: Json = {"description": _ERRORS[status], "content": _json(schema)}
    if status in _RETRY_AFTER:
        seconds = {
            "description": "Seconds, where another try makes sense.",
            "schema": {"type": "integer", "minimum": 1},
        }
        answer["headers"] = {"Retry-After": seconds}
    return answer


def _json(schema: Any) -> Json:
    return {"application/json": {"schema": schema}}
