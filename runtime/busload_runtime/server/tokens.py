"""`POST /tokenize` and `POST /detokenize`, in the shapes of vLLM: what a prompt becomes, without computing it."""

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from busload_runtime.server.answer import told
from busload_runtime.server.chat import plain_messages
from busload_runtime.server.disconnect import until_disconnect
from busload_runtime.server.errors import ApiError, invalid
from busload_runtime.server.protocol import DetokenizeRequest, TokenizeRequest, decode_body
from busload_runtime.server.service import Service
from busload_runtime.server.tokenise import PromptEncoder
from busload_runtime.server.tools import rendered_tools

_AT_ONCE = 64
"""Calls that are worked on at a time: none of them takes a seat in the engine's queue."""

Body = TypeVar("Body", TokenizeRequest, DetokenizeRequest)
Json = dict[str, Any]


class TokenRoutes:
    """Both calls, and how many of them are under way."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._busy = 0

    async def tokenize(self, request: Request) -> Response:
        return await told(self._service, request, self._answer(request, TokenizeRequest, self._tokens))

    async def detokenize(self, request: Request) -> Response:
        return await told(self._service, request, self._answer(request, DetokenizeRequest, self._text))

    async def _answer(
        self, request: Request, kind: type[Body], work: Callable[[Body, PromptEncoder], Coroutine[Any, Any, Json]]
    ) -> Response:
        text, _ = self._service.loaded()
        content = await self._service.bodies.read(request, self._service.max_body_bytes)
        if self._busy >= _AT_ONCE:
            raise ApiError(
                429,
                f"{_AT_ONCE} calls of /tokenize and /detokenize are under way, which is the most at a time",
                code="queue_full",
                reason="queue_full",
                retry_after=1,
            )
        self._busy += 1
        try:
            body = decode_body(content, kind)
            self._service.check_model(body.model)
            answer = await until_disconnect(request.receive, work(body, text))
            return Response(msgspec.json.encode(answer), media_type="application/json")
        finally:
            self._busy -= 1

    async def _tokens(self, body: TokenizeRequest, text: PromptEncoder) -> Json:
        limit = self._service.limits.max_sequence_length
        if (body.prompt is None) == (body.messages is None):
            raise invalid("give either prompt or messages", "prompt")
        if body.messages is not None:
            with_prompt = body.add_generation_prompt is not False
            messages, tools = plain_messages(body.messages, text.model), rendered_tools(body, text.model)
            ids = await text.encode_chat(messages, limit, with_prompt, tools)
        else:
            ids = await text.encode_any(body.prompt or "", limit, bos=body.add_special_tokens is not False)
        names = await text.written(ids) if body.return_token_strs else None
        return {"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": names}

    async def _text(self, body: DetokenizeRequest, text: PromptEncoder) -> Json:
        return {"prompt": await text.decode(body.tokens)}
