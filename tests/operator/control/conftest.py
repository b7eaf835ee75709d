import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from control_helpers import settings
from fake_api import FakeApi

from busload_operator.control.client import Client, connect
from busload_operator.control.controller import Controller
from busload_operator.control.scrape import Scraper


@pytest.fixture
async def api(tmp_path: Any) -> AsyncIterator[FakeApi]:
    async with FakeApi(tmp_path) as fake:
        yield fake


@pytest.fixture
async def client(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Client]:
    monkeypatch.setenv("KUBECONFIG", str(api.kubeconfig))
    monkeypatch.setattr("kubernetes.aio.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(api.kubeconfig))
    async with connect("test") as connected:
        yield connected


@pytest.fixture
def running(client: Client) -> Callable[..., Any]:
    """A controller that runs while the block does; `end`: until it ends by itself."""

    @contextlib.asynccontextmanager
    async def run(end: bool = False, port: int = 1, **values: str) -> AsyncIterator[Controller]:
        async with Scraper(timeout=10, port=port) as scraper:
            controller = Controller(client, settings(BUSLOAD_SCRAPE_SECONDS="0.2", **values), scraper)
            task = asyncio.create_task(controller.run())
            try:
                yield controller
                if end:
                    await task
            finally:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, ExceptionGroup):
                    await task

    return run
