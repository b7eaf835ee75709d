"""The HTTP process's end of the pipe to the checker process (`grammar.check`)."""

import asyncio
import contextlib
import hashlib
import signal
import sys
from collections import OrderedDict

from busload_runtime.grammar.frames import frame, length_of
from busload_runtime.grammar.limits import CPU_SECONDS, EXTRA_BYTES
from busload_runtime.server.errors import ApiError

# The checker's own limit is CPU time; this is for a machine that gives it none.
_WALL_SECONDS = 15.0
_MAX_WAITING = 32
_KEPT_VERDICTS = 512
_DIGEST_BYTES = 16


class GrammarChecker:
    """Says whether grammars can be compiled. One process for one server, started when first needed; one at a time."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()
        self._turn = asyncio.Lock()
        self._waiting = 0

    async def check(self, grammar: str) -> str:
        """What is wrong with a grammar, in one line; nothing if it is fine. Raises `ApiError` 429 when many wait, or
        when there was no verdict for a reason that says nothing against the grammar."""
        content = grammar.encode()
        digest = hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()
        if (verdict := self._known(digest)) is not None:
            return verdict
        if self._waiting >= _MAX_WAITING:
            raise _again(f"{self._waiting} other schemas wait to be checked")
        self._waiting += 1
        try:
            async with self._turn:
                verdict = self._known(digest)
                if verdict is None:
                    verdict = self._verdicts[digest] = await self._ask(content)
                    if len(self._verdicts) > _KEPT_VERDICTS:
                        self._verdicts.popitem(last=False)
                return verdict
        finally:
            self._waiting -= 1

    async def close(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    def _known(self, digest: bytes) -> str | None:
        verdict = self._verdicts.get(digest)
        if verdict is not None:
            self._verdicts.move_to_end(digest)
        return verdict

    async def _ask(self, content: bytes) -> str:
        process = await self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        answered = False
        try:
            async with asyncio.timeout(_WALL_SECONDS):
                process.stdin.write(frame(content))
                head = await process.stdout.readexactly(len(frame(b"")))
                verdict = (await process.stdout.readexactly(length_of(head))).decode()
                answered = True
                return verdict
        except TimeoutError:
            raise _again(f"the schema was not checked within {_WALL_SECONDS:g} s, since this machine is busy") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            code = await process.wait()
            if code == -signal.SIGKILL:  # its own limits end it otherwise
                raise _again("the schema's check was cut off from outside") from None
            return _why_it_died(code)
        finally:
            # Also if the client left while it worked: an answer that nobody reads would be taken for the next one's.
            if not answered:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                self._process = None

    async def _running(self) -> asyncio.subprocess.Process:
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "busload_runtime.grammar.check"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
            )
        return self._process


def _again(why: str) -> ApiError:
    return ApiError(
        429,
        f"{why}; send the request again in a moment",
        code="grammar_queue_full",
        reason="queue_full",
        retry_after=2,
    )


def _why_it_died(code: int) -> str:
    if code == -signal.SIGPROF:
        return f"it takes more than {CPU_SECONDS:g} s of CPU time to compile"
    return f"it takes more than {EXTRA_BYTES // 2**20} MiB to compile, or is nested too deeply"
