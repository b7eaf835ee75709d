"""The operator's HTTP port: probes for the kubelet and metrics for Prometheus."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import web
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from busload_operator.control import metrics


class PortError(Exception):
    """The port cannot be listened on."""


@asynccontextmanager
async def serve(port: int, refresh: Callable[[], None], trouble: Callable[[], str]) -> AsyncIterator[int]:
    """Serves until the block ends; yields the port. `refresh` updates gauges before each scrape; `trouble` says why
    the process should be started again (/healthz), or nothing.

    Ready does not ask for leadership: the other replica stands by and is as it should be.
    """

    async def metrics_page(_: web.Request) -> web.Response:
        refresh()
        body = generate_latest(metrics.REGISTRY)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def healthz(_: web.Request) -> web.Response:
        text = trouble()
        return web.Response(text=f"{text or 'ok'}\n", status=503 if text else 200)

    async def readyz(_: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    app = web.Application()
    app.router.add_get("/metrics", metrics_page)
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/readyz", readyz)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.2)
    await runner.setup()
    try:
        site = web.TCPSite(runner, None, port)
        try:
            await site.start()
        except OSError as error:
            raise PortError(str(error)) from None
        yield runner.addresses[0][1]
    finally:
        async with asyncio.timeout(1):
            await runner.cleanup()
