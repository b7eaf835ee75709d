"""`/openapi.json`: every route with every status it answers, from the types that the server decodes.

https://spec.openapis.org/oas/v3.1.1.html, whose schemas are JSON Schema 2020-12, as msgspec writes it.
"""

from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from typing import Any

import msgspec

from busload_runtime.server import responses
from busload_runtime.server.deadline import HEADER, MAX_SECONDS
from busload_runtime.server.errors import ErrorCode
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
    415: "The body is compressed; `Accept-Encoding` says what is taken.",
    429: "The queue is full; `Retry-After` says when to come again.",
    431: "The request's head is too large, or what is around the body in chunks.",
    500: "The engine failed on this request.",
    503: "The model is loading, or this replica shuts down; `Retry-After` says when to come again.",
}
_RETRY_AFTER = (408, 429, 503)
_ANYWHERE = (400, 405, 431)
"""What is no HTTP request, has another method, or has a head without end."""
_READING = (401, 404, 408, 413, 415, 429, 500, 503)

CODES: dict[ErrorCode, tuple[tuple[int, ...], str]] = {
    "invalid_http": ((400,), "not a request in HTTP/1.1"),
    "invalid_json": ((400,), "the body is no JSON"),
    "invalid_value": ((400,), "a parameter is out of range, of another type, or does not go with another one"),
    "missing_required_parameter": ((400,), "a parameter is not there"),
    "unsupported_parameter": ((400,), "a parameter asks for what this server or its model cannot do"),
    "invalid_grammar": ((400,), "a schema, pattern or tool cannot be followed; the message says why"),
    "context_length_exceeded": ((400,), "the prompt leaves no room for an answer"),
    "invalid_api_key": ((401,), "no key, or one that is not known"),
    "not_found": ((404,), "no such path"),
    "model_not_found": ((404,), "another model's name"),
    "unsupported_endpoint": ((404,), "a path of the OpenAI API that this server does not have"),
    "method_not_allowed": ((405,), "the path has other methods"),
    "body_timeout": ((408,), "the body did not arrive in time"),
    "deadline_exceeded": ((408,), "the queue or the whole took longer than allowed"),
    "stalled": ((408,), "no further token came for too long"),
    "request_too_large": ((413,), "the body is too large"),
    "unsupported_content_encoding": ((415,), "the body is compressed"),
    "queue_full": ((429,), "as many requests, tokens or seconds wait as may"),
    "tenant_limit": ((429,), "this tenant's share of the queue is full"),
    "grammar_queue_full": ((429,), "too many schemas are being checked, or there was no time to"),
    "request_head_too_large": ((431,), "the head is too large"),
    "engine_error": ((500, 503), "the engine failed; the server restarts"),
    "internal_error": ((500,), "the server failed on this request"),
    "loading": ((503,), "the model is loading"),
    "draining": ((503,), "this replica shuts down"),
    "engine_busy": ((503,), "the engine takes no requests at the moment"),
}
"""Every `error.code`: the statuses it comes with, and what it means."""

_DESCRIPTION = """\
The OpenAI API for text, of one model. Each answer has `X-Request-Id`, and those that are not 2xx the body of `Error`,
but for those of `/health`.
What takes GET takes HEAD.

A client that leaves ends its request at once, queued or running. Nobody reads an answer then: 499 appears in the access
log alone. What goes wrong once a stream has begun ends it with an event that holds an `Error`, and without `[DONE]`.

Parameters that are not listed are ignored if they say who asks or what to do besides (`user`, `metadata`, `store`,
`prompt_cache_key`, ...) or hint at how to go about it (`service_tier`, `reasoning_effort`, `verbosity`). Those that ask
for another answer and are not supported are refused, unless they ask for nothing: {unsupported}.

What `error.code` can be:
{codes}

An error event in a stream that has begun has `deadline_exceeded`, `stalled`, `invalid_grammar` or `engine_error`.
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
    examples: dict[str, Json] = field(default_factory=dict)
    """Bodies that are answered with 200 by any model that has a chat template."""


_CHAT_EXAMPLES: dict[str, Json] = {
    "Conversation": {
        "messages": [
            {"role": "system", "content": "Answer in one sentence."},
            {"role": "user", "content": "What does a bus carry?"},
        ],
        "max_completion_tokens": 24,
        "temperature": 0,
    },
    "Stream with token counts": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Count to three."}]}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_completion_tokens": 12,
    },
    "JSON by a schema": {
        "messages": [{"role": "user", "content": "Name a colour and its brightness."}],
        "response_format": {
            "type": "json_schema",
            "json_schema": {
                "name": "colour",
                "schema": {
                    "type": "object",
                    "properties": {"name": {"enum": ["red", "green", "blue"]}, "bright": {"type": "boolean"}},
                    "required": ["name", "bright"],
                    "additionalProperties": False,
                },
            },
        },
    },
    "Log-probabilities of two choices": {
        "messages": [{"role": "user", "content": "Say hello."}],
        "n": 2,
        "seed": 7,
        "logprobs": True,
        "top_logprobs": 2,
        "max_completion_tokens": 4,
    },
}
_COMPLETION_EXAMPLES: dict[str, Json] = {
    "Text": {"prompt": "A bus carries", "max_tokens": 8, "temperature": 0, "stop": ["\n\n", "."]},
    "Several prompts": {"prompt": ["One", "Two"], "max_tokens": 4, "n": 2, "seed": 7, "echo": True},
    "Token ids": {"prompt": [40, 41, 42], "max_tokens": 4, "logit_bias": {"43": -100}},
    "One of these": {"prompt": "Is a bus larger than a car?", "structured_outputs": {"choice": ["yes", "no"]}},
}
_TOKENIZE_EXAMPLES: dict[str, Json] = {
    "Text": {"prompt": "A bus carries", "return_token_strs": True},
    "Conversation": {"messages": [{"role": "user", "content": "Hello"}]},
}

OPERATIONS = (
    Operation(
        "post", "/v1/chat/completions", "createChatCompletion", "Answers a conversation",
        responses.ChatCompletion, ChatRequest, _READING, responses.ChatCompletionChunk, _CHAT_EXAMPLES,
    ),
    Operation(
        "post", "/v1/completions", "createCompletion", "Continues prompts",
        responses.Completion, CompletionRequest, _READING, responses.CompletionChunk, _COMPLETION_EXAMPLES,
    ),
    Operation(
        "post", "/tokenize", "tokenize", "Token ids of a prompt or a conversation",
        responses.Tokenized, TokenizeRequest, _READING, None, _TOKENIZE_EXAMPLES,
    ),
    Operation(
        "post", "/detokenize", "detokenize", "The text of token ids",
        responses.Detokenized, DetokenizeRequest, _READING, None, {"Token ids": {"tokens": [40, 41, 42]}},
    ),
    Operation("get", "/v1/models", "listModels", "The model, with its limits", responses.ModelList, None, (401,)),
    Operation("get", "/v1/models/{name}", "getModel", "One model", responses.Model, None, (401, 404)),
    Operation("get", "/health", "health", "The same as /health/ready", responses.Health),
    Operation("get", "/health/startup", "startup", "Whether a real token was produced", responses.Health),
    Operation("get", "/health/ready", "ready", "Whether new requests are welcome", responses.Health),
    Operation("get", "/health/live", "live", "Whether the engine makes progress", responses.Health),
    Operation("get", "/metrics", "metrics", "Prometheus metrics", "text/plain"),
    Operation("get", "/openapi.json", "openapi", "This document", responses.Document, None, (401,)),
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
            "description": _DESCRIPTION.format(unsupported=unsupported_words(), codes=_codes()),
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "description": "Where keys are configured."}
            },
        },
    }


def _codes() -> str:
    lines = (f"- `{code}` ({', '.join(map(str, statuses))}): {text}" for code, (statuses, text) in CODES.items())
    return "\n".join(lines)


def _operation(operation: Operation, of: dict[type, Any]) -> Json:
    answer = operation.answer
    content = {answer: {"schema": {"type": "string"}}} if isinstance(answer, str) else _json(of[answer])
    if operation.event is not None:
        content["text/event-stream"] = {"schema": _event([of[operation.event], of[responses.Error]])}
    answers: Json = {"200": {"description": "As asked.", "content": content}}
    for status in sorted({*operation.errors, *_ANYWHERE}):
        answers[str(status)] = _error(status, of[responses.Error])
    if operation.answer is responses.Health:
        answers["503"] = {"description": "Not so; `reason` says why.", "content": _json(of[responses.Unhealthy])}
    found: Json = {"operationId": operation.name, "summary": operation.summary, "responses": answers}
    if operation.body is not None:
        examples = {name: {"value": value} for name, value in operation.examples.items()}
        found["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": of[operation.body], "examples": examples}},
        }
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
