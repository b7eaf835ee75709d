"""What HTTP/1 says and servers get wrong: order of answers, trailers, old clients, bodies that are not as they say."""

import contextlib
import gzip
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from live_server import MEMORY, LiveServer, eventually

BODY = json.dumps({"prompt": "hello", "max_tokens": 3, "temperature": 0}).encode()
STREAM = json.dumps({"prompt": "hello", "max_tokens": 200, "stream": True, "ignore_eos": True}).encode()


def connect(server: LiveServer) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=30)


def post(body: bytes, *fields: str, version: str = "1.1", size: int | None = None) -> bytes:
    length = f"Content-Length: {len(body) if size is None else size}"
    return "\r\n".join((f"POST /v1/completions HTTP/{version}", "Host: x", length, *fields, "", "")).encode() + body


def chunked(*chunks: bytes, fields: str = "", behind: bytes = b"0\r\n\r\n") -> bytes:
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n{fields}\r\n".encode()
    return head + b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + behind


def told(server: LiveServer, sent: bytes) -> bytes:
    """All that the server says until it closes."""
    with connect(server) as client:
        client.sendall(sent)
        return client.makefile("rb").read()


def answers(said: bytes) -> list[tuple[int, Any]]:
    """Status and content of each answer; every one must have a length."""
    found = []
    while said:
        head, _, rest = said.partition(b"\r\n\r\n")
        status, fields = int(head.split()[1]), head.lower().split(b"\r\n")
        (length,) = (int(field.partition(b":")[2]) for field in fields if field.startswith(b"content-length:"))
        found.append((status, json.loads(rest[:length])))
        said = rest[length:]
    return found


def code(content: Any) -> str:
    return str(content["error"]["code"])


@pytest.mark.parametrize("junk", [b"\0\0\r\n\r\n", b"GET / HTTP/1.1\r\nx: " + b"y" * 70_000])
def test_what_cannot_be_read_is_answered_behind_what_could(tiny: LiveServer, junk: bytes) -> None:
    first, second, refusal = answers(told(tiny, post(BODY) * 2 + junk))
    assert first[0] == second[0] == 200
    assert first[1]["choices"] == second[1]["choices"]
    assert code(refusal[1]) in ("invalid_http", "request_head_too_large")


def test_junk_behind_a_stream_does_not_get_into_it(tiny: LiveServer) -> None:
    said = told(tiny, post(STREAM) + b"\0\0\r\n\r\n")
    stream, end, refusal = said.partition(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert end
    assert stream.count(b"HTTP/1.1") == 1
    assert code(answers(refusal)[0][1]) == "invalid_http"


def test_a_body_longer_than_it_says_is_answered_as_far_as_it_goes(tiny: LiveServer) -> None:
    first, refusal = answers(told(tiny, post(BODY + b" and more", size=len(BODY))))
    assert (first[0], code(refusal[1])) == (200, "invalid_http")


@pytest.mark.parametrize("behind", [b"zz\r\n", b"-1\r\nabc\r\n", b"ffffffffffffffffff\r\n", b"3\r\nabcdef\r\n"])
def test_a_body_that_breaks_off_has_one_answer(tiny: LiveServer, behind: bytes) -> None:
    ((status, content),) = answers(told(tiny, chunked(b'{"prompt":', behind=behind)))
    assert (status, code(content)) == (400, "invalid_http")
    first, refusal = answers(told(tiny, post(BODY) + chunked(b'{"prompt":', behind=behind)))
    assert (first[0], code(refusal[1])) == (200, "invalid_http")


def test_a_body_that_has_its_answer_has_no_second_one(tiny: LiveServer) -> None:
    with connect(tiny) as client:
        client.sendall(chunked(b"x" * 2_000_000, behind=b""))
        said = client.recv(65536)
        client.sendall(b"zz\r\n")
        ((status, content),) = answers(said + client.makefile("rb").read())
    assert (status, code(content)) == (413, "request_too_large")


def test_fields_behind_a_body_are_not_those_of_its_head(tiny: LiveServer) -> None:
    """A gateway takes a client's own fields, such as the tenant, out of the head alone."""
    trailer = b"0\r\nX-Request-Timeout: nonsense\r\n\r\n"
    ((status, _),) = answers(told(tiny, chunked(BODY, fields="Connection: close\r\n", behind=trailer)))
    assert status == 200
    ((status, content),) = answers(
        told(tiny, chunked(BODY, fields="Connection: close\r\nX-Request-Timeout: nonsense\r\n"))
    )
    assert (status, content["error"]["param"]) == (400, "X-Request-Timeout")


@pytest.mark.parametrize("fields", [(), ("Connection: keep-alive",), ("Expect: 100-continue",)])
def test_a_client_of_http_1_0_gets_no_chunks(tiny: LiveServer, fields: tuple[str, ...]) -> None:
    head, _, stream = told(tiny, post(STREAM, *fields, version="1.0")).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head.lower()
    events = stream.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(json.loads(event.removeprefix("data: "))["choices"] for event in events[:-2])
    ((status, _),) = answers(told(tiny, post(BODY, *fields, version="1.0")))
    assert status == 200


@pytest.mark.parametrize("fields", [("Expect: 100-continue",), ()])
def test_a_client_that_waits_for_leave_to_send_gets_it(tiny: LiveServer, fields: tuple[str, ...]) -> None:
    with connect(tiny) as client:
        client.sendall(post(b"", *fields, "Connection: close", size=len(BODY)))
        leave = client.recv(1024) if fields else b""
        assert leave == (b"HTTP/1.1 100 Continue\r\n\r\n" if fields else b"")
        client.sendall(BODY)
        ((status, _),) = answers(client.makefile("rb").read())
    assert status == 200


def test_a_refusal_needs_no_body_from_a_client_that_waits_for_leave(tiny: LiveServer) -> None:
    said = told(tiny, post(b"", "Expect: 100-continue", "Connection: close", size=10**9))
    ((status, content),) = answers(said)
    assert (status, code(content)) == (413, "request_too_large")


def test_a_length_with_many_zeros_is_a_length(tiny: LiveServer) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: "
    ((status, _),) = answers(told(tiny, head + b"0" * 5000 + b"%d\r\n\r\n" % len(BODY) + BODY))
    assert status == 200


@pytest.mark.parametrize("encoding", ["gzip", "br", "identity", "IDENTITY"])
def test_a_compressed_body_is_refused_by_name(tiny: LiveServer, encoding: str) -> None:
    plain = encoding.lower() == "identity"
    response = tiny.http.post(
        "/v1/completions",
        content=BODY if plain else gzip.compress(BODY),
        headers={"Content-Encoding": encoding},
    )
    if plain:
        assert response.status_code == 200
    else:
        assert (response.status_code, code(response.json())) == (415, "unsupported_content_encoding")
        assert response.headers["accept-encoding"] == "identity"


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("GET http://elsewhere:1/health/live?a=b HTTP/1.1", 200),
        ("OPTIONS /v1/chat/completions HTTP/1.1\r\nOrigin: http://a\r\nAccess-Control-Request-Method: POST", 405),
        ("CONNECT elsewhere:443 HTTP/1.1", 400),
        ("OPTIONS * HTTP/1.1", 404),
        ("TRACE /v1/models HTTP/1.1", 405),
        ("GET /%00%ff%0d%0a HTTP/1.1", 404),
        ("GET /v1/models/a%2Fb%3F HTTP/1.1", 404),
    ],
)
def test_unusual_targets_are_answered_in_the_usual_shape(tiny: LiveServer, head: str, status: int) -> None:
    ((found, content),) = answers(told(tiny, f"{head}\r\nHost: x\r\nConnection: close\r\n\r\n".encode()))
    assert found == status, content
    assert found == 200 or set(content["error"]) == {"message", "type", "param", "code"}


def test_thousands_of_requests_at_once_on_one_connection(tiny: LiveServer) -> None:
    sent = b"GET /health/live HTTP/1.1\r\nHost: x\r\n\r\n" * 3000
    last = b"GET /health/live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    with connect(tiny) as client:
        writing = threading.Thread(target=client.sendall, args=(sent + last,))
        writing.start()
        said = client.makefile("rb").read()
        writing.join()
    assert said.count(b"HTTP/1.1 200 OK") == 3001


def test_closed_standard_streams_take_no_connection(tiny_model: Path) -> None:
    """What is written to stderr must not end up in a client's answer."""
    command = f'exec "$0" -m busload_operator.cli serve --model={tiny_model} --port=0 --memory={MEMORY} <&- >&- 2>&-'
    process = subprocess.Popen(["bash", "-c", command, sys.executable])

    def opened() -> list[str]:
        with contextlib.suppress(FileNotFoundError):
            return [os.readlink(f"/proc/{process.pid}/fd/{number}") for number in range(3)]
        return []

    try:
        eventually(lambda: opened() == ["/dev/null"] * 3)
    finally:
        process.kill()
        process.wait()
