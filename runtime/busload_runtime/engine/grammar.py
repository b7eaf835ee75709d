"""Constrained requests: their grammars are compiled beside the step loop and followed token by token between steps.

A state belongs to its request from admission to its end. It advances with each drawn token only, so that a preempted
request, which is computed again but draws nothing again, finds it where it was.
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from busload_runtime.engine.messages import GRAMMAR_ERROR
from busload_runtime.engine.plan import Plan
from busload_runtime.engine.request import Output, Request
from busload_runtime.grammar.errors import GrammarError

if TYPE_CHECKING:
    from busload_runtime.grammar.matcher import Matcher

Compile = Callable[[str], "Matcher"]
"""A grammar's text to its state before the first token. Raises `GrammarError`; called in a thread."""

KEPT = 16
"""Compiled grammars kept for the next request."""

_NICENESS = 10
"""Of the compiling thread: the threads that compute the step come first."""


class Grammars:
    """All constrained requests of an engine. One thread calls it, between steps."""

    def __init__(self, compile_grammar: Compile, wake: Callable[[], None] = lambda: None) -> None:
        """`wake` is called from another thread when `compiled` has something to return."""
        self._compile = compile_grammar
        self._wake = wake
        self._kept: OrderedDict[str, Matcher] = OrderedDict()
        self._waiting: dict[str, list[Request]] = {}
        self._done: SimpleQueue[tuple[str, Future[Matcher]]] = SimpleQueue()
        self._compiler = ThreadPoolExecutor(1, "grammar", initializer=_be_nice)
        self._states: dict[int, Matcher] = {}
        self._masks: dict[int, bytes] = {}

    @property
    def num_states(self) -> int:
        """Constrained requests that wait for a step or run."""
        return len(self._states)

    @property
    def num_waiting(self) -> int:
        """Grammars that are being compiled, or wait for it."""
        return len(self._waiting)

    def add(self, request: Request, text: str) -> bool:
        """Takes in a request; whether it can start now. If not, `compiled` returns it later. Raises `GrammarError`."""
        if (matcher := self._kept.get(text)) is not None:
            self._kept.move_to_end(text)
            self._begin(request, matcher)
            return True
        if text in self._waiting:
            self._waiting[text].append(request)
        else:
            self._waiting[text] = [request]
            future = self._compiler.submit(self._compile_beside, text)
            future.add_done_callback(lambda done: self._finished(text, done))
        return False

    def compiled(self) -> Iterable[tuple[Request, str | None]]:
        """Requests whose grammar was compiled since the last call, each with what is wrong with it, if anything."""
        while self._waiting:
            try:
                text, done = self._done.get_nowait()
            except Empty:
                return
            requests = self._waiting.pop(text)
            try:
                matcher = self._kept[text] = done.result()
                if len(self._kept) > KEPT:
                    self._kept.popitem(last=False)
            except GrammarError as error:
                yield from ((request, str(error)) for request in requests)
                continue
            for request in requests:
                try:
                    self._begin(request, matcher)
                except GrammarError as error:
                    yield request, str(error)
                else:
                    yield request, None

    def drop(self, request_id: int) -> None:
        """Forgets a request that was aborted, wherever it is."""
        if self._states.pop(request_id, None) is not None:
            del self._masks[request_id]
        for requests in self._waiting.values():
            requests[:] = [request for request in requests if request.request_id != request_id]

    def constrain(self, plan: Plan) -> Plan:
        """The plan with the masks of its constrained requests."""
        if not self._masks:
            return plan
        drawing = {chunk.request_id for chunk in plan.chunks if chunk.sampling is not None}
        return Plan(plan.chunks, {request_id: self._masks[request_id] for request_id in drawing & self._masks.keys()})

    def follow(self, outputs: list[Output]) -> tuple[list[Output], list[int]]:
        """What a step drew, with an end behind each text that is whole; and the requests that end although the
        scheduler would go on. Those the scheduler has ended are forgotten."""
        if not self._states:
            return outputs, []
        told: list[Output] = []
        ended: list[int] = []
        for output in outputs:
            told.append(output)
            request_id, reason = output.request_id, output.finish_reason
            if request_id not in self._states:
                continue
            end = self._advance(output) if output.token is not None and reason != "stop" else None
            if end is not None:
                told.append(end)
                output.finish_reason = None
                if reason is None:
                    ended.append(request_id)
            if end is not None or reason is not None:
                self.drop(request_id)
        return told, ended

    def _begin(self, request: Request, matcher: "Matcher") -> None:
        state = matcher.fork()
        self._masks[request.request_id] = state.mask()
        self._states[request.request_id] = state

    def _advance(self, output: Output) -> Output | None:
        """Takes in a drawn token; the end of the request, if that is its last."""
        request_id = output.request_id
        assert output.token is not None
        try:
            if self._states[request_id].advance(output.token):
                return Output(request_id, None, "stop")
            if output.finish_reason is None:
                self._masks[request_id] = self._states[request_id].mask()
        except GrammarError as error:
            if output.finish_reason is not None:
                return None
            return Output(request_id, None, "error", error=wrong_grammar(str(error)), error_code=GRAMMAR_ERROR)
        return None

    def _compile_beside(self, text: str) -> "Matcher":
        """Called by the compiling thread."""
        try:
            return self._compile(text)
        except GrammarError:
            raise
        except BaseException as error:  # a panic of the library is no Exception
            raise GrammarError(f"the library failed on it: {type(error).__name__}: {error}") from None

    def _finished(self, text: str, done: "Future[Matcher]") -> None:
        """Called by the compiling thread."""
        self._done.put((text, done))
        self._wake()


def wrong_grammar(what: str) -> str:
    return f"the answer cannot follow the grammar that was asked for: {what}; make the schema or pattern simpler"


def _be_nice() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
