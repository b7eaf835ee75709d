"""Health that cannot lie: red when it must be, green however much there is to do."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from live_server import BUNDLED, PATIENCE, START, LiveServer, events, eventually, running
from tiny_gguf import byte_token, write_tiny_model

PROBES = ("/health/startup", "/health/ready", "/health/live", "/health", "/metrics")


@contextmanager
def probing(server: LiveServer, *paths: str) -> Iterator[dict[int, list[float]]]:
    """Asks for health over and over meanwhile, each probe with the 5 s that a kubelet might give it: status -> seconds
    that each took. A probe that gets no answer fails the test."""
    took: dict[int, list[float]] = {}
    failures: list[Exception] = []
    done = threading.Event()

    def probe() -> None:
        with httpx.Client(base_url=server.url, timeout=5) as http:
            while not done.is_set():
                for path in paths:
                    begin = time.monotonic()
                    try:
                        status = http.get(path).status_code
                    except httpx.HTTPError as error:
                        failures.append(error)
                        return
                    took.setdefault(status, []).append(time.monotonic() - begin)
                time.sleep(0.01)

    thread = threading.Thread(target=probe)
    thread.start()
    try:
        eventually(lambda: took or failures)
        yield took
    finally:
        done.set()
        thread.join()
    assert not failures, failures
    times = sorted(took.get(200, [0.0]))
    print(f"{len(times)} probes: p50 {times[len(times) // 2]:.4f} s, p99 {times[len(times) * 99 // 100]:.4f} s")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
    return port


def test_not_ready_before_a_token_was_produced_and_ready_from_then_on(tmp_path: Path) -> None:
    """The port answers before the model does: loading is told apart from dead, and green means that work is done."""
    port = free_port()
    command = [sys.executable, "-c", START, "serve", f"--port={port}", "--memory=2000000000"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, stderr=log)
    seen: list[tuple[int, int, int, int]] = []
    refused = None
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as http:
            eventually(lambda: _listens(port))
            while not seen or seen[-1][0] != 200:
                startup, ready, live, short = (http.get(path).status_code for path in PROBES[:4])
                seen.append((startup, ready, live, short))
                if startup != 200 and refused is None:
                    refused = http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 1})
            assert seen[0] == (503, 503, 200, 503)
            # The others: it became ready in between.
            assert set(seen[:-1]) <= {(503, 503, 200, 503), (503, 503, 200, 200), (503, 200, 200, 200)}
            assert seen[-1] == (200, 200, 200, 200)
            assert refused is not None
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "loading")
            assert int(refused.headers["retry-after"]) >= 1
            assert http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 1}).status_code == 200
    finally:
        process.kill()
        process.wait()


def test_head_is_get_without_the_content(server: LiveServer) -> None:
    """Load balancers ask with HEAD. The connection can be used again: nothing of the content was sent."""
    with httpx.Client(base_url=server.url, timeout=30) as http:
        for path in (*PROBES, "/v1/models", f"/v1/models/{BUNDLED}", "/openapi.json", "/v1/completions", "/v1/nothing"):
            whole, head = http.get(path), http.head(path)
            assert (head.status_code, head.content) == (whole.status_code, b"")
            assert head.headers["content-type"] == whole.headers["content-type"]
            assert path == "/metrics" or head.headers["content-length"] == whole.headers["content-length"]


def _listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("busy", [True, False])
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSEGV])
def test_health_turns_red_with_a_dead_engine(tmp_path: Path, tiny: Path, busy: bool, fault: signal.Signals) -> None:
    """Idle or not; and the process ends by itself, so that the pod starts again."""
    with running(tmp_path, f"--model={tiny}", "--max-sequence-length=65536") as server:
        body = {"prompt": "hello", "max_tokens": 60_000, "ignore_eos": True, "stream": busy}
        open_stream = server.http.stream("POST", "/v1/completions", json=body) if busy else None
        stream = events(open_stream.__enter__()) if open_stream else iter(())
        if busy:
            next(stream)
        os.kill(server.engine_pid(), fault)
        killed = time.monotonic()
        eventually(lambda: not _green(server), seconds=15)  # long before an engine that is silent counts as dead
        print(f"red after {time.monotonic() - killed:.2f} s")
        rest: list[Any] = list(stream)
        if busy:
            assert rest[-1]["error"]["code"] == "engine_error"
        assert server.wait() == 1
        assert f"killed by {fault.name}" in server.log


def _green(server: LiveServer) -> bool:
    try:
        return httpx.get(f"{server.url}/health/live", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def test_a_step_that_fails_ends_the_process(tmp_path: Path) -> None:
    """The fault is in the weights behind one token: nothing it computes afterwards could be trusted."""
    broken = byte_token(ord("%"))
    model = write_tiny_model(tmp_path / "broken.gguf", broken_token=broken)
    with running(tmp_path, f"--model={model}", "--max-sequence-length=65536") as server:
        body: dict[str, Any] = {"prompt": "hello", "max_tokens": 60_000, "ignore_eos": True, "stream": True}
        body |= {"logit_bias": {str(broken): -100}}  # it is the other request that brings the token
        with server.http.stream("POST", "/v1/completions", json=body) as response:
            stream = events(response)
            next(stream)
            failed = httpx.post(f"{server.url}/v1/completions", json={"prompt": "hello%"}, timeout=30)
            last: Any = list(stream)[-1]
        assert (failed.status_code, failed.json()["error"]["code"]) == (500, "engine_error")
        assert "not a number" in failed.json()["error"]["message"]
        assert last["error"]["code"] == "engine_error"
        assert server.wait() == 1


def test_huge_bodies_do_not_hold_health_up(server: LiveServer) -> None:
    """20 MB as declared, 20 MB in chunks, and the worst of what is small enough to be read."""
    text = "x" * 20_000_000
    chunks = [b'{"prompt": "', *[b"x" * 100_000] * 200, b'"}']
    readable = 2**20
    numbers = b'{"prompt": [%b1]}' % (b"1," * (readable // 2))
    nested = b'{"prompt": "x", "user": %b}' % (b"[" * (readable // 2) + b"]" * (readable // 2))
    names = b'{"prompt": "x", "max_tokens": 1, %b"y": 1}' % b"".join(b'"k%d": 1, ' % i for i in range(readable // 14))
    escapes = b'{"prompt": "%b"}' % (b"\\u0e01" * (readable // 6))
    messages = b'{"messages": [%b{"role": "user", "content": "x"}]}' % (b'{"role":"assistant"},' * (readable // 21))
    with probing(server, *PROBES) as probes:
        before = len(probes[200])
        statuses = [httpx.post(f"{server.url}/v1/completions", json={"prompt": text}, timeout=60).status_code]
        for content in (iter(chunks), numbers, nested, names, escapes):
            statuses.append(httpx.post(f"{server.url}/v1/completions", content=content, timeout=60).status_code)
        answer = httpx.post(f"{server.url}/v1/chat/completions", content=messages, timeout=60)
        assert len(probes[200]) > before
    assert statuses == [413, 413, 400, 400, 200, 400]
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert set(probes) == {200}


@pytest.mark.parametrize(("model", "length"), [("bundled", 2000), ("tiny", 60_000)])
def test_long_prompts_stop_neither_health_nor_streams(tmp_path: Path, tiny: Path, model: str, length: int) -> None:
    """One enters beside eight streams: in each step they get their tokens, and it what is left of the budget."""
    flags = ["--batch-size=10", "--token-budget=256", "--served-model-name=some"]
    flags += [f"--model={tiny}", "--max-sequence-length=65536"] if model == "tiny" else []
    with running(tmp_path, *flags) as server, httpx.Client(base_url=server.url, timeout=120) as http:
        done: list[int] = []
        gaps: list[float] = []

        def stream(place: int) -> None:
            body = {"prompt": [100 + place], "ignore_eos": True, "stream": True}
            with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=120) as response:
                last = time.monotonic()
                for _ in events(response):
                    gaps.append(time.monotonic() - last)
                    last = time.monotonic()
                    if done:
                        return

        threads = [threading.Thread(target=stream, args=(place,)) for place in range(8)]
        for thread in threads:
            thread.start()
        eventually(lambda: server.level("vllm:num_requests_running") == 8 and len(gaps) > 80)
        quiet = sorted(gaps)
        gaps.clear()
        with probing(server, *PROBES) as probes:
            before = server.metrics()
            body = {"prompt": [7 + i % 200 for i in range(length)], "max_tokens": 1}
            assert http.post("/v1/completions", json=body).status_code == 200
            after = server.metrics()
        beside = sorted(gaps)
        done.append(1)
        for thread in threads:
            thread.join()
    steps = after["busload_engine_steps_total"] - before["busload_engine_steps_total"]
    tokens = after["busload_generated_tokens_total"] - before["busload_generated_tokens_total"]
    print(f"{steps:.0f} steps, {tokens:.0f} tokens beside the prompt; gap of a stream, median and largest:")
    for name, times in (("without", quiet), ("beside", beside)):
        if times:
            print(f"  {name} the prompt {times[len(times) // 2]:.3f} s, {times[-1]:.3f} s")
    assert set(probes) == {200}
    assert steps >= length / 256
    assert tokens >= 8 * (steps - 2)


def test_sigterm_waits_for_no_request_that_never_comes(tmp_path: Path, tiny: Path) -> None:
    """Half a head, and heads without their bodies: each is told, or closed, long before the drain time is over."""
    with running(tmp_path, f"--model={tiny}", "--drain-seconds=600") as server:
        url = httpx.URL(server.url)
        clients = [socket.create_connection((url.host, url.port or 0), timeout=60) for _ in range(4)]
        for path, client in zip(
            ("/v1/comp", "/v1/completions", "/v1/chat/completions", "/tokenize"), clients, strict=True
        ):
            whole = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{{".encode()
            client.sendall(whole[:12] if path == "/v1/comp" else whole)
        eventually(lambda: server.http.get("/health/live").status_code == 200)
        server.process.send_signal(signal.SIGTERM)
        answers = [client.makefile("rb").read() for client in clients]
        assert server.wait() == 0
    assert answers[0] == b""
    assert all(b" 503 " in answer[:20] and b'"draining"' in answer for answer in answers[1:]), answers
    assert "Traceback" not in server.log


def test_sigterm_waits_no_longer_than_it_may_for_a_client_that_reads_nothing(tmp_path: Path, tiny: Path) -> None:
    flags = ("--max-sequence-length=65536", "--drain-seconds=1")
    with running(tmp_path, f"--model={tiny}", *flags) as server:
        url = httpx.URL(server.url)
        body = b'{"prompt": "hello", "max_tokens": 60000, "ignore_eos": true, "stream": true, "n": 16}'
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            client.connect((url.host, url.port))
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
            )
            # The kernel takes some megabytes, about 230 bytes for each token, before it takes no more.
            eventually(lambda: server.level("busload_generated_tokens_total") > 40_000)
            server.process.send_signal(signal.SIGTERM)
            assert server.wait() == 0
        assert "drain time is over" in server.log
        assert "Traceback" not in server.log


@contextmanager
def unread(model: Path) -> Iterator[tuple[subprocess.Popen[bytes], httpx.Client]]:
    """A server whose log goes into a pipe that nobody reads, and which is full."""
    port = free_port()
    command = [sys.executable, "-c", START, "serve", f"--port={port}", "--memory=2000000000", f"--model={model}"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as http:
            eventually(lambda: _listens(port) and http.get("/health/ready").status_code == 200)
            for _ in range(1000):
                assert http.get("/v1/models", timeout=5).status_code == 200
            for _ in range(500):  # what libraries would have to say
                with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
                    client.sendall(b"no HTTP\r\n\r\n")
                    assert client.recv(100).startswith(b"HTTP/1.1 400 ")
            yield process, http
    finally:
        process.kill()
        process.wait()


def test_a_log_that_nobody_reads_holds_nothing_up(tiny: Path) -> None:
    """Its pipe is full after some hundred lines; then lines are dropped, and said to be, once somebody reads."""
    with unread(tiny) as (process, http):
        assert http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 3}).status_code == 200
        assert process.stderr is not None
        read = os.read(process.stderr.fileno(), 1 << 16)
        assert http.get("/v1/models").status_code == 200
        process.send_signal(signal.SIGTERM)
        read += process.stderr.read()
        assert process.wait(PATIENCE) == 0
    assert re.search(rb"serve: [0-9]+ log lines were dropped", read)
    assert read.endswith(b"stopped\n")


def test_a_log_that_nobody_reads_hides_no_failure(tmp_path: Path) -> None:
    """A step fails: its client is told and the process ends, although the log takes no word of it."""
    broken = byte_token(ord("%"))
    with unread(write_tiny_model(tmp_path / "broken.gguf", broken_token=broken)) as (process, http):
        failed = http.post("/v1/completions", json={"prompt": "hello%"})
        assert (failed.status_code, failed.json()["error"]["code"]) == (500, "engine_error")
        assert "not a number" in failed.json()["error"]["message"]
        assert process.wait(PATIENCE) == 1
