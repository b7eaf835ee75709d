"""The operator's process: wait for the lease, act while it is held, and end so that the next one can take over.

Exit codes: 0 after SIGTERM or SIGINT; 1 when the lease was lost or the watches failed (the kubelet starts it again);
2 for a wrong setting.
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Coroutine
from importlib.metadata import version
from typing import Any
from uuid import uuid4

from kubernetes.aio.config.config_exception import ConfigException

from busload_operator.control import logs, metrics, probes
from busload_operator.control.client import Client, connect
from busload_operator.control.controller import Controller
from busload_operator.control.lease import Lease, LeaseLost
from busload_operator.control.scrape import Scraper
from busload_operator.control.settings import Settings, SettingsError

__version__ = version("busload")
log = logging.getLogger(__name__)
LEASE = "busload-operator"


def run() -> int:
    """The whole life of the process. Returns its exit code."""
    try:
        settings = Settings.from_environment()
    except SettingsError as error:
        print(error, file=sys.stderr)
        return 2
    logs.configure(settings.log_level)
    metrics.BUILD.labels(__version__).set(1)
    metrics.LEADER.labels(LEASE).set(0)
    metrics.WORKERS.labels(metrics.CONTROLLER).set(settings.workers)
    try:
        return asyncio.run(_run(settings))
    except probes.PortError as error:
        print(f"BUSLOAD_HTTP_PORT={settings.http_port} cannot be used: {error}; choose another", file=sys.stderr)
        return 2
    except ConfigException as error:
        print(
            f"no cluster to talk to: {error}; run in a pod with a service account, or set KUBECONFIG", file=sys.stderr
        )
        return 2


async def _run(settings: Settings) -> int:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with connect(f"busload-operator/{__version__}") as client, Scraper() as scraper:
        controller = Controller(client, settings, scraper)
        async with probes.serve(settings.http_port, controller.refresh_gauges, controller.trouble) as port:
            log.info("busload operator %s; probes and metrics on port %d", __version__, port)
            return await _lead(client, settings, controller, stop)


async def _lead(client: Client, settings: Settings, controller: Controller, stop: asyncio.Event) -> int:
    # A name alone is not enough: two processes of one name, on one host say, would both take themselves for the holder.
    lease = Lease(client, settings.namespace, LEASE, f"{settings.identity}_{uuid4()}")
    if not await _first(lease.acquire(), stop):
        return 0
    metrics.LEADER.labels(LEASE).set(1)
    log.info("leader: %s", settings.identity)
    holding = asyncio.create_task(lease.hold(), name="lease")
    acting = asyncio.create_task(controller.run(), name="controller")
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({holding, acting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if holding.done() and isinstance(holding.exception(), LeaseLost):
        # Another may act already: nothing of ours may finish.
        log.error("lease lost: %s; exiting", holding.exception())
        logging.shutdown()
        os._exit(1)
    failed = [task for task in (holding, acting) if task.done()]
    for task in failed:
        log.error("%s ended", task.get_name(), exc_info=task.exception())
    for unfinished in (acting, holding, stopping):
        unfinished.cancel()
    await asyncio.gather(acting, holding, stopping, return_exceptions=True)
    await lease.release()
    metrics.LEADER.labels(LEASE).set(0)
    log.info("stopped")
    return 1 if failed else 0


async def _first(work: Coroutine[Any, Any, None], stop: asyncio.Event) -> bool:
    """True when the work finished before the stop."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finished = working.done()
    for task in (working, stopping):
        task.cancel()
    await asyncio.gather(working, stopping, return_exceptions=True)
    if finished:
        working.result()
    return finished
