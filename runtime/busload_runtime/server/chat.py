"""`POST /v1/chat/completions`."""

from typing import Any

import msgspec

from busload_runtime.model.text import TextModel
from busload_runtime.server.answer import Endpoint, Json
from busload_runtime.server.constrain import CheckGrammar, grammar_of
from busload_runtime.server.errors import invalid
from busload_runtime.server.logprobs import ScoredToken
from busload_runtime.server.protocol import ChatRequest, Message
from busload_runtime.server.sampling import check_length
from busload_runtime.server.tokenise import Admit, PromptEncoder
from busload_runtime.server.tools import calls_of, chat_grammar, rendered_calls, rendered_tools

_ROLES = ("system", "developer", "user", "assistant", "tool")


async def _tokenise(body: ChatRequest, text: PromptEncoder, limit: int, admit: Admit) -> list[list[int]]:
    tools = rendered_tools(body, text.model)
    ids = await text.encode_chat(plain_messages(body.messages, text.model), limit, tools=tools, admit=admit)
    check_length(len(ids), limit, "messages")
    return [ids]


async def _constrain(body: ChatRequest, text: PromptEncoder, check: CheckGrammar) -> str:
    calls = await chat_grammar(body, text.model, check)
    return await grammar_of(body, check) if calls is None else calls


def plain_messages(messages: list[Message], model: TextModel) -> list[dict[str, Any]]:
    """Messages as chat templates take them. Raises `ApiError` 400 for what no template of ours reads."""
    return [_plain(message, model, i) for i, message in enumerate(messages)]


def _plain(message: Message, model: TextModel, position: int) -> dict[str, Any]:
    """The message with its content as one string, which every chat template understands."""
    param, content = f"messages[{position}]", message.content
    if message.role not in _ROLES and message.role not in model.chat.words:
        raise invalid(
            f"{param}.role {message.role!r} is none that this model knows; give one of {', '.join(_ROLES)}",
            f"{param}.role",
        )
    if content is None and message.role != "assistant":
        raise invalid(f"{param}.content is required of a message of role {message.role!r}", f"{param}.content")
    if isinstance(content, list):
        for i, part in enumerate(content):
            place = f"{param}.content[{i}]"
            if part.type == "text" and part.text is None:
                raise invalid(f"{place} is a text part without text; give text or leave it out", f"{place}.text")
            if part.type != "text":
                raise invalid(f"{place} has type {part.type[:40]!r}; this model reads only text parts", place)
        content = "".join(part.text or "" for part in content)
    # "developer" is the newer name of the system role; templates know the older one.
    role = "system" if message.role == "developer" else message.role
    return {"role": role, "content": content or "", **rendered_calls(message, model, param)}


def _opening(index: int) -> Json:
    return {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}


def _delta(index: int, text: str, finish_reason: str | None, logprobs: Json | None) -> Json:
    delta = {"content": text} if text or finish_reason is None else {}
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def _whole(index: int, text: str, finish_reason: str, logprobs: Json | None) -> Json:
    message: Json = {"role": "assistant", "content": text, "refusal": None, "annotations": []}
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": finish_reason}


def _logprobs(tokens: list[ScoredToken], offset: int) -> Json:
    content = [{**_token(token), "top_logprobs": [_token(other) for other in token.top]} for token in tokens]
    return {"content": [msgspec.Raw(msgspec.json.encode(entry)) for entry in content], "refusal": None}


def _token(token: ScoredToken) -> Json:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.data)}


CHAT = Endpoint(
    body=ChatRequest,
    id_prefix="chatcmpl",
    object="chat.completion",
    chunk_object="chat.completion.chunk",
    tokenise=_tokenise,
    constrain=_constrain,
    calls=lambda body, text: calls_of(body, text.model),
    lead=lambda body, text, prompt: "",
    opening=_opening,
    delta=_delta,
    whole=_whole,
    logprobs=_logprobs,
)
