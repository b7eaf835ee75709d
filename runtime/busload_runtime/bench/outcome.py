"""What was measured: one `Outcome` per request, one `Level` per concurrency or rate, and both as JSON."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

# Kinds of failure. The first four are answers of the server, the others are what the connection did.
REFUSED = "refused"
"""429: the server's queue is full."""
CLIENT_ERROR = "4xx"
SERVER_ERROR = "5xx"
BAD_ANSWER = "bad answer"
"""An error event, or an answer that cannot be read."""
CUT = "cut"
"""The stream ended before `[DONE]`."""
TIMEOUT = "timeout"
CONNECTION = "connection"
"""No connection, or lost before an answer began."""
KINDS = (REFUSED, CLIENT_ERROR, SERVER_ERROR, BAD_ANSWER, CUT, TIMEOUT, CONNECTION)


@dataclass(slots=True)
class Outcome:
    """One request. All times are seconds since its level began."""

    intended: float
    """When it should have been sent; latencies count from here, so that no wait inside the client hides."""
    sent: float = 0.0
    """When it was sent (with retries: the first time)."""
    end: float = 0.0
    chunks: list[float] = field(default_factory=list)
    """Arrival of each chunk of output; almost always one token each."""
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that the server says it had cached."""
    from_usage: bool = False
    """Token counts are the server's `usage`; otherwise output tokens are chunks and input tokens what was asked for."""
    status: int = 0
    retries: int = 0
    interrupted: bool = False
    """The client gave up because the measurement was ended; no failure of the server."""
    kind: str | None = None
    """One of `KINDS` when it failed."""
    error: str | None = None

    @property
    def ok(self) -> bool:
        return self.kind is None and not self.interrupted

    @property
    def time_to_first_token(self) -> float | None:
        return self.chunks[0] - self.intended if self.chunks else None

    @property
    def time_per_output_token(self) -> float | None:
        """Mean time between output tokens behind the first; None with fewer than two tokens."""
        return (self.chunks[-1] - self.chunks[0]) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def gaps(self) -> list[float]:
        """Times between neighbouring chunks."""
        return [b - a for a, b in pairwise(self.chunks)]

    @property
    def tokens_per_chunk(self) -> float:
        return self.output_tokens / len(self.chunks) if self.chunks else 0.0

    def fail(self, kind: str, error: str) -> None:
        self.kind, self.error = kind, error

    def to_json(self) -> dict[str, Any]:
        """Microseconds are enough, and half as long as all digits."""
        return {
            name: round(value, 6) if isinstance(value, float) else value
            for name, value in ((name, getattr(self, name)) for name in self.__slots__ if name != "chunks")
        } | {"chunks": [round(at, 6) for at in self.chunks]}


@dataclass(frozen=True)
class Level:
    """All requests of one concurrency, one rate or one trace."""

    name: str
    """For people, as `concurrency 8`."""
    began: float
    """Wall clock (`time.time`) at time 0 of the outcomes."""
    outcomes: list[Outcome]
    concurrency: int | None = None
    """Closed loop: clients that each send their next request when the last one ended."""
    rate: float | None = None
    """Open loop: intended requests per second."""
    client_cpu: float = 0.0
    """CPU seconds this client used per second: near 1 it measures itself."""

    @property
    def errors(self) -> list[str]:
        return [outcome.error or "" for outcome in self.outcomes if outcome.kind is not None]

    @property
    def output_tokens(self) -> int:
        return sum(outcome.output_tokens for outcome in self.outcomes)

    @property
    def seconds(self) -> float:
        """From the first request sent to the end of the last one."""
        ends = [outcome.end for outcome in self.outcomes]
        return max(ends) - min(outcome.intended for outcome in self.outcomes) if ends else 0.0

    def tokens_between(self, start: float, end: float) -> float:
        """Output tokens that arrived from `start` to before `end`, seconds since the level began.

        A chunk counts as its request's mean tokens per chunk.
        """
        return sum(
            sum(1 for at in outcome.chunks if start <= at < end) * outcome.tokens_per_chunk for outcome in self.outcomes
        )

    def rate_between(self, start: float, end: float) -> float:
        """Output tokens per second that arrived between two times of the wall clock (`time.time`)."""
        return self.tokens_between(start - self.began, end - self.began) / max(end - start, 1e-9)


def levels_from_json(document: dict[str, Any]) -> list[Level]:
    """The levels of a document written by `busload bench --json --records`.

    Raises ValueError for a document without records: what is gone cannot be measured again.
    """
    levels = []
    for level in document["levels"]:
        if "requests" not in level:
            raise ValueError("the document has no requests; write it with `busload bench --json FILE --records`")
        outcomes = outcomes_from_json(level["requests"])
        levels.append(
            Level(level["name"], level["began"], outcomes, level["concurrency"], level["rate"], level["client_cpu"])
        )
    return levels


def outcomes_from_json(records: Iterable[dict[str, Any]]) -> list[Outcome]:
    return [Outcome(**record) for record in records]
