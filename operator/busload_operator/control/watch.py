"""kopf as a watch front end: it lists and watches, and hands each event to the main loop. It writes nothing.

kopf runs in a thread with an event loop of its own, because on exit it cancels every task of its loop. Its handlers
only pass events on. It cannot tell what vanished during a gap, nor when its first list is complete: `Operator` lists
for itself (see `controller`).
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import kopf
from kubernetes.aio.client import Configuration

from busload_operator.control.client import ApiError, Client
from busload_operator.control.kinds import SERVICES, WATCHED, Kind, Object

log = logging.getLogger(__name__)
ENDING_SECONDS = 30.0
"""From the first of kopf's tasks that ends to the last: it gives them five seconds itself."""
Deliver = Callable[[Kind, bool, Object], None]
"""Called in the main loop with kind, whether the object was deleted, and the object."""


async def wait_for_definition(client: Client, seconds: float = 2.0) -> None:
    """Waits until the API server serves our kind: a watch started before would stay blind for ever."""
    path = f"/apis/{SERVICES.group}/{SERVICES.version}"
    told = 0.0
    loop = asyncio.get_running_loop()
    while True:
        try:
            served = {item.get("name") for item in (await client.call("GET", path)).get("resources") or []}
            if {SERVICES.plural, f"{SERVICES.plural}/status"} <= served:
                return
            reason = f"{path} serves no {SERVICES.plural} with a status"
        except ApiError as error:
            reason = str(error)
        if loop.time() - told > 30:
            told = loop.time()
            log.warning("waiting for the CustomResourceDefinition of %s; apply crds/ (%s)", SERVICES.name, reason)
        await asyncio.sleep(seconds)


class Watcher:
    """Runs kopf in a thread. `ended` holds why it ended: None after `stop`, else the error."""

    def __init__(self, configuration: Configuration, namespaces: Sequence[str], deliver: Deliver):
        self._configuration, self._namespaces, self._deliver = configuration, namespaces, deliver
        self._loop = asyncio.get_running_loop()
        self._stop = threading.Event()
        self.ended: asyncio.Future[BaseException | None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name="kopf", daemon=True)

    def start(self) -> None:
        self._thread.start()

    async def stop(self, seconds: float = 1.0) -> None:
        """Asks kopf to end and waits for it, but not longer than this."""
        self._stop.set()
        await asyncio.wait([self.ended], timeout=seconds)

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            asyncio.run(self._watch())
        except BaseException as caught:
            error = caught
        self._tell(error)

    def _tell(self, error: BaseException | None) -> None:
        with suppress(RuntimeError):  # the main loop was faster
            self._loop.call_soon_threadsafe(self._end, error)

    def _end(self, error: BaseException | None) -> None:
        if not self.ended.done():
            self.ended.set_result(error)

    async def _watch(self) -> None:
        scope: dict[str, Any] = {"namespaces": self._namespaces} if self._namespaces else {"clusterwide": True}
        others = asyncio.all_tasks()
        try:
            # What kopf.operator does, but for the limit of time below.
            roots = await kopf.spawn_tasks(
                registry=self._registry(), settings=_settings(), stop_flag=self._stop, **scope
            )
            running = asyncio.create_task(kopf.run_tasks(roots, ignored=others))
            await asyncio.wait(roots, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait([running], timeout=ENDING_SECONDS)
            if running.done():
                return await running
            # A watch that asked for new credentials as the others ended may wait for them for ever, and so would the
            # end of this loop: who waits for the watches must not.
            errors = [task.exception() for task in roots if task.done() and not task.cancelled()]
            self._tell(next(filter(None, errors), None) or TimeoutError("kopf does not end"))
        finally:
            # kopf waits for the flag in a worker thread; if it failed, that thread would keep the loop from closing.
            self._stop.set()

    def _registry(self) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()
        kopf.on.login(registry=registry)(self._login)
        for kind in WATCHED:
            kopf.on.event(kind.group, kind.version, kind.plural, registry=registry, id=kind.plural)(self._handler(kind))
        return registry

    def _handler(self, kind: Kind) -> Callable[..., Any]:
        async def on_event(event: Any, **_: Any) -> None:
            # The body is kopf's own mapping type: what goes on must be a plain dict.
            self._loop.call_soon_threadsafe(self._deliver, kind, event["type"] == "DELETED", dict(event["object"]))

        return on_event

    async def _login(self, **_: Any) -> kopf.ConnectionInfo:
        """The client's own address and credentials; asked again when the token was refused."""
        configuration = self._configuration
        key = await _token(configuration)
        return kopf.ConnectionInfo(
            server=configuration.host,
            ca_path=configuration.ssl_ca_cert,
            insecure=not configuration.verify_ssl,
            certificate_path=configuration.cert_file,
            private_key_path=configuration.key_file,
            scheme="Bearer" if key else None,
            token=key,
        )


async def _token(configuration: Configuration) -> str | None:
    header = await configuration.get_api_key_with_prefix("authorization", alias="BearerToken")
    return str(header).removeprefix("Bearer ").removeprefix("bearer ") if header else None


def _settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.networking.request_timeout = 60
    settings.networking.connect_timeout = 10
    settings.watching.server_timeout = 300  # an int: 300.0 is refused by the API server
    settings.watching.client_timeout = 330
    settings.process.ultimate_exiting_timeout = None
    for kind in WATCHED:
        if kind.selector:
            settings.watching.label_selectors[kind.group, kind.version, kind.plural] = kind.selector
    return settings
