"""OpenTelemetry: one span per request, made when it has ended, so that it costs nothing on the way.

Needs the extra `otel` and `--otlp-endpoint`; without them nothing of it is imported. The span is a child of the
`traceparent` that a client sent (W3C Trace Context), and is dropped where that says "not sampled". Names follow the
semantic conventions for generative AI and HTTP, as far as they cover it; `busload.*` is ours.
"""

import time
from typing import TYPE_CHECKING, Any

from busload_runtime.server.errors import StartupError
from busload_runtime.server.tenants import ANYBODY
from busload_runtime.server.trace import Trace

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

_OPERATIONS = {"/v1/completions": "text_completion", "/v1/chat/completions": "chat"}
"""Paths that are traced, and what the conventions call them."""


class Tracing:
    """Makes spans. `close` sends what is left."""

    def __init__(self, model_name: str, processor: "SpanProcessor") -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._model_name = model_name
        resource = Resource.create({"service.name": "busload"})  # OTEL_SERVICE_NAME and the like go before it
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("busload")
        self._propagator = TraceContextTextMapPropagator()

    def record(self, path: str, headers: dict[str, str], status: int, trace: Trace) -> None:
        """The span of a request that has just ended; `headers` by lower-case name."""
        operation = _OPERATIONS.get(path)
        if operation is None:
            return
        from opentelemetry.trace import SpanKind, StatusCode

        end = time.time_ns()
        begin = end - round(1e9 * (time.monotonic() - trace.arrival))
        span = self._tracer.start_span(
            f"{operation} {self._model_name}",
            context=self._propagator.extract(headers),
            kind=SpanKind.SERVER,
            attributes=self._attributes(operation, path, status, trace),
            start_time=begin,
        )
        for name, seconds in (("prefill", trace.queue_seconds), ("decode", trace.first_token_seconds)):
            if seconds is not None:
                span.add_event(name, timestamp=begin + round(1e9 * seconds))
        if status >= 400 or status == 0:
            span.set_attribute("error.type", trace.reason or str(status))
        if status >= 500 or trace.reason in ("engine_error", "stalled"):
            span.set_status(StatusCode.ERROR, trace.reason)
        span.end(end)

    def close(self) -> None:
        """Sends what has ended; without an answer from the collector it gives up after some seconds."""
        self._provider.shutdown()

    def _attributes(self, operation: str, path: str, status: int, trace: Trace) -> dict[str, Any]:
        known = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "busload",
            "gen_ai.request.model": self._model_name,
            "gen_ai.usage.input_tokens": trace.prompt_tokens,
            "gen_ai.usage.output_tokens": trace.output_tokens,
            "gen_ai.usage.cache_read.input_tokens": trace.cached_tokens,
            "gen_ai.response.finish_reasons": tuple(trace.reason.split(",")) if trace.reason else None,
            "http.request.method": "POST",
            "http.response.status_code": status or None,
            "url.path": path,
            "busload.request_id": trace.id,
            "busload.tenant": None if trace.tenant is ANYBODY else trace.tenant.label,
            "busload.queue_seconds": trace.queue_seconds,
            "busload.time_to_first_token_seconds": trace.first_token_seconds,
        }
        return {name: value for name, value in known.items() if value is not None}


def start_tracing(model_name: str, endpoint: str) -> Tracing:
    """Traces to an OTLP collector over HTTP, in batches, from a thread. Raises `StartupError`."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise StartupError(
            f"--otlp-endpoint needs packages that are missing ({error.name}): pip install 'busload[otel]', or drop it"
        ) from None
    return Tracing(model_name, BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=5)))
