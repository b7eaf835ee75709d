import asyncio
import contextlib
import gzip
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from busload_operator.control.scrape import Scraper, parse

GOOD = """# HELP busload_engine_steps_total x
# TYPE busload_engine_steps_total counter
busload_engine_steps_total 5
# TYPE busload_requests_finished_total counter
busload_requests_finished_total{reason="stop"} 2
busload_requests_finished_total{reason="length"} 3
vllm:num_requests_waiting{model_name="m"} 4
# TYPE t histogram
t_bucket{le="1"} 1
t_bucket{le="+Inf"} 2
t_sum 3
t_count 2
"""


WANTED = frozenset(
    {"busload_engine_steps_total", "busload_requests_finished_total", "vllm:num_requests_waiting", "t_sum", "t_count"}
)


@contextlib.asynccontextmanager
async def pod_server(answer: Any) -> AsyncIterator[int]:
    async def handle(request: web.Request) -> web.StreamResponse:
        return await answer(request) if callable(answer) else web.Response(text=answer)

    app = web.Application()
    app.router.add_get("/metrics", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield runner.addresses[0][1]
    await runner.cleanup()


async def scrape(answer: Any, seconds: float = 30) -> Any:
    async with pod_server(answer) as port, Scraper(port=port, timeout=seconds, wanted=WANTED) as scraper:
        return await scraper.scrape("127.0.0.1")


async def test_samples_are_summed_over_labels() -> None:
    values = (await scrape(GOOD)).values
    assert values["busload_engine_steps_total"] == 5
    assert values["busload_requests_finished_total"] == 5
    assert values["vllm:num_requests_waiting"] == 4
    assert (values["t_sum"], values["t_count"]) == (3, 2)
    assert values.keys() == WANTED


async def slow(_: web.Request) -> web.Response:
    await asyncio.sleep(60)
    return web.Response(text=GOOD)


async def dripping(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    for line in GOOD.splitlines(keepends=True):
        await response.write(line.encode())
        await asyncio.sleep(0.2)
    return response


async def cut(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Length": "100000"})
    await response.prepare(request)
    await response.write(GOOD.encode())
    request.transport.close()  # type: ignore[union-attr]
    return response


async def bomb(_: web.Request) -> web.Response:
    return web.Response(body=gzip.compress(b"t_sum 1\n" * (1 << 22)), headers={"Content-Encoding": "gzip"})


async def endless(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    with contextlib.suppress(ConnectionResetError):
        while True:
            await response.write(b"#" * 65536)
    return response


async def redirect(_: web.Request) -> web.Response:
    raise web.HTTPFound("http://127.0.0.1:1/elsewhere")


async def broken(_: web.Request) -> web.Response:
    raise web.HTTPInternalServerError


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (cut, "failed"),
        (redirect, "status 302"),
        (broken, "status 500"),
        ("<html>hello</html>\n", "no usable metrics"),
        ("", "no usable metrics"),
        (GOOD + "busload_tok", "ends in the middle of a line"),
        (GOOD + 't_sum{a="b} 1\n', "no usable metrics"),
        (GOOD + "# pad\n" * 300_000, "more than 262144 bytes"),
        (bomb, "more than 262144 bytes"),
        (endless, "more than 262144 bytes"),
        (GOOD + "t_sum 3\n", "t_sum is there twice"),
        ("node_load1 3\n", "none of the metrics of a busload runtime"),
    ],
)
async def test_a_pod_that_misbehaves_gives_no_values_and_a_reason(answer: Any, why: str) -> None:
    found = await scrape(answer)
    assert found.values is None
    assert why in found.error
    assert "http://127.0.0.1:" in found.error


@pytest.mark.parametrize("answer", [slow, dripping])
async def test_a_pod_that_takes_too_long_is_not_waited_for(answer: Any) -> None:
    found = await scrape(answer, seconds=0.5)
    assert found.values is None
    assert "did not answer within 0.5 s" in found.error


async def test_a_pod_that_is_not_there() -> None:
    async with Scraper(port=1, timeout=0.5) as scraper:
        assert (await scraper.scrape("127.0.0.1")).values is None


async def test_binary_garbage() -> None:
    async def garbage(_: web.Request) -> web.Response:
        return web.Response(body=bytes(range(256)) + b"\n")

    assert (await scrape(garbage)).values is None


async def test_no_more_at_once_than_allowed() -> None:
    now = peak = 0

    async def count(_: web.Request) -> web.Response:
        nonlocal now, peak
        now, peak = now + 1, max(peak, now + 1)
        await asyncio.sleep(0.02)
        now -= 1
        return web.Response(text=GOOD)

    async with pod_server(count) as port, Scraper(port=port, concurrency=3, timeout=30, wanted=WANTED) as scraper:
        found = await asyncio.gather(*(scraper.scrape("127.0.0.1") for _ in range(20)))
    assert all(one.values for one in found)
    assert peak == 3


def test_a_metric_that_is_not_a_number_is_missing() -> None:
    assert parse("a NaN\nb 1\nc +Inf\nd -Inf\ne 1e999\n", frozenset("abcde")) == {"b": 1.0}


def test_a_series_that_is_wanted_by_its_labels_stands_beside_the_sum() -> None:
    text = 'a{x="1",y="2"} 3\na{y="3",x="1"} 4\nb{x="1"} 5\n'
    assert parse(text, {'a{x="1",y="2"}', "b"}) == {"a": 7.0, 'a{x="1",y="2"}': 3.0, "b": 5.0}


def test_lines_that_nobody_needs_are_not_parsed() -> None:
    assert parse('other{x="unclosed\na 1\n{}\n\n', {"a"}) == {"a": 1.0}


@pytest.mark.parametrize("address", ["::1"])
async def test_ipv6_addresses_are_bracketed(address: str) -> None:
    async with Scraper(port=1, timeout=0.5) as scraper:
        assert "http://[::1]:1/metrics" in (await scraper.scrape(address)).error
