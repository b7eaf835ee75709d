"""The road both endpoints share: admit, read, check, tokenise, submit, and answer whole or as a stream."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from busload_runtime.engine.messages import Ready
from busload_runtime.server.access_log import MAX_PROMPT_CHARACTERS
from busload_runtime.server.constrain import CheckGrammar
from busload_runtime.server.deadline import HEADER, deadline_of
from busload_runtime.server.disconnect import ClientGoneError, until_disconnect
from busload_runtime.server.errors import ApiError
from busload_runtime.server.generation import Choice, Generation, Piece
from busload_runtime.server.logprobs import ScoredText, ScoredToken, joined, score_prompt
from busload_runtime.server.protocol import Sampled, decode_request
from busload_runtime.server.sampling import submits_of
from busload_runtime.server.service import Service
from busload_runtime.server.tenants import Tenant
from busload_runtime.server.text import TextStream
from busload_runtime.server.tokenise import Admit, PromptEncoder
from busload_runtime.server.tool_calls import CallsOfTools, ToolCallParser, add_calls, chunk_choices
from busload_runtime.server.trace import Trace

_CLIENT_CLOSED = 499  # the customary status for "nobody reads this"; only the log sees it

_encode = msgspec.json.Encoder().encode

Body = TypeVar("Body", bound=Sampled)
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Endpoint(Generic[Body]):
    """What differs between completions and chat."""

    body: type[Body]
    id_prefix: str
    object: str
    chunk_object: str
    tokenise: Callable[[Body, PromptEncoder, int, Admit], Coroutine[Any, Any, list[list[int]]]]
    """Token ids of each prompt; the number is the sequence limit. Raises `ApiError`."""
    constrain: Callable[[Body, PromptEncoder, CheckGrammar], Coroutine[Any, Any, str]]
    """The grammar of the answer, empty if it may be anything. Raises `ApiError`."""
    calls: Callable[[Body, PromptEncoder], CallsOfTools | None]
    """How calls of tools are read, if the answer may hold some. Raises `ApiError`."""
    lead: Callable[[Body, PromptEncoder, list[int]], str]
    """Text in front of a choice (echo)."""
    opening: Callable[[int], Json | None]
    """The choice object of the first chunk of a stream, if there is one before any text."""
    delta: Callable[[int, str, str | None, Json | None], Json]
    """The choice object of a chunk; the last value is what `logprobs` made."""
    whole: Callable[[int, str, str, Json | None], Json]
    """The choice object of an answer in one piece."""
    logprobs: Callable[[list[ScoredToken], int], Json]
    """The logprobs object of tokens that begin at this place of the choice's text. The bulk of it is JSON already: an
    answer in one piece keeps it until its end."""


async def answer(endpoint: Endpoint[Body], service: Service, request: Request) -> Response:
    """Answers one HTTP request. Raises `ApiError` for every refusal."""

    async def work() -> Response:
        return await _Call(endpoint, service, request, request.state.trace).run()

    return await told(service, request, work())


async def told(service: Service, request: Request, work: Awaitable[Response]) -> Response:
    """The response of `work`; why there is none goes to the access log, and a refusal is counted."""
    trace: Trace = request.state.trace
    try:
        return await work
    except ApiError as error:
        trace.reason = error.code
        if error.reason is not None:
            service.metrics.refused(error.reason)
        raise
    except ClientGoneError:
        trace.reason = "disconnected"
        return Response(status_code=_CLIENT_CLOSED)


class _Call(Generic[Body]):
    """One request on the road."""

    def __init__(self, endpoint: Endpoint[Body], service: Service, request: Request, trace: Trace) -> None:
        self.endpoint = endpoint
        self.service = service
        self.request = request
        self.trace = trace
        self.created = int(time.time())
        self.leads: list[str] = []
        self.scored_prompts: list[list[int]] = []
        """Of each choice, if the log-probabilities of prompts are wanted."""
        self.parsers: list[ToolCallParser] = []
        """One per choice if the answer may call tools."""
        self.deadline = deadline_of(request.headers.get(HEADER), trace.arrival, service.timeouts)
        self.generation = Generation(service.engine, service.admission, service.metrics, trace, self.deadline)

    async def run(self) -> Response:
        # A full queue refuses before the body is read, let alone tokenised.
        text, ready = self.service.loaded()
        self._admit(self.service.admission.check, 1)
        left = self.deadline.left(time.monotonic())
        content = await self.service.bodies.read(self.request, self.service.max_body_bytes, left)
        body = decode_request(content, self.endpoint.body)
        self.service.check_model(body.model)
        seats = body.num_choices()
        self._admit(self.service.admission.take, seats)
        streaming = False
        try:
            receive = self.request.receive
            prompts = await until_disconnect(receive, self._tokenise(body, text))
            grammar = await until_disconnect(receive, self.endpoint.constrain(body, text, self.service.grammars.check))
            self.generation.grammar_param = body.grammar_param()
            self._submit(body, prompts, text, ready, grammar)
            if not body.stream:
                return await until_disconnect(receive, self._whole(body))
            stream = _EventStream(await until_disconnect(receive, self._begin(body)), self._close)
            streaming = True
            return stream
        finally:
            if not self.generation.choices:
                self.service.admission.leave(seats, self.trace.tenant, waiting=seats)
            if not streaming:
                self._close()

    def _admit(self, check: Callable[[int, bool, Tenant, float], None], sequences: int) -> None:
        check(sequences, self.trace.promised, self.trace.tenant, self.deadline.patience)

    async def _tokenise(self, body: Body, text: PromptEncoder) -> list[list[int]]:
        def admit(prompt_tokens: int) -> None:
            self.service.admission.check_tokens((body.n or 1) * prompt_tokens, self.trace.tenant)

        return await self.endpoint.tokenise(body, text, self.service.limits.max_sequence_length, admit)

    def _submit(self, body: Body, prompts: list[list[int]], text: PromptEncoder, ready: Ready, grammar: str) -> None:
        submits = submits_of(
            body,
            prompts,
            self.service.limits,
            ready,
            text.model.tokenizer.eos_ids,
            self.service.engine,
            self.trace.tenant,
            grammar,
        )
        n = body.n or 1
        if body.scores_prompt():
            self.scored_prompts = [prompt for prompt in prompts for _ in range(n)]
        self.leads = [lead for prompt in prompts for lead in [self.endpoint.lead(body, text, prompt)] * n]
        self.trace.prompt_tokens = sum(map(len, prompts))
        if self.service.log_prompts:
            decode = text.model.tokenizer.decode
            self.trace.prompts = [decode(prompt[:MAX_PROMPT_CHARACTERS])[:MAX_PROMPT_CHARACTERS] for prompt in prompts]
        tokenizer, calls = text.model.tokenizer, self.endpoint.calls(body, text)
        stop, min_tokens = body.stop_strings(), body.min_tokens or 0
        token_bytes = tokenizer.token_bytes if calls is None else calls.token_bytes
        self.parsers = [] if calls is None else [calls.parser() for _ in submits]
        self.generation.submit(
            submits,
            lambda: TextStream(token_bytes, stop, min_tokens),
            None if body.num_logprobs() is None else lambda text: ScoredText(text, tokenizer),
            body.token_limit(),
        )

    async def _whole(self, body: Body) -> Response:
        texts = list(self.leads)
        reasons = [""] * len(texts)
        scored = body.num_logprobs() is not None
        logprobs = [[self.endpoint.logprobs([], 0)] if scored else [] for _ in texts]
        async for pieces in self.generation.pieces():
            for piece in pieces:
                i = piece.index
                if piece.tokens:
                    logprobs[i].append(self.endpoint.logprobs(piece.tokens, len(texts[i])))
                texts[i] += piece.text
                reasons[i] = piece.finish_reason or ""
        for i in range(len(self.scored_prompts)):
            logprobs[i].insert(0, await self._prompt_logprobs(i))
        choices = [self.endpoint.whole(i, texts[i], reasons[i], joined(logprobs[i]) or None) for i in range(len(texts))]
        for choice, parser in zip(choices, self.parsers, strict=False):
            add_calls(choice, parser)
        content = self._envelope(self.endpoint.object, choices) | {"usage": self._usage(body.n or 1)}
        return Response(_encode(content), media_type="application/json")

    async def _prompt_logprobs(self, index: int) -> Json:
        """The logprobs object of the prompt in front of a choice, once it has a token."""
        tokens, logprobs = self.scored_prompts[index], self.generation.choices[index].prompt_logprobs
        assert self.service.text is not None
        tokenizer = self.service.text.model.tokenizer

        def write() -> Json:
            return self.endpoint.logprobs(score_prompt(tokens, logprobs or [], tokenizer), 0)

        return await asyncio.to_thread(write)

    async def _begin(self, body: Body) -> AsyncIterator[bytes]:
        """Waits for the first pieces, so that what goes wrong before it is a status code and not half a stream."""
        pieces = self.generation.pieces()
        first = await anext(pieces)
        return self._events(body, first, pieces)

    async def _events(self, body: Body, first: list[Piece], pieces: AsyncIterator[list[Piece]]) -> AsyncIterator[bytes]:
        """Events of a stream; those that are there at the same time come joined, to be one write."""
        usage: Json = {"usage": None} if body.wants_usage() else {}

        def chunk(choice: Json) -> bytes:
            return _event(self._envelope(self.endpoint.chunk_object, [choice]) | usage)

        for index, lead in enumerate(self.leads):
            if (opening := self.endpoint.opening(index)) is not None:
                yield chunk(opening)
            if lead and not self.scored_prompts:
                yield chunk(self.endpoint.delta(index, lead, None, None))
        text_events = [
            _TextEvent(chunk(self.endpoint.delta(index, _TextEvent.PLACE, None, None)))
            for index in range(len(self.leads))
        ]
        lengths = [len(lead) for lead in self.leads]

        def full_event(piece: Piece) -> bytes:
            logprobs = self.endpoint.logprobs(piece.tokens, lengths[piece.index]) if piece.tokens else None
            lengths[piece.index] += len(piece.text)
            if self.parsers:
                parser = self.parsers[piece.index]
                choices = chunk_choices(piece.index, parser, piece.text, piece.finish_reason, logprobs)
                return b"".join(map(chunk, choices))
            return chunk(self.endpoint.delta(piece.index, piece.text, piece.finish_reason, logprobs))

        def events(pieces: list[Piece]) -> bytes:
            return b"".join(
                text_events[piece.index].of(piece.text)
                if piece.finish_reason is None and piece.tokens is None and not self.parsers
                else full_event(piece)
                for piece in pieces
            )

        scored_leads = set(range(len(self.scored_prompts)))

        async def with_leads(pieces: list[Piece]) -> bytes:
            """With a scored prompt in front of the first piece of its choice: before, it is not scored."""
            found = b""
            for index in sorted(scored_leads & {piece.index for piece in pieces if piece.error is None}):
                scored_leads.remove(index)
                found += chunk(self.endpoint.delta(index, self.leads[index], None, await self._prompt_logprobs(index)))
            return found + events(pieces)

        try:
            yield await with_leads(first)
            async for more in pieces:
                yield await with_leads(more) if scored_leads else events(more)
        except ApiError as error:
            self.trace.reason = error.code
            yield _event(error.body())
            return
        if body.wants_usage():
            yield _event(
                self._envelope(self.endpoint.chunk_object, []) | {"usage": self._usage(body.n or 1)},
            )
        yield b"data: [DONE]\n\n"

    def _close(self) -> None:
        self.generation.close()
        if self.generation.choices:
            self.trace.output_tokens = self.generation.output_tokens
            if self.trace.first_token_seconds is not None:
                self.trace.cached_tokens = sum(choice.cached_tokens for choice in self.generation.choices)
            if self.trace.reason is None:
                reasons = [choice.finish_reason or "" for choice in self.generation.choices]
                self.trace.reason = ",".join(dict.fromkeys(reasons))

    def _envelope(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": f"{self.endpoint.id_prefix}-{self.trace.id}",
            "object": kind,
            "created": self.created,
            "model": self.service.model_name,
            "choices": choices,
        }

    def _usage(self, n: int) -> Json:
        """Token counts. A prompt counts once however many choices it has; so do its cached tokens."""
        prompts: list[Choice] = self.generation.choices[::n]
        prompt_tokens = sum(choice.prompt_tokens for choice in prompts)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": self.generation.output_tokens,
            "total_tokens": prompt_tokens + self.generation.output_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(choice.cached_tokens for choice in prompts)},
        }


class _TextEvent:
    """The events of one choice that carry text, which differ in nothing but the text: encoded once, cut around it."""

    PLACE = secrets.token_hex(16)
    """Stands for the text in the event that is the pattern; random, so that no name a user chose can hold it."""

    def __init__(self, pattern: bytes) -> None:
        self._before, self._after = pattern.split(_encode(self.PLACE))

    def of(self, text: str) -> bytes:
        return b"%b%b%b" % (self._before, _encode_line(text), self._after)


class _EventStream(Response):
    """Server-sent events; `close` runs once the client has everything or has left."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._send(send))
        except ClientGoneError:
            scope["state"]["trace"].reason = "disconnected"
        finally:
            self._close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def _event(content: Json) -> bytes:
    return b"data: " + _encode_line(content) + b"\n\n"


def _encode_line(content: Json | str) -> bytes:
    """JSON for an event. Lines of events end at line feeds and carriage returns alone, which JSON escapes; clients that
    split them as Python's `str.splitlines` does (httpx's `iter_lines`) take three more characters for an end."""
    data = _encode(content)
    if b"\xe2\x80" in data or b"\xc2\x85" in data:
        for character in "\x85\u2028\u2029":
            data = data.replace(character.encode(), b"\\u%04x" % ord(character))
    return data
