"""The only place that talks to the Kubernetes API: raw calls, JSON in, JSON out, a deadline on each, typed errors.

The generated typed API classes are not used: they drop fields they do not know, cost 25 MB of memory, and the custom
objects class loses the answer of an apply that creates.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from kubernetes.aio import client, config
from kubernetes.aio.config.config_exception import ConfigException

from busload_operator.control import metrics
from busload_operator.control.kinds import Kind, Object

APPLY = "application/apply-patch+yaml"
MERGE = "application/merge-patch+json"
_JSON = "application/json"
_PAGE = 500
# Server-side apply answers schema errors with 500 and this text; trying again cannot help.
_SCHEMA_ERROR = "failed to create typed patch object"


class ApiError(Exception):
    """A call that did not succeed. `status` 0: no answer (refused, reset, deadline passed)."""

    def __init__(self, verb: str, path: str, status: int, reason: str, message: str, retry_after: float = 0.0):
        super().__init__(f"{verb} {path}: {status or 'no answer'} {reason}: {message}".rstrip(": "))
        self.verb, self.path, self.status, self.reason = verb, path, status, reason
        self.message = message
        self.retry_after = retry_after
        """Seconds the server asked to wait; 0 when it did not say."""

    @property
    def permanent(self) -> bool:
        """True when the same call cannot succeed later: the body, or what it asks for, is wrong."""
        if self.status == 500:
            return _SCHEMA_ERROR in self.message
        return self.status in (400, 405, 413, 415, 422)

    @property
    def namespace_terminating(self) -> bool:
        return self.status == 403 and "because it is being terminated" in self.message


class Client:
    """Calls of one API server. Made by `connect`."""

    def __init__(self, api: client.ApiClient, timeout: float = 10.0):
        self._api, self.timeout = api, timeout

    @property
    def configuration(self) -> client.Configuration:
        """Address and credentials, for the watches, which use their own connections."""
        configuration: client.Configuration = self._api.configuration
        return configuration

    async def call(
        self, verb: str, path: str, body: Any = None, content: str = _JSON, deadline: float | None = None, **query: str
    ) -> Object:
        """One request. Raises `ApiError`; the deadline covers the wait for a free connection too."""
        started, status = time.monotonic(), 0
        try:
            status, headers, data = await self._send(verb, path, body, content, deadline or self.timeout, query)
        except (TimeoutError, OSError, aiohttp.ClientError) as error:
            raise ApiError(verb, path, 0, type(error).__name__, str(error)) from None
        finally:
            metrics.observe_request(verb, path, status, time.monotonic() - started)
        if status >= 300:
            raise _error(verb, path, status, headers, data)
        try:
            answer = json.loads(data)
        except (ValueError, RecursionError):  # a proxy in between, or an answer cut short
            answer = None
        if not isinstance(answer, dict):
            raise ApiError(verb, path, status, "UnexpectedAnswer", f"expected a JSON object, got {data[:80]!r}")
        return answer

    async def _send(
        self, verb: str, path: str, body: Any, content: str, deadline: float, query: dict[str, str]
    ) -> tuple[int, dict[str, str], str]:
        method, url, headers, body, _ = await self._api.param_serialize(
            verb,
            path,
            query_params=list(query.items()),
            body=body,
            auth_settings=["BearerToken"],
            header_params={"Accept": _JSON, "Content-Type": content},
        )
        response = await self._api.call_api(method, url, headers, body, _request_timeout=deadline)
        async with asyncio.timeout(deadline):
            data: bytes = await response.read()  # type: ignore[no-untyped-call]
        headers = dict(response.getheaders() or {})  # type: ignore[no-untyped-call]
        return response.status, headers, data.decode(errors="replace")

    async def one(
        self, verb: str, path: str, body: Any = None, content: str = _JSON, deadline: float | None = None, **query: str
    ) -> Object:
        """Like `call`, for an answer that is one object: without a version it is none, and `ApiError` is raised."""
        answer = await self.call(verb, path, body, content, deadline, **query)
        if not _version(answer):
            raise ApiError(verb, path, 200, "UnexpectedAnswer", f"expected an object, got {str(answer)[:80]}")
        return answer

    async def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        """The object, or None when it does not exist."""
        try:
            return await self.one("GET", kind.path(namespace, name))
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def list(self, kind: Kind, namespace: str = "") -> tuple[list[Object], str]:
        """All objects of a kind (its selector applied) and the resourceVersion at which they were listed."""
        items: list[Object] = []
        query = {"limit": str(_PAGE)} | ({"labelSelector": kind.selector} if kind.selector else {})
        while True:
            path = kind.path(namespace)
            page = await self.call("GET", path, deadline=max(30.0, self.timeout), **query)
            if not (version := _version(page)):  # taken for an empty list, it would drop all
                raise ApiError("GET", path, 200, "UnexpectedAnswer", f"expected a list, got {str(page)[:80]}")
            items += page.get("items") or []
            token = page["metadata"].get("continue")
            if not token:
                return items, version
            query["continue"] = token

    async def apply(self, kind: Kind, body: Object, manager: str, subresource: str = "") -> Object:
        """Server-side apply; conflicts are forced, because the operator owns each field it sends."""
        metadata = body["metadata"]
        path = kind.path(metadata["namespace"], metadata["name"], subresource)
        return await self.one("PATCH", path, body, APPLY, fieldManager=manager, force="true")

    async def merge(self, kind: Kind, namespace: str, name: str, body: Object, manager: str) -> Object:
        """JSON merge patch, for a single field of an object that is not ours to apply."""
        return await self.one("PATCH", kind.path(namespace, name), body, MERGE, fieldManager=manager)

    async def delete(self, kind: Kind, obj: Object) -> None:
        """Deletes exactly this object (by uid); one that is gone already is fine."""
        metadata = obj["metadata"]
        path = kind.path(metadata["namespace"], metadata["name"])
        try:
            await self.call("DELETE", path, {"preconditions": {"uid": metadata["uid"]}})
        except ApiError as error:
            if error.status != 404:
                raise


def _version(answer: Object) -> str:
    """The resourceVersion of an object or a list; empty when there is none that is a number."""
    metadata = answer.get("metadata")
    version = str(metadata.get("resourceVersion")) if isinstance(metadata, dict) else ""
    return version if version.isdecimal() else ""


def _error(verb: str, path: str, status: int, headers: dict[str, str], data: str) -> ApiError:
    try:
        body = json.loads(data)
    except ValueError:
        body = {}
    if not isinstance(body, dict):
        body = {}
    message = str(body.get("message") or data.strip()[:500])
    lowered = {name.lower(): value for name, value in headers.items()}
    return ApiError(verb, path, status, str(body.get("reason") or ""), message, _seconds(lowered.get("retry-after")))


def _seconds(value: str | None) -> float:
    try:
        return min(300.0, max(0.0, float(value or 0)))
    except ValueError:  # an HTTP date; the API server sends seconds
        return 0.0


@asynccontextmanager
async def connect(user_agent: str, connections: int = 24) -> AsyncIterator[Client]:
    """A client from the pod's service account, else from the kubeconfig. Raises ConfigException when there is none."""
    configuration = client.Configuration()
    try:
        config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    except ConfigException:
        await config.load_kube_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    configuration.connection_pool_maxsize = connections
    # The watches ignore proxy variables; both roads to the same server must behave alike.
    configuration.client_session_kwargs = {"trust_env": False}
    async with client.ApiClient(configuration) as api:
        api.user_agent = user_agent
        yield Client(api)
