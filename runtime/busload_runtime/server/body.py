"""Reading the bodies of requests: bounded in size, in time, and in what all of them hold together."""

import asyncio
import math

from starlette.requests import ClientDisconnect, Request

from busload_runtime.server.admission import shutting_down
from busload_runtime.server.disconnect import ClientGoneError
from busload_runtime.server.errors import ApiError

# A body must arrive in this time. It takes no seat in the queue meanwhile, so a slow one keeps nobody out.
_BODY_SECONDS = 60.0
_HELD_BYTES = 32 << 20
_HELD_BODIES = 8
"""Bodies of the largest size allowed that have room in any case."""


class BodyReader:
    """Reads bodies. When those under way hold too much together, the one that began first goes: bodies that are sent at
    the usual pace have ended long before."""

    def __init__(self, held_bytes: int = _HELD_BYTES) -> None:
        """`held_bytes`: how much unfinished bodies may hold, at the least."""
        self._most = held_bytes
        self._seconds = _BODY_SECONDS
        self._hurried = False
        self._held = 0
        self._under_way: dict[asyncio.Timeout, int] = {}
        """Bytes of each, those that began first in front."""

    async def read(self, request: Request, limit: int, seconds: float = math.inf) -> bytes:
        """The body. Raises `ApiError`: 413 when it is larger than `limit` bytes, before anything of it is parsed; 408
        when it takes longer than `seconds`, or than any body may, or when its room is needed; 415 when it is
        compressed; 503 when it was hurried.
        """
        if (encoding := request.headers.get("content-encoding", "identity")).lower() != "identity":
            raise ApiError(
                415,
                f"the body has Content-Encoding {encoding[:40]!r}; this server reads none: send it uncompressed",
                code="unsupported_content_encoding",
                reason="invalid",
            )
        declared = request.headers.get("content-length", "")
        digits = declared.lstrip("0")  # any number of them is allowed, and Python reads 4300
        size = int(digits) if digits.isdecimal() else 0
        chunks: list[bytes] = []
        seconds = min(max(seconds, 0.0), self._seconds)
        timer = asyncio.timeout(seconds)
        try:
            async with timer:
                if size <= limit:
                    size = 0
                    self._under_way[timer] = 0
                    async for chunk in request.stream():
                        size += len(chunk)
                        if size > limit:
                            break
                        chunks.append(chunk)
                        self._hold(timer, len(chunk), limit)
        except TimeoutError:
            if self._hurried:
                raise shutting_down() from None
            why = f"within {seconds:.3g} s" if timer in self._under_way else "before its room was needed for others"
            raise ApiError(
                408, f"the body did not arrive {why}; send it again", code="body_timeout", reason="invalid"
            ) from None
        except ClientDisconnect:
            raise ClientGoneError from None
        finally:
            self._forget(timer)
        if size > limit:
            raise ApiError(
                413,
                f"the body is larger than {limit} bytes, which is ample for the longest prompt allowed; send fewer or "
                "shorter prompts per request",
                code="request_too_large",
                reason="invalid",
            )
        return b"".join(chunks)

    def hurry(self, seconds: float) -> None:
        """The server shuts down: bodies must arrive within this time, those under way as those that come."""
        self._hurried, self._seconds = True, seconds
        due = asyncio.get_running_loop().time() + seconds
        for timer in self._under_way:
            if not timer.expired():
                timer.reschedule(min(due, timer.when() or due))

    def _hold(self, timer: asyncio.Timeout, size: int, limit: int) -> None:
        if timer not in self._under_way:
            return  # its end is on its way
        self._under_way[timer] += size
        self._held += size
        while self._held > max(self._most, _HELD_BODIES * limit):
            first = next(iter(self._under_way))
            self._forget(first)
            if not first.expired():
                first.reschedule(0.0)

    def _forget(self, timer: asyncio.Timeout) -> None:
        self._held -= self._under_way.pop(timer, 0)
