"""Time limits: in the queue, of the whole request, and between two tokens. Slots come back each time."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from live_server import BUNDLED, PATIENCE, LiveServer, events, eventually, running

LONG: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 8000, "ignore_eos": True}
"""Longer than any of the limits, on a fast machine too."""


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    flags = ("--executor=cpu", "--batch-size=1", "--max-sequence-length=8192", "--queue-timeout=2", "--token-timeout=2")
    with running(tmp_path_factory.mktemp("hasty"), *flags) as server:
        yield server


@contextmanager
def busy(server: LiveServer) -> Iterator[None]:
    """The only seat is taken meanwhile."""
    enough = threading.Event()

    def hold() -> None:
        with server.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
            assert response.status_code == 200
            enough.wait(PATIENCE)

    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(hold)
        eventually(lambda: server.level("vllm:num_requests_running") == 1)
        try:
            yield
        finally:
            enough.set()
        held.result()
    eventually(lambda: idle(server))


def idle(server: LiveServer) -> bool:
    found = server.metrics()
    levels = [value for key, value in found.items() if key.startswith(("vllm:num_requests", "busload_queued_prompt"))]
    return levels == [0, 0, 0] and found["busload_kv_blocks"] == found["busload_kv_blocks_free"]


@pytest.mark.parametrize("stream", [False, True])
def test_who_waits_too_long_in_the_queue_gets_408_before_any_200(hasty: LiveServer, stream: bool) -> None:
    with busy(hasty):
        sent = time.monotonic()
        answer = hasty.complete(prompt="Hello", max_tokens=1, stream=stream)
        taken = time.monotonic() - sent
        eventually(lambda: hasty.level("vllm:num_requests_waiting") == 0)
    assert answer.status_code == 408
    assert answer.json()["error"]["code"] == "deadline_exceeded"
    assert "no first token after 2 s" in answer.json()["error"]["message"]
    assert 1 <= int(answer.headers["retry-after"]) <= 120
    assert taken > 1.9
    assert hasty.lines()[-1]["status"] in (200, 408)
    assert hasty.complete(prompt="Hello", max_tokens=1).status_code == 200


def test_the_official_client_tries_again_and_then_gets_its_answer(hasty: LiveServer) -> None:
    with openai.OpenAI(base_url=f"{hasty.url}/v1", api_key="unused", max_retries=5) as client:
        request: dict[str, Any] = {"model": BUNDLED, "prompt": "Hi", "max_tokens": 1}
        before = len(hasty.lines())
        with ThreadPoolExecutor(1) as pool:
            with busy(hasty):
                asked = pool.submit(client.completions.create, **request)
                eventually(lambda: any(line["status"] == 408 for line in hasty.lines()[before:]))
            assert asked.result().usage is not None


def test_a_client_sets_its_own_limit_and_nobody_retries_for_it(hasty: LiveServer) -> None:
    headers = {"X-Request-Timeout": "0.5"}
    timeouts = 'busload_requests_finished_total{reason="timeout"}'
    before = hasty.metrics()[timeouts]
    with busy(hasty):
        answer = hasty.http.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 1}, headers=headers)
    running_out = hasty.http.post("/v1/completions", json=LONG, headers=headers)
    for response in (answer, running_out):
        assert response.status_code == 408
        assert response.json()["error"]["param"] == "X-Request-Timeout"
        assert response.headers["x-should-retry"] == "false"
    eventually(lambda: idle(hasty))
    assert hasty.metrics()[timeouts] == before + 2


def test_a_stream_whose_time_is_over_ends_with_an_error_event(hasty: LiveServer) -> None:
    body, headers = {**LONG, "stream": True}, {"X-Request-Timeout": "2"}
    with hasty.http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        assert response.status_code == 200
        seen = list(events(response))
    assert len(seen) > 1
    assert isinstance(seen[-1], dict)
    assert seen[-1]["error"]["code"] == "deadline_exceeded"
    eventually(lambda: idle(hasty))


def test_a_stream_without_a_token_for_too_long_is_ended(hasty: LiveServer) -> None:
    engine = hasty.engine_pid()
    with hasty.http.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
        lines = events(response)
        assert "choices" in next(lines)
        os.kill(engine, signal.SIGSTOP)
        try:
            stopped = time.monotonic()
            *_, last = lines
            taken = time.monotonic() - stopped
        finally:
            os.kill(engine, signal.SIGCONT)
    assert isinstance(last, dict)
    assert last["error"]["code"] == "stalled"
    assert taken > 1.5
    eventually(lambda: idle(hasty))
    assert hasty.complete(prompt="Hello", max_tokens=1).status_code == 200


def test_a_queue_that_is_longer_than_one_would_wait_refuses_at_once(tmp_path: Path) -> None:
    flags = ("--executor=cpu", "--batch-size=1", "--max-sequence-length=2048")
    with running(tmp_path, *flags) as server, ThreadPoolExecutor(4) as pool:
        body = {"prompt": "Hello", "max_tokens": 200, "ignore_eos": True}
        assert server.http.post("/v1/completions", json=body).status_code == 200, "and its length is known now"
        waiting = [pool.submit(server.http.post, "/v1/completions", json=body) for _ in range(4)]
        eventually(lambda: server.level("vllm:num_requests_waiting") >= 2)
        refused = server.http.post("/v1/completions", content=b"{no json", headers={"X-Request-Timeout": "0.1"})
        assert refused.status_code == 429, "before its body was looked at"
        assert "this request may wait 0.1 s" in refused.json()["error"]["message"]
        assert int(refused.headers["retry-after"]) >= 1
        assert [answer.result().status_code for answer in waiting] == [200] * 4


@pytest.mark.parametrize("value", ["soon", "0", "-3", "nan", "inf", "1e12"])
def test_a_limit_that_is_no_time_is_a_400(hasty: LiveServer, value: str) -> None:
    body = {"prompt": "Hello", "max_tokens": 1}
    answer = hasty.http.post("/v1/completions", json=body, headers={"X-Request-Timeout": value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "X-Request-Timeout"
