"""Spans: one per request, at the right times, below the client's own, and nothing of it where it is not asked for."""

import subprocess
import sys
import time

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from busload_runtime.server.errors import StartupError
from busload_runtime.server.tenants import Tenant
from busload_runtime.server.trace import Trace
from busload_runtime.server.tracing import Tracing, start_tracing

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracing(exporter: InMemorySpanExporter) -> Tracing:
    return Tracing("tiny", SimpleSpanProcessor(exporter))


def done(**known: object) -> Trace:
    trace = Trace("abc", time.monotonic() - 2.0, 7, 5, 4, 0.5, 1.25, "stop", Tenant("key:web", "web"))
    for name, value in known.items():
        setattr(trace, name, value)
    return trace


def test_a_span_tells_the_whole_way_of_a_request(tracing: Tracing, exporter: InMemorySpanExporter) -> None:
    tracing.record("/v1/chat/completions", {"traceparent": f"{PARENT}01"}, 200, done())
    (span,) = exporter.get_finished_spans()
    assert (span.name, span.kind.name, span.status.status_code.name) == ("chat tiny", "SERVER", "UNSET")
    assert span.context is not None
    assert span.parent is not None
    assert f"{span.context.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
    assert f"{span.parent.span_id:016x}" == "b7ad6b7169203331"
    assert span.start_time is not None
    assert span.end_time is not None
    assert (span.end_time - span.start_time) / 1e9 == pytest.approx(2.0, abs=0.5)
    events = {event.name: (event.timestamp - span.start_time) / 1e9 for event in span.events}
    assert events == {"prefill": pytest.approx(0.5), "decode": pytest.approx(1.25)}
    assert span.attributes is not None
    attributes = dict(span.attributes)
    assert attributes["gen_ai.usage.input_tokens"] == 7
    assert attributes["gen_ai.usage.output_tokens"] == 5
    assert attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert attributes["busload.tenant"] == "web"
    assert attributes["busload.request_id"] == "abc"
    assert "error.type" not in attributes


def test_a_refusal_names_its_reason_and_a_failure_is_an_error(tracing: Tracing, exporter: InMemorySpanExporter) -> None:
    refused = done(queue_seconds=None, first_token_seconds=None, output_tokens=None, reason="queue_full")
    tracing.record("/v1/completions", {}, 429, refused)
    tracing.record("/v1/completions", {}, 500, done(reason="engine_error"))
    first, second = exporter.get_finished_spans()
    assert first.attributes is not None
    assert first.attributes["error.type"] == "queue_full"
    assert not first.events
    assert [span.status.status_code.name for span in (first, second)] == ["UNSET", "ERROR"]
    assert first.parent is None


def test_who_says_not_sampled_is_not_traced(tracing: Tracing, exporter: InMemorySpanExporter) -> None:
    tracing.record("/v1/completions", {"traceparent": f"{PARENT}00"}, 200, done())
    assert exporter.get_finished_spans() == ()


def test_hostile_trace_headers_and_other_paths_do_no_harm(tracing: Tracing, exporter: InMemorySpanExporter) -> None:
    tracing.record("/health/live", {}, 200, done())
    tracing.record("/metrics", {}, 200, done())
    assert exporter.get_finished_spans() == ()
    for header in ("", "x", f"{PARENT}", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "é" * 5000):
        tracing.record("/v1/completions", {"traceparent": header, "tracestate": header}, 200, done())
    assert [span.parent for span in exporter.get_finished_spans()] == [None] * 5


def test_without_the_extra_the_flag_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(StartupError, match=r"pip install 'busload\[otel\]'"):
        start_tracing("tiny", "http://127.0.0.1:4318/v1/traces")


def test_without_the_flag_nothing_of_it_is_imported() -> None:
    parts = ("opentelemetry.sdk", "opentelemetry.exporter")  # FastAPI imports the API where it is there
    code = f"import sys, busload_runtime.server.lifecycle; sys.exit(any(m.startswith({parts}) for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
