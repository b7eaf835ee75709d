"""The life of `busload serve` from the start of its engine on: load, serve, quiesce, drain, and an exit code."""

import asyncio
import contextlib
import gc
import json
import signal
import socket
import time
from collections.abc import Coroutine, Iterator
from typing import Any

import uvicorn
import uvloop

from busload_runtime.contract import LimitsDocument
from busload_runtime.freed_memory import return_freed_memory
from busload_runtime.model.errors import ModelError
from busload_runtime.model.text import load_text_model
from busload_runtime.server.admission import Admission
from busload_runtime.server.api_keys import ApiKeys
from busload_runtime.server.api_keys_watch import ApiKeysWatch
from busload_runtime.server.app import build_app
from busload_runtime.server.connection import KEEP_ALIVE_SECONDS, HttpConnection
from busload_runtime.server.engine_client import EngineClient
from busload_runtime.server.engine_process import EngineProcess
from busload_runtime.server.errors import StartupError
from busload_runtime.server.limits_watch import LimitsWatch
from busload_runtime.server.log import say, write_line
from busload_runtime.server.metrics import Metrics
from busload_runtime.server.options import ServeOptions
from busload_runtime.server.service import Service
from busload_runtime.server.start import BACKLOG, EXIT_USAGE
from busload_runtime.server.tokenise import PromptEncoder
from busload_runtime.server.tracing import start_tracing

EXIT_OK, EXIT_ENGINE = 0, 1
_PROGRESS_SECONDS = 2.0
# Open streams get this long to receive their error event, and idle connections to close, before the process ends.
_GOODBYE_SECONDS = 3
# After its last answer a client whose connection was kept has this long to send the next request, and a request that
# has begun when the drain does has this long to be whole.
_LINGER_SECONDS = 1.0
# As it comes, the collector runs over all parts of a body again and again while that is decoded, and nothing else runs:
# a megabyte of empty lists took three times as long. Few cycles are made here, so it need not run often.
_GC_THRESHOLDS = (50_000, 20, 100)


def run(
    options: ServeOptions,
    document: LimitsDocument,
    keys: ApiKeys | None,
    listener: socket.socket,
    engine: EngineProcess,
    started: float,
) -> int:
    """Serves on `listener` until told to stop; the exit code. `started`: when that began, for the log.

    Raises `StartupError`.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_Serve(options, document, keys, listener, engine, started).run())


class _Serve:
    """One run. The engine process is a child; it ends when this process closes the socket, or dies."""

    def __init__(
        self,
        options: ServeOptions,
        document: LimitsDocument,
        keys: ApiKeys | None,
        listener: socket.socket,
        engine: EngineProcess,
        started: float,
    ) -> None:
        self._options = options
        self._keys = keys
        self._document = document
        self._limits = document.for_pod(options.pod_name)
        self._listener = listener
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._engine = engine
        self._started = started
        self._tasks: set[asyncio.Task[None]] = set()
        self._startup_done = False

    async def run(self) -> int:
        try:
            return await self._run()
        finally:
            for task in self._tasks:
                task.cancel()

    async def _run(self) -> int:
        options = self._options
        metrics = Metrics(options.served_model_name)
        admission = Admission(self._limits)
        client = EngineClient(self._engine.socket, options.engine_timeout, lambda stats: service.on_stats(stats))
        service = Service(
            options.served_model_name,
            metrics,
            admission,
            client,
            plans_by_own_law=options.limits_file is None,
            timeouts=options.timeouts,
            tenant_header=options.tenant_header,
            log_format=options.log_format,
            log_prompts=options.log_prompts,
            tracing=start_tracing(options.served_model_name, options.otlp_endpoint) if options.otlp_endpoint else None,
        )
        if self._keys is not None and options.api_keys_file is not None:
            service.on_keys(self._keys)
            self._spawn(ApiKeysWatch(options.api_keys_file, service).run())
        self._handle_signals(service)
        client.start()
        server = _Server(uvicorn.Config(build_app(service), **_UVICORN))
        serving = asyncio.create_task(server.serve(sockets=[self._listener]))
        try:
            metrics.engine_pid = self._engine.pid
            self._spawn(self._watch_engine(client))
            if not await self._load(service):
                return EXIT_OK if client.alive else await self._failed_start(client)
            self._announce()
            if options.limits_file is not None:
                self._spawn(LimitsWatch(options.limits_file, options.pod_name, service, self._document).run())
            await _first(self._stop.wait(), _settled(client.failed), _settled(serving))
            if serving.done():
                serving.result()  # raises what ended it
                return EXIT_ENGINE
            if not client.alive:
                say(f"the engine is gone: {client.failed.result()}")
                service.quiescing = True  # connections close behind the error
                await self._wait_for_responses(service, _GOODBYE_SECONDS)
                return EXIT_ENGINE
            return await self._drain(service)
        finally:
            server.drop_unread()
            server.should_exit = True
            await serving
            await client.close()
            await service.grammars.close()
            if service.tracing is not None:
                await asyncio.to_thread(service.tracing.close)

    async def _load(self, service: Service) -> bool:
        """Waits for tokeniser and engine. False: told to stop, or the engine failed. Raises `StartupError`."""
        source, client = self._options.model, service.engine
        self._spawn(self._progress())
        text = asyncio.create_task(asyncio.to_thread(load_text_model, source))
        text.add_done_callback(_seen)  # the engine may be the first to say what is wrong with the file
        try:
            await _first(self._stop.wait(), _settled(client.failed), _settled(text))
            if self._stop.is_set():
                return False
            if text.done():
                service.text = PromptEncoder(text.result())
                return_freed_memory()
                client.text_loaded()
                await _first(self._stop.wait(), _settled(client.failed), _settled(client.ready))
        except ModelError as error:
            raise StartupError(str(error)) from None
        if self._stop.is_set() or not client.alive:
            return False
        service.ready = service.metrics.ready = client.ready.result()
        service.on_limits(self._document.generation, self._limits, self._document.pace)
        self._startup_done = True
        # What lives now lives on: keep the garbage collector from walking over it while tokens stream. It does not look
        # for the few hundred cycles that imports have left either: the first client would wait for that.
        gc.freeze()
        gc.enable()
        gc.set_threshold(*_GC_THRESHOLDS)
        return True

    async def _failed_start(self, client: EngineClient) -> int:
        """Usage error or engine failure: the engine's own exit code tells."""
        self._startup_done = True
        say(client.failed.result())
        with contextlib.suppress(TimeoutError):
            if await asyncio.wait_for(self._engine.wait(), _GOODBYE_SECONDS) == EXIT_USAGE:
                return EXIT_USAGE
        return EXIT_ENGINE

    async def _drain(self, service: Service) -> int:
        """Refuses new requests and waits for the running ones."""
        service.quiescing = service.admission.draining = True
        service.bodies.hurry(_LINGER_SECONDS)
        say(f"draining: {service.engine.live} sequences run or wait, at most {self._options.drain_seconds:g} s")
        if not await self._wait_for_responses(service, self._options.drain_seconds):
            say(f"drain time is over: {service.engine.live} sequences are cut off with an error")
            service.engine.fail("the server shut down before this request was finished")
            await self._wait_for_responses(service, _GOODBYE_SECONDS)
        say("stopped")
        return EXIT_OK

    async def _wait_for_responses(self, service: Service, seconds: float) -> bool:
        """Whether all work was done within the time. Clients that may send one more request get a moment for it."""
        deadline = time.monotonic() + seconds
        linger = _LINGER_SECONDS if service.admission.keeps_promises and service.engine.alive else 0.0
        quiet_since = time.monotonic()
        while True:
            now = time.monotonic()
            if service.admission.live or service.open_responses:
                quiet_since = now
            elif now - quiet_since >= linger:
                return True
            if now > deadline or self._hurry.is_set():
                return not (service.admission.live or service.open_responses)
            await asyncio.sleep(0.05)

    def _handle_signals(self, service: Service) -> None:
        loop = asyncio.get_running_loop()

        def quiesce() -> None:
            if not service.quiescing:
                say("quiescing: not ready any more, still serving")
            service.quiescing = service.admission.keeps_promises = True

        def stop() -> None:
            service.quiescing = service.admission.draining = True
            if self._stop.is_set() and interactive:
                self._hurry.set()
            self._stop.set()

        interactive = False

        def interrupt() -> None:  # the second Ctrl-C does not wait
            nonlocal interactive
            interactive = True
            stop()

        loop.add_signal_handler(signal.SIGUSR1, quiesce)
        loop.add_signal_handler(signal.SIGTERM, stop)
        loop.add_signal_handler(signal.SIGINT, interrupt)

    async def _watch_engine(self, client: EngineClient) -> None:
        """Tells the client when the engine process ends."""
        code = await self._engine.wait()
        await asyncio.sleep(0.2)  # its last message, if any, says more than the exit code: let it arrive first
        client.fail(f"the engine process {_how_it_ended(code)}")

    async def _progress(self) -> None:
        while not self._startup_done:
            say(f"loading {self._options.model} ({time.monotonic() - self._started:.0f} s)")
            await asyncio.sleep(_PROGRESS_SECONDS)

    def _announce(self) -> None:
        host = self._options.host if self._options.host not in ("0.0.0.0", "::", "") else "127.0.0.1"
        port = self._listener.getsockname()[1]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1"
        name = self._options.served_model_name
        body = json.dumps({"model": name, "messages": [{"role": "user", "content": "Say hello."}]})
        say(f"{name} is ready after {time.monotonic() - self._started:.1f} s at {url}; try")
        write_line(f"  curl {url}/chat/completions -H 'Content-Type: application/json' -d '{body}'")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        task.add_done_callback(_tell_crash)
        self._tasks.add(task)


class _Server(uvicorn.Server):
    """uvicorn without its signal handling: draining is ours."""

    def drop_unread(self) -> None:
        """Ends answers that are still open after all the time they had: their clients read nothing."""
        for connection in list(self.server_state.connections):
            if isinstance(connection, HttpConnection):
                connection.drop()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


_UVICORN: dict[str, Any] = {
    "http": HttpConnection,
    "lifespan": "off",
    "access_log": False,
    "log_config": None,
    "server_header": False,
    "timeout_keep_alive": KEEP_ALIVE_SECONDS,
    "timeout_graceful_shutdown": _GOODBYE_SECONDS,
    "backlog": BACKLOG,
}


def _tell_crash(task: asyncio.Task[None]) -> None:
    """A task in the background that fails must not do so in silence."""
    if not task.cancelled() and (error := task.exception()) is not None:
        say(f"{task.get_coro()} failed: {type(error).__name__}: {error}")


def _seen(task: asyncio.Task[Any]) -> None:
    """An exception that nobody waits for any more is no news."""
    if not task.cancelled():
        task.exception()


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    name = signal.Signals(-code).name
    hint = "; out of memory? compare --memory with the memory limit" if -code == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"


async def _settled(future: asyncio.Future[Any]) -> None:
    """Waits until a future is done, without taking its result."""
    await asyncio.wait((future,))


async def _first(*works: Coroutine[Any, Any, Any]) -> None:
    """Waits until one of them is done and drops the others."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
