"""What the API answers, as types: `openapi.py` publishes them, and the contract tests hold each answer against them.

The routes build their answers as plain dictionaries, because a stream does so for every token.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from busload_runtime.server.errors import ErrorCode

_Count = Annotated[int, Meta(ge=0)]
_Logprob = Annotated[float, Meta(le=0)]
FinishReason = Literal["stop", "length"]
ChatFinishReason = Literal["stop", "length", "tool_calls"]


class ErrorDetail(msgspec.Struct):
    message: str
    type: Literal["invalid_request_error", "rate_limit_error", "timeout_error", "server_error"]
    param: str | None
    """The parameter at fault, as a path such as `stop[1]`."""
    code: ErrorCode


class Error(msgspec.Struct):
    """Every answer that is not 2xx, and the last event of a stream that failed."""

    error: ErrorDetail


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: _Count


class Usage(msgspec.Struct):
    prompt_tokens: _Count
    completion_tokens: _Count
    total_tokens: _Count
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[_Logprob | None]
    """Null of the first token of a prompt (`echo`), which nothing predicts."""
    top_logprobs: list[dict[str, _Logprob] | None]
    text_offset: list[_Count]


class CompletionChoice(msgspec.Struct):
    index: _Count
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason


class CompletionChunkChoice(msgspec.Struct):
    index: _Count
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class Completion(msgspec.Struct):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunk(msgspec.Struct):
    """One event of a stream. `choices` is empty in the last one if usage was asked for."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    """There if `stream_options.include_usage` is; null but in the last event."""


class ChatToken(msgspec.Struct):
    token: str
    logprob: _Logprob
    bytes: list[Annotated[int, Meta(ge=0, le=255)]]


class DrawnChatToken(msgspec.Struct):
    token: str
    logprob: _Logprob
    bytes: list[Annotated[int, Meta(ge=0, le=255)]]
    top_logprobs: list[ChatToken]


class ChatLogprobs(msgspec.Struct):
    content: list[DrawnChatToken]
    refusal: None


class CalledFunction(msgspec.Struct):
    name: str
    arguments: str
    """JSON; cut if the answer is."""


class ToolCall(msgspec.Struct):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(msgspec.Struct):
    role: Literal["assistant"]
    content: str | None
    """Null if the answer is nothing but calls."""
    refusal: None
    annotations: list[Any]
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct):
    index: _Count
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason


class ChatCompletion(msgspec.Struct):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class CalledFunctionDelta(msgspec.Struct):
    arguments: str
    """What follows the arguments so far."""
    name: str | msgspec.UnsetType = msgspec.UNSET


class ToolCallDelta(msgspec.Struct):
    """The first one of a call has its id and name, the next ones pieces of its arguments."""

    index: _Count
    function: CalledFunctionDelta
    id: str | msgspec.UnsetType = msgspec.UNSET
    type: Literal["function"] | msgspec.UnsetType = msgspec.UNSET


class ChatDelta(msgspec.Struct):
    role: Literal["assistant"] | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType | None = msgspec.UNSET
    tool_calls: list[ToolCallDelta] | msgspec.UnsetType = msgspec.UNSET


class ChatChunkChoice(msgspec.Struct):
    index: _Count
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None


class ChatCompletionChunk(msgspec.Struct):
    """One event of a stream. `choices` is empty in the last one if usage was asked for."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    """There if `stream_options.include_usage` is; null but in the last event."""


class Model(msgspec.Struct):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: _Count
    """Tokens of prompt and output together, now: the limit is tuned while the service runs."""


class ModelList(msgspec.Struct):
    object: Literal["list"]
    data: list[Model]


class Tokenized(msgspec.Struct):
    count: _Count
    max_model_len: _Count
    tokens: list[_Count]
    token_strs: list[str] | None


class Detokenized(msgspec.Struct):
    prompt: str


class Health(msgspec.Struct):
    status: Literal["ok"]


class Unhealthy(msgspec.Struct):
    status: Literal["unavailable"]
    reason: str


class Document(msgspec.Struct):
    """This document."""

    openapi: str
    info: dict[str, Any]
    paths: dict[str, Any]
    components: dict[str, Any]
