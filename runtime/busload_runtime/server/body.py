"""Reading a request's body: bounded in size and in time."""

import asyncio
import math

from starlette.requests import ClientDisconnect, Request

from busload_runtime.server.disconnect import ClientGoneError
from busload_runtime.server.errors import ApiError

# A body must arrive in this time: its seat in the queue is taken meanwhile.
_BODY_SECONDS = 60.0


async def read_body(request: Request, limit: int, seconds: float = math.inf) -> bytes:
    """The body. Raises `ApiError`: 413 when it is too large, before anything of it is parsed; 408 when it
    takes longer than `seconds`, or than any body may."""
    declared = request.headers.get("content-length", "")
    size = int(declared) if declared.isdecimal() else 0
    chunks: list[bytes] = []
    seconds = min(max(seconds, 0.0), _BODY_SECONDS)
    try:
        async with asyncio.timeout(seconds):
            if size <= limit:
                size = 0
                async for chunk in request.stream():
                    size += len(chunk)
                    if size > limit:
                        break
                    chunks.append(chunk)
    except TimeoutError:
        raise ApiError(
            408, f"the body did not arrive within {seconds:.3g} s", code="body_timeout", reason="invalid"
        ) from None
    except ClientDisconnect:
        raise ClientGoneError from None
    if size > limit:
        raise ApiError(
            413,
            f"the body is larger than {limit} bytes, which is ample for the longest prompt allowed; send fewer or "
            "shorter prompts per request",
            code="request_too_large",
            reason="invalid",
        )
    return b"".join(chunks)
