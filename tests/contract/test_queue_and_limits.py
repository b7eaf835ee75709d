"""What is bounded, and that the bound holds before any work is done."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_server import LiveServer, events, eventually, running

REFUSED = 'busload_requests_refused_total{reason="queue_full"}'
LONG: dict[str, Any] = {"prompt": "hello", "max_tokens": 60_000, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def narrow(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """One request runs, two may wait."""
    flags = ("--batch-size=1", "--max-queued-requests=2", "--max-sequence-length=65536")
    with running(tmp_path_factory.mktemp("narrow"), f"--model={tiny}", *flags) as server:
        yield server


@contextmanager
def full(server: LiveServer) -> Iterator[None]:
    """Three requests of one client: no seat is free meanwhile."""
    with server.http.stream("POST", "/v1/completions", json=LONG | {"n": 3}) as response:
        stream = events(response)  # dropping it would close the response
        next(stream)
        eventually(lambda: server.level("vllm:num_requests_waiting") == 2)
        yield
    eventually(lambda: server.level("vllm:num_requests_running") == 0)


def head(path: str, length: int) -> bytes:
    return b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (path.encode(), length)


def connect(server: LiveServer) -> socket.socket:
    url = httpx.URL(server.url)
    return socket.create_connection((url.host, url.port or 0), timeout=30)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_full_queue_refuses_before_it_reads(narrow: LiveServer, path: str) -> None:
    """A body that is no JSON, and one that never comes, are refused for the queue: neither was looked at."""
    with full(narrow):
        before = narrow.metrics()[REFUSED]
        for content in (b"{no json", b'{"prompt": "%b"}' % (b"x" * 1_000_000)):
            response = narrow.http.post(path, content=content)
            assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_full")
            assert int(response.headers["retry-after"]) >= 1
        with connect(narrow) as client:
            client.sendall(head(path, 1000))
            answer = client.recv(65536)
        assert answer.startswith(b"HTTP/1.1 429 ")
        assert narrow.metrics()[REFUSED] == before + 3


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_bodies_that_never_come_keep_nobody_out(narrow: LiveServer, path: str) -> None:
    """A hundred requests without a body, or with half of it: none of them has a seat, of which there are three."""
    clients = [connect(narrow) for _ in range(100)]
    try:
        for place, client in enumerate(clients):
            client.sendall(head(path, 1000) + b'{"prompt": "' * (place % 2))
        fields: dict[str, Any] = {"prompt": "hello", "messages": [{"role": "user", "content": "hello"}]}
        if path == "/tokenize":
            del fields["messages"]
        else:
            fields |= {"max_tokens": 1}
        answers = [narrow.http.post(path, json=fields) for _ in range(5)]
        assert [answer.status_code for answer in answers] == [200] * 5, answers[0].text
        assert narrow.http.get("/health/ready").status_code == 200
    finally:
        for client in clients:
            client.close()


def test_who_waits_is_served_and_nobody_is_refused_inside_a_stream(narrow: LiveServer) -> None:
    """One runs, two wait, three more are refused, each with a status and before any event."""
    waited: list[tuple[int, Any]] = []

    def wait() -> None:
        with narrow.http.stream("POST", "/v1/completions", json=LONG | {"max_tokens": 5}) as response:
            waited.append((response.status_code, list(events(response))[-1]))

    threads = [threading.Thread(target=wait) for _ in range(2)]
    with narrow.http.stream("POST", "/v1/completions", json=LONG) as response:
        stream = events(response)
        next(stream)
        for thread in threads:
            thread.start()
        eventually(lambda: narrow.level("vllm:num_requests_waiting") == 2)
        for _ in range(3):
            refused = narrow.http.post("/v1/completions", json=LONG | {"max_tokens": 5})
            assert (refused.status_code, refused.headers["content-type"]) == (429, "application/json")
    for thread in threads:
        thread.join()
    assert waited == [(200, "[DONE]")] * 2


def test_a_memory_that_cannot_hold_the_longest_sequence_is_never_in_force(tmp_path: Path) -> None:
    """So that no prompt below the limit waits for memory that does not exist: the start and a change are refused."""
    limits = {
        "maxSequenceLength": 1024,
        "batchSize": 4,
        "kvCachePercent": 90,
        "tokenBudget": 256,
        "maxQueuedRequests": 64,
        "maxQueuedTokens": 100_000,
    }
    path = tmp_path / "limits.json"
    path.write_text(json.dumps({"generation": 1, "default": limits | {"maxSequenceLength": 8192}}))
    flags = ("--memory=330000000", f"--limits-file={path}")
    with pytest.raises(AssertionError, match=r"exit code 2(.|\n)*less than one sequence of maxSequenceLength 8192"):
        LiveServer(tmp_path, *flags)
    path.write_text(json.dumps({"generation": 1, "default": limits}))
    with running(tmp_path, "--memory=600000000", f"--limits-file={path}") as server:
        path.write_text(json.dumps({"generation": 2, "default": limits | {"kvCachePercent": 1}}))
        eventually(lambda: server.level("busload_limits_errors_total") == 1)
        assert server.level("busload_limits_generation") == 1
        assert "generation 2: kvCachePercent 1 of" in server.log
        answer = server.complete(prompt=[9 + i % 100 for i in range(1023)], max_tokens=5).json()
        assert answer["usage"]["completion_tokens"] == 1
        beyond = server.complete(prompt=[9] * 1024, max_tokens=5)
        assert (beyond.status_code, beyond.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert server.complete(prompt="hello", max_tokens=1).status_code == 200


def test_a_full_cache_makes_no_circle_of_preemptions(tight: LiveServer) -> None:
    """Eight clients, memory for less than two of them: all end, little is computed twice, and what is computed twice
    counts as no hit of the prefix cache."""
    before = tight.metrics()
    prompts = [[1000 * place + i for i in range(1, 101)] for place in range(1, 9)]
    answers: list[dict[str, Any]] = []

    def ask(prompt: list[int]) -> None:
        body = {"prompt": prompt, "max_tokens": 100, "ignore_eos": True, "temperature": 0}
        answers.append(httpx.post(f"{tight.url}/v1/completions", json=body, timeout=120).json())

    threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    after = tight.metrics()
    delta = {name: after[name] - before[name] for name in after}
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [100] * 8
    assert delta["busload_preemptions_total"] > 0
    recomputed = delta["busload_step_prefill_tokens_total"] - 800
    print(f"{delta['busload_preemptions_total']:.0f} preemptions, {recomputed:.0f} tokens recomputed of 1600")
    assert recomputed <= 2 * 1600
    assert delta["busload_prefix_cache_queried_tokens_total"] == 800
    assert delta["busload_prefix_cache_hit_tokens_total"] == 0


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (b'"stop_token_ids": [-1]', "stop_token_ids[0]"),
        (b'"stop_token_ids": [999999]', "stop_token_ids"),
        (b'"logit_bias": {"-1": 1}', "logit_bias"),
        (b'"logit_bias": {"999999": 1}', "logit_bias"),
        (b'"logit_bias": {"1": 1e3}', "logit_bias"),
        (b'"temperature": 1e999', None),
        (b'"temperature": NaN', None),
        (b'"max_tokens": 0', "max_tokens"),
        (b'"max_tokens": 1e9', "max_tokens"),
        (b'"n": 17', "n"),
        (b'"seed": 99999999999999999999', "seed"),
        (b'"stop": ""', "stop"),
        (b'"stop": ["a", "b", "c", "d", "e"]', "stop"),
        (b'"stream": "yes"', "stream"),
        (b'"prompt": "", "messages": []', None),
        (b'"prompt": [-1], "messages": [{"role": "user", "content": 5}]', None),
        (b'"prompt": "\\ud800", "messages": [{"role": "user", "content": "\\ud800"}]', None),
        (b'"prompt": [1e400], "messages": [{}]', None),
        (b'"prompt": {}, "messages": {}', None),
    ],
)
def test_what_cannot_be_meant_is_refused_and_harms_nothing(
    narrow: LiveServer, path: str, fields: bytes, param: str | None
) -> None:
    content = b'{"prompt": "hello", "messages": [{"role": "user", "content": "hello"}], %b}' % fields
    response = narrow.http.post(path, content=content)
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert error["type"] == "invalid_request_error"
    assert param is None or error["param"] == param
    assert narrow.complete(prompt="hello", max_tokens=1).status_code == 200


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-45, 1e-38, 1e-20])
def test_a_temperature_next_to_zero_is_greedy(server: LiveServer, temperature: float) -> None:
    """Dividing by it overflows, which must neither choose another token nor end the engine."""
    fields: dict[str, Any] = {"prompt": "The capital of France is", "max_tokens": 8}
    greedy = server.complete(**fields, temperature=0).json()["choices"]
    for shape in ({}, {"top_p": 0.5}, {"top_p": 1e-300}, {"top_k": 5}, {"min_p": 0.1}):
        assert server.complete(**fields, temperature=temperature, **shape).json()["choices"] == greedy
