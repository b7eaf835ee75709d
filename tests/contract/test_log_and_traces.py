"""What a request leaves behind: a line without its prompt, or with it where asked for, and a span at a collector."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from live_server import LiveServer, eventually, running
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

SECRET = "a purple giraffe"
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"


class Collector(ThreadingHTTPServer):
    """Takes OTLP over HTTP and keeps the spans."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.paths: list[str] = []
        self.batches: list[ExportTraceServiceRequest] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1/traces"


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.paths.append(self.path)
        self.server.batches.append(ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_prompt_is_logged_only_where_asked_for_and_a_span_reaches_the_collector(
    server: LiveServer, collector: Collector, tmp_path: Path
) -> None:
    chat = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 2}
    assert server.http.post("/v1/chat/completions", json=chat).status_code == 200
    assert server.complete(prompt=SECRET, max_tokens=0).status_code == 400
    eventually(lambda: server.lines()[-1]["status"] == 400)
    assert SECRET not in server.log
    flags = ("--log-prompts", f"--otlp-endpoint={collector.url}", "--max-sequence-length=512")
    with running(tmp_path, *flags) as talkative:
        answer = talkative.http.post(
            "/v1/chat/completions", json=chat, headers={"traceparent": f"00-{TRACE_ID}-b7ad6b7169203331-01"}
        )
        assert answer.status_code == 200
        eventually(lambda: talkative.lines())
        assert SECRET in json.dumps(talkative.lines()[-1]["prompts"])
        talkative.process.terminate()
        assert talkative.wait() == 0, "and sends its last spans before it ends"
    assert set(collector.paths) == {"/v1/traces"}
    (span,) = [s for batch in collector.batches for r in batch.resource_spans for x in r.scope_spans for s in x.spans]
    assert span.trace_id.hex() == TRACE_ID
    assert span.name == "chat smollm2-135m-instruct"
    assert [event.name for event in span.events] == ["prefill", "decode"]
    assert SECRET not in str(span)


def test_a_collector_that_is_not_there_stops_nothing(tmp_path: Path, tiny: Path) -> None:
    flags = ("--otlp-endpoint=http://127.0.0.1:9/v1/traces", "--log-format=text", "--max-sequence-length=512")
    with running(tmp_path, f"--model={tiny}", *flags) as server:
        assert server.complete(prompt="Hello", max_tokens=2, ignore_eos=True).status_code == 200
        eventually(lambda: "POST  /v1/completions  200  length  prompt 4  cached 0  output 2" in server.log)
        server.process.terminate()
        assert server.wait() == 0
