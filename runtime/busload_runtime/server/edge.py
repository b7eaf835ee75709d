"""The outermost layer of the app: arrival time, request id, connection closing, one log line per request."""

import secrets
import time

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from busload_runtime.server.access_log import log_request
from busload_runtime.server.connection import EXTENSION, HttpConnection
from busload_runtime.server.errors import ApiError
from busload_runtime.server.service import Service
from busload_runtime.server.tenants import ANYBODY, Tenant, tenant_of_header
from busload_runtime.server.trace import Trace


class Edge:
    """ASGI middleware around the whole app (plain ASGI, so that streaming and disconnects pass untouched)."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # A client's own request id is never used as a key: two live requests may carry the same one.
        trace = Trace(secrets.token_hex(16), time.monotonic())
        scope.setdefault("state", {})["trace"] = trace
        connection: HttpConnection | None = scope.get("extensions", {}).get(EXTENSION, {}).get("connection")
        trace.promised = connection is not None and connection.promised
        status = 0

        async def send_marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = trace.id
                if self._service.quiescing:
                    headers["connection"] = "close"
                if connection is not None:
                    connection.promised = not self._service.quiescing
            await send(message)

        self._service.open_responses += 1
        try:
            trace.tenant = self._tenant(scope)
            # HEAD is GET without the content (RFC 9110, 9.3.2), which the connection leaves out by the scope it made.
            routed = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
            await self._app(routed, receive, send_marked)
        except ApiError as error:  # of this layer; the app answers its own
            trace.reason = error.code
            self._service.metrics.refused(error.reason or "invalid")
            await error.response()(scope, receive, send_marked)
        finally:
            self._service.open_responses -= 1
            if status not in (200, 503) or not _is_open(scope["path"]):
                self._tell(scope, status, trace)

    def _tell(self, scope: Scope, status: int, trace: Trace) -> None:
        service, path = self._service, scope["path"]
        log_request(scope["method"], path, status, trace, service.log_format)
        if service.tracing is not None:
            service.tracing.record(path, dict(Headers(scope=scope)), status, trace)

    def _tenant(self, scope: Scope) -> Tenant:
        """Whose request it is. Raises `ApiError` 401 where a key is needed and missing."""
        headers, keys, name = Headers(scope=scope), self._service.keys, self._service.tenant_header
        if keys is not None:
            return ANYBODY if _is_open(scope["path"]) else keys.owner(headers.get("authorization"))
        value = headers.get(name) if name else None
        return tenant_of_header(value) if value else ANYBODY


def _is_open(path: str) -> bool:
    """Probes and scrapers come every few seconds, from inside the cluster, without a key, and see no text. They are not
    logged either: a 503 is one of their normal answers."""
    return path in ("/metrics", "/health") or path.startswith("/health/")
