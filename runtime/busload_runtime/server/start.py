"""The start of `busload serve`: what can be wrong is found, the engine starts to load, and only then comes the rest.

The libraries of the HTTP process take as long to import as a small model takes to load, so both happen at once. This
module and what it imports therefore need the standard library alone.
"""

import contextlib
import gc
import resource
import socket
import time

from busload_runtime.server.api_keys import first_keys
from busload_runtime.server.engine_process import EngineProcess
from busload_runtime.server.errors import StartupError
from busload_runtime.server.log import claim_standard_streams, log_through_lines, say
from busload_runtime.server.options import ServeOptions

EXIT_USAGE = 2
BACKLOG = 2048


def serve(options: ServeOptions) -> int:
    """Runs until told to stop; the exit code. Prints one line on stderr for anything that keeps it from starting."""
    started = time.monotonic()
    try:
        claim_standard_streams()
        options.check()
        document = options.first_document()
        log_through_lines()
        keys = None if options.api_keys_file is None else first_keys(options.api_keys_file)
        with contextlib.closing(_listen(options.host, options.port)) as listener:
            _allow_many_connections()
            engine = EngineProcess(options, document.for_pod(options.pod_name), document.pace)
            gc.disable()  # hundred thousands of objects come and stay; on again when they are there
            try:
                from busload_runtime.server.lifecycle import run

                return run(options, document, keys, listener, engine, started)
            finally:
                gc.enable()
                engine.kill()
    except StartupError as error:
        say(str(error))
        return EXIT_USAGE


def _allow_many_connections() -> None:
    """Each connection is an open file; the usual soft limit is meant for programs that use `select`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _listen(host: str, port: int) -> socket.socket:
    """The listening socket, made before anything slow. Raises `StartupError`."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)  # now, so that a port taken by another is found here
    except (OSError, UnicodeError) as error:  # UnicodeError: a name that cannot be one of a host
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise StartupError(
            f"--host {host} --port {port}: {why}; choose another with --port (0 takes a free one)"
        ) from None
    return listener
