"""The engine as a child process: how it is started, and how it ends."""

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

from busload_runtime.contract import Limits, Pace
from busload_runtime.server.options import ServeOptions

# What may reach the whole process group. The engine ignores them, but not before it runs.
_OURS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class EngineProcess:
    """Runs from the start on. It ends when `socket` is closed, when this process dies, or by `kill`."""

    def __init__(self, options: ServeOptions, limits: Limits, pace: Pace) -> None:
        """Call it in the main thread: the engine ends with the thread that started it."""
        self.socket, theirs = socket.socketpair()
        """This process's end of the wire."""
        with theirs, _blocked(_OURS):
            self._child = subprocess.Popen(
                _command(options, limits, pace, theirs.fileno()),
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
            )
        self._ended: asyncio.Future[int] | None = None

    @property
    def pid(self) -> int:
        return self._child.pid

    async def wait(self) -> int:
        """Its exit code, once it has ended; minus the signal's number if one ended it."""
        if self._ended is None:
            self._ended = _in_thread(self._child.wait)
        return await asyncio.shield(self._ended)

    def kill(self) -> None:
        """Ends it at once, if it still runs, and waits for that."""
        self.socket.close()
        self._child.kill()
        self._child.wait()


def _command(options: ServeOptions, limits: Limits, pace: Pace, descriptor: int) -> list[str]:
    command = [sys.executable, "-P", "-m", "busload_runtime.engine.process", "--socket", str(descriptor)]
    command += ["--model", options.model, "--executor", options.executor]
    command += ["--limits", json.dumps(limits.to_json()), "--pace", json.dumps(pace.to_json())]
    if options.limits_file is None:
        command += ["--plan-by-own-law"]
    for flag, value in (
        ("--kv-precision", options.kv_precision),
        ("--weight-precision", options.weight_precision),
        ("--device", options.device),
    ):
        if value is not None:
            command += [flag, value]
    if options.allow_int4:
        command += ["--allow-int4"]
    if options.memory is not None:
        command += ["--memory", str(options.memory)]
    return command


@contextlib.contextmanager
def _blocked(signals: tuple[signal.Signals, ...]) -> Iterator[None]:
    """These wait for the end of the block; a process that is started in it has them blocked until it says otherwise."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _in_thread(wait: Callable[[], int]) -> asyncio.Future[int]:
    """What `wait` returns. In a thread of its own: those of the loop are few, and for tokenising."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[int] = loop.create_future()

    def run() -> None:
        code = wait()
        with contextlib.suppress(RuntimeError):  # the loop has ended before the process
            loop.call_soon_threadsafe(done.set_result, code)

    threading.Thread(target=run, name="engine-wait", daemon=True).start()
    return done
