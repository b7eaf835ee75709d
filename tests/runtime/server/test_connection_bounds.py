"""What one TCP client may do to the server: huge heads, idle connections, pipelining, silence."""

import asyncio
import json
import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live_server import LiveServer, eventually
from uvicorn import Config
from uvicorn.server import ServerState

from busload_runtime.server import connection
from busload_runtime.server.connection import HttpConnection

LONG = {"prompt": "hello", "max_tokens": 60_000, "ignore_eos": True}
ABORTED = 'busload_requests_finished_total{reason="abort"}'


def connect(server: LiveServer) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=30)


def request(**body: Any) -> bytes:
    content = json.dumps(body).encode()
    return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(content), content)


@pytest.mark.parametrize(
    "flood",
    [
        b"GET /" + b"a" * 70_000,
        b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 15_000,
        b"GET / HTTP/1.1\r\nx: " + b"y" * 70_000,
        b"GET / HTTP/1.1\r\nx: " + b"y" * 70_000 + b"\r\n\r\n",
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n",
    ],
)
def test_a_head_that_is_too_large_is_refused(tiny: LiveServer, flood: bytes) -> None:
    with connect(tiny) as client:
        client.sendall(flood)
        answer = client.makefile("rb").read()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 ")
    assert json.loads(body)["error"]["code"] == "request_head_too_large"


def test_what_is_not_http_gets_an_error_in_the_usual_shape(tiny: LiveServer) -> None:
    with connect(tiny) as client:
        client.sendall(b"\x16\x03\x01 this is TLS\r\n\r\n")
        head, _, body = client.makefile("rb").read().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["code"] == "invalid_http"


@pytest.mark.parametrize("size", [1, 7, 10_000])
@pytest.mark.parametrize("chunked", [False, True])
def test_another_protocol_on_offer_changes_nothing(tiny: LiveServer, size: int, chunked: bool) -> None:
    """As Java's HttpClient begins each connection; in packets of any size, with a request behind it."""
    content = b'{"prompt": "hello", "max_tokens": 3}'
    offer = b"Host: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQA\r\n"
    framing = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %d" % len(content)
    body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(content), content) if chunked else content
    post = b"POST /v1/completions HTTP/1.1\r\n%b%b\r\n\r\n%b" % (offer, framing, body)
    get = b"GET /v1/models HTTP/1.1\r\n%b\r\n" % offer
    last = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    with connect(tiny) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sent = post + get + post + last
        for start in range(0, len(sent), size):
            client.sendall(sent[start : start + size])
        answer = client.makefile("rb").read()
    assert answer.count(b"HTTP/1.1 200 OK") == 4, answer
    assert answer.count(b'"text_completion"') == 2
    assert answer.count(b'"object":"list"') == 1


def test_a_body_in_tiny_chunks_is_no_flood(tiny: LiveServer) -> None:
    body = json.dumps({"prompt": "hello " * 4000, "max_tokens": 1}).encode()  # 24 kB, six times that on the wire
    response = tiny.http.post("/v1/completions", content=iter([bytes([byte]) for byte in body]))
    assert response.status_code in (200, 400)
    assert response.status_code == 200 or response.json()["error"]["code"] == "context_length_exceeded"


def test_a_pipelining_client_that_leaves_frees_its_seat(tiny: LiveServer) -> None:
    eventually(lambda: tiny.level("vllm:num_requests_running") == 0)
    before = tiny.metrics()
    arrived, aborted = before["busload_requests_arrived_total"], before[ABORTED]
    long = {**LONG, "max_tokens": 4000}
    with connect(tiny) as client:
        client.sendall(request(**long) * 3)
        eventually(lambda: tiny.level("vllm:num_requests_running") == 1)
    eventually(lambda: tiny.level("vllm:num_requests_running") == 0)
    after = tiny.metrics()
    assert after["busload_requests_arrived_total"] == arrived + 1
    assert after[ABORTED] == aborted + 1


def test_more_idle_connections_than_the_soft_limit_of_files(tiny_model: Path, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        server = LiveServer(tmp_path, f"--model={tiny_model}")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    try:
        clients = [connect(server) for _ in range(400)]
        assert server.http.get("/health/live").status_code == 200
        for client in clients:
            client.close()
    finally:
        server.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Wire(asyncio.Transport):
    """A transport that only notes how it was closed."""

    def __init__(self, socket: socket.socket | None = None) -> None:
        super().__init__({"socket": socket} if socket else None)
        self.ended = ""

    def is_closing(self) -> bool:
        return bool(self.ended)

    def close(self) -> None:
        self.ended = self.ended or "closed"

    def abort(self) -> None:
        self.ended = "aborted"

    def write(self, data: Any) -> None: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Iterator[Wire]:
    monkeypatch.setattr(connection, "KEEP_ALIVE_SECONDS", 0.01)
    monkeypatch.setattr(connection, "_UNREAD_SECONDS", 0.01)
    here, there = socket.socketpair()
    with here, there:
        yield Wire(here)


def after(wire: Wire, act: Any) -> str:
    """How the connection ended some time after `act`."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(60)

    async def live() -> str:
        subject = HttpConnection(Config(app, lifespan="off"), ServerState(), {})
        subject.connection_made(wire)
        act(subject)
        await asyncio.sleep(0.1)
        ended = wire.ended
        for task in subject.tasks:
            task.cancel()
        return ended

    return asyncio.run(live())


def test_a_client_that_sends_no_whole_head_is_closed(wire: Wire) -> None:
    assert after(wire, lambda subject: subject.data_received(b"GET / HTTP/1.1\r\nx: ")) == "closed"


def test_a_request_in_work_is_not_closed(wire: Wire) -> None:
    assert after(wire, lambda subject: subject.data_received(b"GET / HTTP/1.1\r\n\r\nGET /")) == ""


def test_a_client_that_reads_nothing_is_dropped(wire: Wire) -> None:
    def act(subject: HttpConnection) -> None:
        subject.data_received(b"GET / HTTP/1.1\r\n\r\n")
        subject.pause_writing()

    assert after(wire, act) == "aborted"


def test_a_client_that_reads_again_is_kept(wire: Wire) -> None:
    def act(subject: HttpConnection) -> None:
        subject.data_received(b"GET / HTTP/1.1\r\n\r\n")
        subject.pause_writing()
        subject.resume_writing()

    assert after(wire, act) == ""


def test_requests_that_wait_behind_another_stay_bytes(wire: Wire) -> None:
    """Parsed, they take a hundred times the memory, for as long as the first one runs."""
    held: list[int] = []

    def act(subject: HttpConnection) -> None:
        subject.data_received(b"GET / HTTP/1.1\r\n\r\n" * 10_000)
        held.append(len(subject.pipeline))

    assert after(wire, act) == ""
    assert 0 < held[0] < 300


def test_what_comes_behind_a_last_request_is_not_served(wire: Wire) -> None:
    paths: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        paths.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    async def live() -> None:
        subject = HttpConnection(Config(app, lifespan="off", log_config=None), ServerState(), {})
        subject.connection_made(wire)
        subject.data_received(
            b"GET /a HTTP/1.1\r\n\r\nGET /b HTTP/1.1\r\nConnection: close\r\n\r\n" + b"GET /c HTTP/1.1\r\n\r\n" * 500
        )
        await asyncio.sleep(0.1)

    asyncio.run(live())
    assert paths == ["/a", "/b"]
    assert wire.ended == "closed"


@pytest.mark.parametrize("leaves", [True, False])
def test_a_client_that_leaves_while_its_requests_wait_is_noticed(monkeypatch: pytest.MonkeyPatch, leaves: bool) -> None:
    """Nothing is read while a request waits behind another, and an answer in one piece writes nothing."""
    monkeypatch.setattr(connection, "_LOOK_SECONDS", 0.01)
    here, there = socket.socketpair()
    with here, there:

        def act(subject: HttpConnection) -> None:
            subject.data_received(b"GET / HTTP/1.1\r\n\r\n" * 2)
            if leaves:
                there.close()

        assert after(Wire(here), act) == ("aborted" if leaves else "")
