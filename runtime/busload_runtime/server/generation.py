"""The sequences of one HTTP request on their way through the engine: submit, tokens to text, measure, abort."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from busload_runtime.engine.messages import GRAMMAR_ERROR, Submit, TokenOut
from busload_runtime.engine.plan import Logprobs
from busload_runtime.server.admission import Admission
from busload_runtime.server.deadline import Deadline
from busload_runtime.server.engine_client import EngineClient
from busload_runtime.server.errors import ApiError, invalid
from busload_runtime.server.logprobs import ScoredText, ScoredToken
from busload_runtime.server.metrics import Metrics
from busload_runtime.server.text import TextStream
from busload_runtime.server.trace import Trace

PIECES_AT_ONCE = 256


class Piece(msgspec.Struct, frozen=True, gc=False):
    """News of one choice: text (maybe none), and with the last piece why it ended."""

    index: int
    text: str
    finish_reason: str | None = None
    error: str | None = None
    error_code: str | None = None
    tokens: list[ScoredToken] | None = None
    """What the text is made of, if log-probabilities were asked for."""


@dataclass(slots=True)
class Choice:
    """One sequence: its way from submission to its last token."""

    index: int
    request_id: int
    prompt_tokens: int
    text: TextStream
    submitted_at: float
    scored: ScoredText | None = None
    """Reads `text` for a request that asks for log-probabilities."""
    cut_after: int | None = None
    """Output tokens after which the sequence limit ends it although its client allowed more; None: it never does."""
    waits: bool = True
    finish_reason: str | None = None
    output_tokens: int = 0
    cached_tokens: int = 0
    prompt_logprobs: list[Logprobs] | None = None
    """Of the prompt from its second token on; there from the first token of the output on, if asked for."""
    first_token_at: float = 0.0
    last_token_at: float = 0.0


@dataclass(slots=True)
class Generation:
    """All choices of one HTTP request. The owner iterates it once and calls `close` in every case.

    Expects a seat taken for each choice; from `submit` on the seats are its own, given back as each choice ends.
    """

    engine: EngineClient
    admission: Admission
    metrics: Metrics
    trace: Trace
    deadline: Deadline
    grammar_param: str | None = None
    """The parameter that says what the answers must be, if one does."""
    choices: list[Choice] = field(default_factory=list)
    _pieces: list[Piece] = field(default_factory=list)
    _news: asyncio.Event = field(default_factory=asyncio.Event)
    _timer: asyncio.TimerHandle | None = None
    _expired: ApiError | None = None

    def submit(
        self,
        submits: Sequence[Submit],
        text: Callable[[], TextStream],
        scored: Callable[[TextStream], ScoredText] | None = None,
        allowed: int | None = None,
    ) -> None:
        """Sends the sequences to the engine, in the order of the choices. Raises `ApiError` 429 or 500.

        `allowed`: output tokens that the client allows each of them; None: any number.
        """
        self.admission.queue_tokens(sum(len(submit.tokens) for submit in submits), self.trace.tenant)
        now = time.monotonic()
        self.choices = [
            Choice(
                index,
                submit.request_id,
                len(submit.tokens),
                text(),
                submitted_at=now,
                cut_after=submit.max_tokens if allowed is None or allowed > submit.max_tokens else None,
            )
            for index, submit in enumerate(submits)
        ]
        # All count before the first is sent: if that fails, `close` counts each as finished.
        for choice in self.choices:
            if scored is not None:
                choice.scored = scored(choice.text)
            self.metrics.arrived.inc()
            self.metrics.prompt_tokens_arrived.inc(choice.prompt_tokens)
            self.metrics.prompt_length.observe(choice.prompt_tokens)
        for choice, submit in zip(self.choices, submits, strict=True):
            self.engine.submit(submit, partial(self._on_token, choice))
        self._watch()

    async def pieces(self) -> AsyncIterator[list[Piece]]:
        """Pieces of all choices as they come, those that wait already together (but not all of thousands, whose events
        would be in memory at once), until each choice has ended.

        Raises `ApiError` when the engine failed one or time is over, behind the pieces that came before.
        """
        open_choices = len(self.choices)
        while open_choices:
            await self._news.wait()
            self._news.clear()
            waiting, self._pieces = self._pieces, []
            for start in range(0, len(waiting), PIECES_AT_ONCE):
                pieces = waiting[start : start + PIECES_AT_ONCE]
                failed = next((position for position, piece in enumerate(pieces) if piece.error is not None), None)
                if failed is None:
                    open_choices -= sum(1 for piece in pieces if piece.finish_reason is not None)
                    yield pieces
                else:
                    if failed:
                        yield pieces[:failed]
                    raise self._failure(pieces[failed])

    def close(self) -> None:
        """Aborts what has not ended."""
        if self._timer is not None:
            self._timer.cancel()
        for choice in self._open():
            self.engine.abort(choice.request_id)
            self._end(choice, "abort")

    @property
    def output_tokens(self) -> int:
        return sum(choice.output_tokens for choice in self.choices)

    def _open(self) -> list[Choice]:
        return [choice for choice in self.choices if choice.finish_reason is None]

    def _watch(self) -> None:
        """Looks at the clock when the time may be over, which tokens that came meanwhile put off."""
        choices = self._open()
        if not choices:
            return
        now = time.monotonic()
        waits = any(choice.waits for choice in choices)
        oldest = min((choice.last_token_at for choice in choices if not choice.waits), default=math.inf)
        due = self.deadline.due(waits, oldest)
        if due > now:
            self._timer = asyncio.get_running_loop().call_later(due - now, self._watch)
            return
        self._expired = self.deadline.error(now, waits, self.admission.retry_after(self.trace.tenant))
        for choice in choices:
            self.engine.abort(choice.request_id)
            self._end(choice, "timeout")
            self._tell(Piece(choice.index, "", "error", self._expired.message))

    def _failure(self, piece: Piece) -> ApiError:
        """An engine that lives and gave no token has refused: the limits changed while the request was on its way."""
        assert piece.error is not None
        if self._expired is not None:
            return self._expired
        if piece.error_code == GRAMMAR_ERROR:
            return invalid(piece.error, self.grammar_param, "invalid_grammar")
        if self.engine.alive and not self.output_tokens:
            return ApiError(400, piece.error, code="context_length_exceeded")
        return ApiError(500, piece.error, code="engine_error")

    def _on_token(self, choice: Choice, out: TokenOut) -> None:
        """Runs for every token, at once: latency is measured here and a stop string frees the seat without delay."""
        text, tokens = "", None
        if out.token is not None:
            self._measure(choice, out)
            choice.output_tokens += 1
            if out.finish_reason != "stop":  # the token that ends a sequence is not part of its text
                if choice.scored is None:
                    text = choice.text.push(out.token)
                else:
                    assert out.logprobs is not None
                    text, tokens = choice.scored.push(out.token, out.logprobs)
        if choice.text.stopped:
            self.engine.abort(choice.request_id)
            reason = "stop"
        elif out.finish_reason is None:
            if text:
                self._tell(Piece(choice.index, text, tokens=tokens))
            return
        else:
            reason = out.finish_reason
            if choice.scored is None:
                text += choice.text.finish()
            else:
                rest, more = choice.scored.finish()
                text, tokens = text + rest, [*(tokens or ()), *more]
        self._end(choice, reason)
        error = (out.error or "the engine failed on this request") if reason == "error" else None
        self._tell(Piece(choice.index, text, reason, error, out.error_code, tokens))

    def _tell(self, piece: Piece) -> None:
        self._pieces.append(piece)
        self._news.set()

    def _measure(self, choice: Choice, out: TokenOut) -> None:
        now = time.monotonic()
        if choice.output_tokens == 0:
            self._no_longer_waits(choice)
            choice.cached_tokens = out.cached_tokens
            choice.prompt_logprobs = out.prompt_logprobs
            first = now - self.trace.arrival
            waited = choice.submitted_at - self.trace.arrival + out.queue_seconds
            self.metrics.queue_wait.observe(waited)
            self.metrics.time_to_first_token.observe(first)
            self.metrics.judge("time_to_first_token", first)
            choice.first_token_at = now
            if self.trace.first_token_seconds is None:
                self.trace.first_token_seconds = first
                self.trace.queue_seconds = waited
        else:
            self.metrics.inter_token_latency.observe(now - choice.last_token_at)
        choice.last_token_at = now

    def _no_longer_waits(self, choice: Choice) -> None:
        if choice.waits:
            choice.waits = False
            self.admission.unqueue(choice.prompt_tokens, self.trace.tenant)

    def _end(self, choice: Choice, reason: str) -> None:
        choice.finish_reason = reason
        self._no_longer_waits(choice)
        self.admission.leave(tenant=self.trace.tenant)
        if reason in ("stop", "length"):
            self.admission.rate.finished(choice.prompt_tokens, choice.output_tokens)
        self.metrics.finished(reason)
        self._measure_finished(choice)

    def _measure_finished(self, choice: Choice) -> None:
        metrics, prompt, output = self.metrics, choice.prompt_tokens, choice.output_tokens
        metrics.output_length.observe(output)
        metrics.served(self.trace.tenant.label, prompt + output)
        metrics.sequence_length.observe(prompt + output)
        if choice.finish_reason == "length" and choice.cut_after is not None and output >= choice.cut_after:
            metrics.answers_cut.inc()
        metrics.finished_prompt_tokens.inc(prompt)
        metrics.finished_kv_token_steps.inc(output * (prompt + output / 2))
        if output > 1:
            metrics.judge("inter_token_latency", (choice.last_token_at - choice.first_token_at) / (output - 1))
        elif output == 0 and metrics.pace.time_to_first_token is not None:
            waited = time.monotonic() - self.trace.arrival
            # Who left or failed before it was late has seen no miss, and would not have waited for a first token.
            if waited > metrics.pace.time_to_first_token:
                metrics.judge("time_to_first_token", waited)
