"""How long a request may take: in the queue, in all, and between two tokens.

Who waited in vain gets 408 before anything else was sent, and a stream that had begun an error event. Not 503:
gateways count that as a failing pod and take it out of service, which makes queues longer. Clients retry a 408 as they
do a 503, after `Retry-After`; only for one who set the time limit there is nobody left to retry for
(`x-should-retry: false`, which the OpenAI clients obey).
"""

import math
from dataclasses import dataclass

from busload_runtime.server.errors import ApiError, invalid

HEADER = "X-Request-Timeout"
MAX_SECONDS = 86_400.0


@dataclass(frozen=True, slots=True)
class Timeouts:
    """What every request gets, in seconds."""

    queue: float = 300.0
    """From arrival to the first token."""
    request: float = 3600.0
    """From arrival to the last token; a client may ask for less."""
    token: float = 120.0
    """From one token of a sequence to the next."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """The time limits of one request. All times in seconds, `arrival` on the clock of `time.monotonic`."""

    timeouts: Timeouts
    arrival: float
    asked: float | None = None
    """What the client set for the whole."""

    @property
    def whole(self) -> float:
        """Arrival to last token."""
        return self.timeouts.request if self.asked is None else min(self.asked, self.timeouts.request)

    @property
    def patience(self) -> float:
        """Arrival to first token."""
        return min(self.timeouts.queue, self.whole)

    def left(self, now: float) -> float:
        """Until there must be a first token."""
        return self.arrival + self.patience - now

    def due(self, waits: bool, oldest_token: float) -> float:
        """When it is over: for a request with a sequence that `waits` for its first token, and of whose other sequences
        the newest token of one is of `oldest_token` (infinite: there is none)."""
        over = self.arrival + (self.patience if waits else self.whole)
        return min(over, oldest_token + self.timeouts.token)

    def error(self, now: float, waits: bool, retry_after: int) -> ApiError:
        """Why it is over at `now`."""
        taken = now - self.arrival
        if taken >= self.whole:
            return self._over(f"the request was not finished after {self.whole:g} s", "whole", retry_after)
        if waits and taken >= self.patience:
            what = f"there was no first token after {self.patience:g} s: too much is waiting"
            return self._over(what, "queue", retry_after)
        what = f"there was no further token for {self.timeouts.token:g} s"
        return ApiError(408, f"{what}; send the request again", code="stalled", retry_after=retry_after)

    def _over(self, what: str, limit: str, retry_after: int) -> ApiError:
        own = self.asked is not None and (limit == "whole" or self.patience == self.asked)
        if own and self.asked == self.whole:
            advice = f"{HEADER} asked for no more"
            return ApiError(408, f"{what}, and {advice}", param=HEADER, code="deadline_exceeded", retry=False)
        advice = "ask for fewer tokens" if limit == "whole" else "send the request again a little later"
        return ApiError(408, f"{what}; {advice}", code="deadline_exceeded", retry_after=retry_after)


def deadline_of(header: str | None, arrival: float, timeouts: Timeouts) -> Deadline:
    """The deadline of a request with this value of `HEADER`. Raises `ApiError` 400."""
    if header is None:
        return Deadline(timeouts, arrival)
    try:
        seconds = float(header)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_SECONDS:  # NaN neither
        raise invalid(
            f"{HEADER} must be a number of seconds above 0 and up to {MAX_SECONDS:.0f}, got {header[:40]!r}", HEADER
        )
    return Deadline(timeouts, arrival, seconds)
