"""One line on stderr that says how far a level is: rewritten on a terminal, appended now and then elsewhere."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TextIO

_TERMINAL_SECONDS = 0.5
_LOG_SECONDS = 10.0


@asynccontextmanager
async def shown(line: Callable[[], str], stream: TextIO | None = None) -> AsyncIterator[None]:
    """Shows `line()` while the block runs. What runs for less than 10 s leaves no line in a log."""
    out = stream or sys.stderr
    terminal = out.isatty()

    async def show() -> None:
        while True:
            await asyncio.sleep(_TERMINAL_SECONDS if terminal else _LOG_SECONDS)
            print(f"\r\x1b[K{line()}" if terminal else line(), end="" if terminal else "\n", file=out, flush=True)

    task = asyncio.create_task(show())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        if terminal:
            print("\r\x1b[K", end="", file=out, flush=True)
