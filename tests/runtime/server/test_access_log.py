"""The line of a request: what it tells, and that a client cannot forge one."""

import json
import time

import pytest

from busload_runtime.server import access_log
from busload_runtime.server.tenants import ANYBODY, tenant_of_header
from busload_runtime.server.trace import Trace


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    written: list[str] = []
    monkeypatch.setattr(access_log, "write_line", written.append)
    return written


def test_json_holds_what_is_known_and_nothing_else(lines: list[str]) -> None:
    trace = Trace("abc", time.monotonic() - 1, 7, 5, 0, 0.25, 0.5, "stop", tenant_of_header("somebody"))
    access_log.log_request("POST", "/v1/completions", 200, trace, "json")
    access_log.log_request("GET", "/v1/models", 200, Trace("def", time.monotonic()), "json")
    first, second = map(json.loads, lines)
    assert first.pop("seconds") == pytest.approx(1, abs=0.5)
    assert first.pop("time").endswith("Z")
    assert first == {
        "id": "abc",
        "method": "POST",
        "path": "/v1/completions",
        "tenant": tenant_of_header("somebody").label,
        "status": 200,
        "prompt_tokens": 7,
        "cached_tokens": 0,
        "output_tokens": 5,
        "queue_seconds": 0.25,
        "ttft_seconds": 0.5,
        "reason": "stop",
    }
    assert second.keys() == {"time", "id", "method", "path", "status", "seconds"}


def test_text_is_one_line_whatever_the_client_sent(lines: list[str]) -> None:
    trace = Trace("abc", time.monotonic(), 7, 5, 0, 0.25, 0.5, "stop", ANYBODY, prompts=["one\ntwo \x1b[31m"])
    access_log.log_request("POST", "/v1/x\n2026-01-01T00:00:00Z  POST\x1b]0;x", 404, trace, "text")
    (line,) = lines
    assert line.isprintable()
    assert "  404  stop  prompt 7  cached 0  output 5  queue 0.25 s  first token 0.5 s  whole " in line
    assert r"one\ntwo \u001b[31m" in line


def test_a_tenants_name_is_nowhere() -> None:
    tenant = tenant_of_header("Jane Doe")
    assert "jane" not in f"{tenant}".lower()
    assert tenant == tenant_of_header("Jane Doe") != tenant_of_header("jane doe")
