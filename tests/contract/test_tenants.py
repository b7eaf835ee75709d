"""Neighbours: a heavy tenant starves nobody, fills no queue, and its prompts are nobody else's cache hits."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from live_server import LiveServer, eventually, running

HEAVY, LIGHT = {"X-Busload-Tenant": "heavy"}, {"X-Busload-Tenant": "light"}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    flags = ("--executor=cpu", "--batch-size=2", "--max-queued-requests=128", "--max-sequence-length=512")
    with running(tmp_path_factory.mktemp("tenants"), *flags) as server:
        yield server


def ask(server: LiveServer, tenant: dict[str, str], max_tokens: int, prompt: str = "Once upon") -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    return server.http.post("/v1/completions", json=body, headers=tenant)


def test_fifty_requests_of_one_tenant_do_not_hold_up_another(small: LiveServer) -> None:
    with ThreadPoolExecutor(60) as pool:
        began = time.monotonic()
        heavy = [pool.submit(ask, small, HEAVY, 80) for _ in range(50)]
        eventually(lambda: small.level("vllm:num_requests_waiting") >= 40)
        waits = []
        for _ in range(5):
            sent = time.monotonic()
            assert ask(small, LIGHT, 4).status_code == 200
            waits.append(time.monotonic() - sent)
        still = sum(not answer.done() for answer in heavy)
        assert {answer.result().status_code for answer in heavy} == {200}
        whole = time.monotonic() - began
    # Five in a row waited for a seat each, of about 25 turns that the heavy tenant alone takes.
    assert still >= 25, (waits, whole)
    assert max(waits) < whole / 5, (waits, whole)
    entries = [line for line in small.lines() if line.get("path") == "/v1/completions"]
    assert len({line["tenant"] for line in entries}) == 2
    assert "heavy" not in small.log, "the header's value is hashed"


def test_a_tenant_fills_half_of_the_queue_and_its_neighbour_still_gets_in(tmp_path: Path, tiny: Path) -> None:
    flags = ("--batch-size=1", "--max-queued-requests=4", "--max-sequence-length=65536")
    with running(tmp_path, f"--model={tiny}", *flags) as server:
        stop = threading.Event()

        def hold(number: int) -> int:
            body = {"prompt": f"{number}", "max_tokens": 60_000, "ignore_eos": True, "stream": True}
            with server.http.stream("POST", "/v1/completions", json=body, headers=HEAVY) as response:
                if response.status_code == 200:
                    stop.wait(300)
                return response.status_code

        with ThreadPoolExecutor(8) as pool:
            first = pool.submit(hold, 0)
            eventually(lambda: server.level("vllm:num_requests_running") == 1)
            held = [pool.submit(hold, number) for number in (1, 2)]
            eventually(lambda: server.level("vllm:num_requests_waiting") == 2)
            refused = ask(server, HEAVY, 1)
            assert refused.status_code == 429
            assert refused.json()["error"]["code"] == "tenant_limit"
            assert "its share of the queue is 2" in refused.json()["error"]["message"]
            assert int(refused.headers["retry-after"]) >= 1
            light = pool.submit(ask, server, LIGHT, 1)
            eventually(lambda: server.level("vllm:num_requests_waiting") == 3)
            stop.set()
            assert first.result() == 200
            assert light.result().status_code == 200
            assert [answer.result() for answer in held] == [200, 200]
        assert server.metrics()['busload_requests_refused_total{reason="tenant_limit"}'] == 1


def test_a_thousand_tenants_make_no_series(tmp_path: Path, tiny: Path) -> None:
    with running(tmp_path, f"--model={tiny}", "--batch-size=8") as server:
        assert ask(server, HEAVY, 1).status_code == 200
        before = set(server.metrics())
        with ThreadPoolExecutor(8) as pool:
            answers = pool.map(lambda n: ask(server, {"X-Busload-Tenant": f"tenant-{n}"}, 1), range(1000))
            assert {answer.status_code for answer in answers} <= {200, 429}
        assert set(server.metrics()) == before


def test_another_tenants_prompt_is_never_a_cache_hit(server: LiveServer) -> None:
    prompt = "A long shared beginning, which is cached once and then found again by its owner. " * 8

    def cached(tenant: dict[str, str]) -> int:
        usage = ask(server, tenant, 1, prompt).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert cached({"X-Busload-Tenant": "one"}) == 0
    assert cached({"X-Busload-Tenant": "one"}) > 100
    assert cached({"X-Busload-Tenant": "two"}) == 0
    assert cached({}) == 0
    assert cached({"X-Busload-Tenant": "two"}) > 100
