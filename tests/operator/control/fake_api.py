"""An API server in memory, for faults that a real one cannot be made to show on demand.

It knows what the operator relies on: resource versions, generations that move with the spec, the status apart, paged
lists with label selectors, watches that end with 410 after a restart, server-side apply with managedFields, uid and
resourceVersion preconditions. `calls` is the audit log; `fail`, `hang` and `restart` are the faults. What it does not
know (admission, defaults, garbage collection, controllers) is shown on a real cluster, in e2e.
"""

import asyncio
import copy
import itertools
import json
from collections import deque
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from aiohttp import web

GROUPS = {  # kopf waits until namespaces and definitions are discovered, also where it never reads them
    "": {"v1": ["namespaces", "pods", "configmaps", "services", "serviceaccounts", "events"]},
    "apps": {"v1": ["deployments"]},
    "coordination.k8s.io": {"v1": ["leases"]},
    "apiextensions.k8s.io": {"v1": ["customresourcedefinitions"]},
    "busload.dev": {"v1alpha1": ["inferenceservices"]},
}
KINDS = {
    "namespaces": "Namespace", "customresourcedefinitions": "CustomResourceDefinition",
    "pods": "Pod", "configmaps": "ConfigMap", "services": "Service", "serviceaccounts": "ServiceAccount",
    "events": "Event", "deployments": "Deployment", "leases": "Lease", "inferenceservices": "InferenceService",
}  # fmt: skip
LIST_KEYS = {  # the key fields of lists that are maps, and their defaults
    "containers": {"name": None}, "volumes": {"name": None}, "env": {"name": None}, "conditions": {"type": None},
    "volumeMounts": {"mountPath": None}, "ownerReferences": {"uid": None},
    "topologySpreadConstraints": {"topologyKey": None, "whenUnsatisfiable": None},
}  # fmt: skip
ATOMIC_MAPS = {"selector", "matchLabels"}


@dataclass
class Fault:
    verb: str
    part: str
    status: int
    body: str
    headers: dict[str, str]
    times: int


@dataclass
class Call:
    verb: str
    path: str
    status: int


class FakeApi:
    """Use `async with`; `kubeconfig` then names a file that leads here."""

    def __init__(self, directory: Any):
        self.directory = directory
        self.objects: dict[tuple[str, str, str], dict[str, Any]] = {}
        self.calls: list[Call] = []
        self.faults: list[Fault] = []
        self.hanging: set[str] = set()
        self.terminating: set[str] = set()
        self.served = {group: {v: list(names) for v, names in versions.items()} for group, versions in GROUPS.items()}
        self._version = itertools.count(100)
        self._at = 100
        self._log: deque[tuple[int, str, str, dict[str, Any]]] = deque()
        self._since = 0
        self._changed = asyncio.Condition()
        self._epoch = 0

    async def __aenter__(self) -> "FakeApi":
        app = web.Application(client_max_size=1 << 24)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"
        self.kubeconfig = self.directory / "kubeconfig"
        self.kubeconfig.write_text(json.dumps({
            "apiVersion": "v1", "kind": "Config", "current-context": "fake",
            "clusters": [{"name": "fake", "cluster": {"server": self.url}}],
            "users": [{"name": "fake", "user": {"token": "secret"}}],
            "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "fake"}}],
        }))  # fmt: skip
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.restart()  # ends the watches
        await self.runner.cleanup()

    # What tests do to it -----------------------------------------------------------------------------------------

    def fail(self, verb: str, part: str, status: int, body: Any = "", times: int = 1, **headers: str) -> None:
        """Answers the next calls of this verb whose path contains `part` with an error."""
        text = body if isinstance(body, str) else json.dumps(body)
        self.faults.append(Fault(verb, part, status, text, {k.replace("_", "-"): v for k, v in headers.items()}, times))

    async def restart(self) -> None:
        """Ends all watches and forgets history: a watch from an older version gets 410."""
        self._epoch += 1
        self._since = self._at
        self._log.clear()
        async with self._changed:
            self._changed.notify_all()

    async def put(self, plural: str, obj: dict[str, Any], manager: str = "someone") -> dict[str, Any]:
        """Creates or replaces an object, as a user or another controller would."""
        key = (plural, obj["metadata"]["namespace"], obj["metadata"]["name"])
        return await self._store(key, copy.deepcopy(obj), manager)

    async def remove(self, plural: str, namespace: str, name: str, silently: bool = False) -> None:
        """Deletes an object; `silently`: without any watch event, as if it happened in a gap."""
        old = self.objects.pop((plural, namespace, name))
        if not silently:
            await self._announce("DELETED", plural, self._stamp(copy.deepcopy(old)))

    def get(self, plural: str, namespace: str, name: str) -> dict[str, Any] | None:
        return self.objects.get((plural, namespace, name))

    def writes(self) -> list[Call]:
        """Successful or not, everything that is no read, leases left out."""
        return [c for c in self.calls if c.verb not in ("GET", "WATCH") and "/leases" not in c.path]

    # The server --------------------------------------------------------------------------------------------------

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        verb = "WATCH" if request.query.get("watch") == "true" else request.method
        if request.headers.get("Authorization", "").lower() != "bearer secret":
            return web.json_response({"kind": "Status", "reason": "Unauthorized"}, status=401)
        for part in self.hanging:
            if part in request.path:
                await asyncio.sleep(3600)
        for fault in self.faults:
            if fault.verb == verb and fault.part in request.path and fault.times > 0:
                fault.times -= 1
                self.calls.append(Call(verb, request.path, fault.status))
                return web.Response(status=fault.status, text=fault.body, headers=fault.headers)
        call = Call(verb, request.path, 0)
        self.calls.append(call)
        try:
            status, body = 200, await self._route(request, verb, call)
            if isinstance(body, web.StreamResponse):
                return body
            if isinstance(body, tuple):
                status, body = body
        except web.HTTPException as error:
            status, body = error.status, {"kind": "Status", "message": error.text, "reason": error.reason}
        call.status = status
        return web.json_response(body, status=status)

    async def _route(self, request: web.Request, verb: str, call: Call) -> Any:
        parts = request.path.strip("/").split("/")
        if parts[0] == "api":
            group, rest = "", parts[1:]
        else:
            group, rest = (parts[1], parts[2:]) if len(parts) > 1 else ("", [])
        if not rest or len(rest) == 1:
            return self._discovery(parts)
        _version, *rest = rest
        namespace = ""
        if rest[0] == "namespaces":
            namespace, rest = rest[1], rest[2:]
        plural, name, sub = (*rest, "", "")[:3]
        if plural not in itertools.chain(*self.served.get(group, {}).values()):
            raise web.HTTPNotFound(text="404 page not found")
        if verb == "WATCH":
            return await self._watch(request, plural, namespace, call)
        if not name:
            return (
                self._list(request, plural, namespace)
                if verb == "GET"
                else await self._create(request, plural, namespace)
            )
        return await self._one(request, verb, (plural, namespace, name), sub)

    def _discovery(self, parts: list[str]) -> Any:
        if parts == ["api"]:
            return {"kind": "APIVersions", "versions": ["v1"]}
        if parts == ["apis"]:
            groups = [
                {"name": g, "versions": [{"groupVersion": f"{g}/{v}", "version": v} for v in vs],
                 "preferredVersion": {"groupVersion": f"{g}/{next(iter(vs))}", "version": next(iter(vs))}}
                for g, vs in self.served.items() if g and any(vs.values())
            ]  # fmt: skip
            return {"kind": "APIGroupList", "groups": groups}
        group, version = ("", parts[1]) if parts[0] == "api" else (parts[1], parts[2] if len(parts) > 2 else "")
        names = self.served.get(group, {}).get(version)
        if not names:
            raise web.HTTPNotFound(text="404 page not found")
        verbs = ["get", "list", "watch", "create", "patch", "update", "delete"]
        resources = [
            {"name": n, "kind": KINDS[n], "namespaced": True, "singularName": "", "verbs": verbs} for n in names
        ]
        resources += [{**r, "name": f"{r['name']}/status"} for r in resources]
        return {"kind": "APIResourceList", "resources": resources}

    def _list(self, request: web.Request, plural: str, namespace: str) -> Any:
        items = [
            obj for (p, ns, _), obj in sorted(self.objects.items())
            if p == plural and namespace in ("", ns) and _selected(request, obj)
        ]  # fmt: skip
        start = int(request.query.get("continue") or 0)
        end = start + int(request.query.get("limit") or len(items) or 1)
        metadata: dict[str, Any] = {"resourceVersion": str(self._at)}
        if end < len(items):
            metadata["continue"] = str(end)
        return {"kind": f"{KINDS[plural]}List", "metadata": metadata, "items": items[start:end]}

    async def _watch(self, request: web.Request, plural: str, namespace: str, call: Call) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        call.status = 200
        await response.prepare(request)
        since, epoch = int(request.query.get("resourceVersion") or 0), self._epoch
        if since < self._since:
            await _send(response, "ERROR", {"kind": "Status", "code": 410, "message": "too old resource version"})
            return response
        while epoch == self._epoch:
            async with self._changed:
                pending = [entry for entry in self._log if entry[0] > since]
                if not pending:
                    await self._changed.wait()
            for at, kind, where, obj in pending:
                since = at
                if where == plural and namespace in ("", obj["metadata"]["namespace"]) and _selected(request, obj):
                    await _send(response, kind, obj)
        return response

    async def _create(self, request: web.Request, plural: str, namespace: str) -> Any:
        body = await request.json()
        key = (plural, namespace, body["metadata"]["name"])
        if key in self.objects:
            raise web.HTTPConflict(text="already exists")
        body["metadata"]["namespace"] = namespace
        return 201, await self._store(key, body, "someone")

    async def _one(self, request: web.Request, verb: str, key: tuple[str, str, str], sub: str) -> Any:
        old = self.objects.get(key)
        content = request.headers.get("Content-Type", "")
        if old is None and not (verb == "PATCH" and "apply" in content and not sub):
            raise web.HTTPNotFound(text=f"{key[0]} {key[2]!r} not found")
        if verb == "GET":
            return old
        body = await request.json() if request.can_read_body else {}
        wanted_uid = body.get("metadata", {}).get("uid") or body.get("preconditions", {}).get("uid")
        if wanted_uid and (old is None or old["metadata"]["uid"] != wanted_uid):
            raise web.HTTPConflict(text="Precondition failed: UID mismatch")
        if verb == "DELETE":
            await self.remove(*key)
            return {"kind": "Status", "status": "Success"}
        if old is None and key[1] in self.terminating:
            text = f"unable to create new content in namespace {key[1]} because it is being terminated"
            raise web.HTTPForbidden(text=text)
        if verb == "PUT":
            if body["metadata"].get("resourceVersion") != old["metadata"]["resourceVersion"]:
                raise web.HTTPConflict(text="the object has been modified")
            return await self._store(key, body, "someone")
        manager = request.query["fieldManager"]
        if "apply" in content:
            return (201 if old is None else 200), await self._apply(key, old, body, manager, sub)
        return await self._store(key, _merge_patch(copy.deepcopy(old), body), manager)

    async def _apply(self, key: Any, old: Any, body: Any, manager: str, sub: str) -> Any:
        content = {k: v for k, v in body.items() if k not in ("apiVersion", "kind", "metadata", "status")}
        content["metadata"] = {
            k: v for k, v in body["metadata"].items() if k in ("labels", "annotations", "ownerReferences")
        }
        if sub:
            content = {sub: body.get(sub, {})}
        fields = _fields(content)
        new = copy.deepcopy(old) if old else {"metadata": {"name": key[2], "namespace": key[1]}}
        new |= {"apiVersion": body["apiVersion"], "kind": body["kind"]}
        entries = [
            e
            for e in new["metadata"].get("managedFields", [])
            if (e["manager"], e.get("subresource", "")) != (manager, sub)
        ]
        mine = [e for e in new["metadata"].get("managedFields", []) if e not in entries]
        if mine:
            _drop(new, mine[0]["fieldsV1"], fields)
        _merge_apply(new, content)
        entry = {"manager": manager, "operation": "Apply", "apiVersion": body["apiVersion"], "fieldsV1": fields,
                 "time": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")}  # fmt: skip
        entry |= {"subresource": sub} if sub else {}
        new["metadata"]["managedFields"] = [*entries, entry]
        return await self._store(key, new, None)

    async def _store(self, key: tuple[str, str, str], new: dict[str, Any], manager: str | None) -> dict[str, Any]:
        old = self.objects.get(key)
        metadata = new["metadata"]
        new.setdefault("kind", KINDS[key[0]])
        metadata["uid"] = old["metadata"]["uid"] if old else str(uuid4())
        metadata["generation"] = old["metadata"]["generation"] if old else 1
        metadata["creationTimestamp"] = "2026-01-01T00:00:00Z"
        if old:
            metadata["resourceVersion"] = old["metadata"]["resourceVersion"]
            metadata.setdefault("managedFields", copy.deepcopy(old["metadata"].get("managedFields", [])))
            if manager:
                for entry in metadata["managedFields"]:
                    if entry["manager"] != manager:
                        _disown(entry["fieldsV1"], old, new)
            if _content(old) == _content(new):
                return old
            metadata["generation"] += old.get("spec") != new.get("spec")
        self.objects[key] = self._stamp(new)
        await self._announce("MODIFIED" if old else "ADDED", key[0], new)
        return new

    def _stamp(self, obj: dict[str, Any]) -> dict[str, Any]:
        self._at = next(self._version)
        obj["metadata"]["resourceVersion"] = str(self._at)
        return obj

    async def _announce(self, kind: str, plural: str, obj: dict[str, Any]) -> None:
        self._log.append((self._at, kind, plural, copy.deepcopy(obj)))
        async with self._changed:
            self._changed.notify_all()


async def _send(response: web.StreamResponse, kind: str, obj: Any) -> None:
    await response.write(json.dumps({"type": kind, "object": obj}).encode() + b"\n")


def _selected(request: web.Request, obj: dict[str, Any]) -> bool:
    selector = request.query.get("labelSelector")
    labels = obj["metadata"].get("labels") or {}
    return all(labels.get(k) == v for k, v in (part.split("=") for part in selector.split(","))) if selector else True


def _content(obj: dict[str, Any]) -> Any:
    """What decides whether a write changed anything: all but the time stamps of managedFields."""
    plain = copy.deepcopy(obj)
    for entry in plain["metadata"].get("managedFields", []):
        entry.pop("time", None)
    return plain


def _item_key(name: str, item: dict[str, Any]) -> str | None:
    if name == "ports":
        port = "containerPort" if "containerPort" in item else "port"
        return "k:" + json.dumps({port: item[port], "protocol": item.get("protocol", "TCP")}, separators=(",", ":"))
    keys = LIST_KEYS.get(name)
    return "k:" + json.dumps({k: item[k] for k in keys}, separators=(",", ":")) if keys else None


def _fields(value: Any, name: str = "") -> dict[str, Any]:
    """The `fieldsV1` tree of a body."""
    if isinstance(value, dict) and name not in ATOMIC_MAPS:
        return {f"f:{k}": _fields(v, k) for k, v in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], dict) and _item_key(name, value[0]):
        return {str(_item_key(name, item)): {".": {}, **_fields(item)} for item in value}
    return {}


def _find(items: list[Any], name: str, key: str) -> Any:
    return next((item for item in items if _item_key(name, item) == key), None)


def _merge_apply(live: dict[str, Any], body: dict[str, Any]) -> None:
    for name, value in body.items():
        if isinstance(value, dict) and name not in ATOMIC_MAPS:
            _merge_apply(live.setdefault(name, {}), value)
        elif isinstance(value, list) and value and isinstance(value[0], dict) and _item_key(name, value[0]):
            items = live.setdefault(name, [])
            for item in value:
                found = _find(items, name, str(_item_key(name, item)))
                if found is None:
                    items.append(copy.deepcopy(item))
                else:
                    _merge_apply(found, item)
        else:
            live[name] = copy.deepcopy(value)


def _drop(live: Any, owned: dict[str, Any], kept: dict[str, Any], name: str = "") -> None:
    """Removes what a manager owned and does not send any more."""
    for key, below in owned.items():
        if key == ".":
            continue
        field = key[2:] if key.startswith("f:") else None
        child = live.get(field) if field is not None else _find(live, name, key)
        if child is None:
            continue
        if key not in kept:
            live.pop(field) if field is not None else live.remove(child)
        elif isinstance(child, dict | list) and below:
            _drop(child, below, kept[key], field or "")


def _disown(owned: dict[str, Any], old: Any, new: Any, name: str = "") -> None:
    """Takes fields out of a manager's entry that another has changed."""
    for key in [k for k in owned if k != "."]:
        field = key[2:] if key.startswith("f:") else None
        before = old.get(field) if field is not None else _find(old, name, key)
        after = (new or {}).get(field) if field is not None else _find(new or [], name, key)
        if before == after:
            continue
        if owned[key] and isinstance(after, dict | list):
            _disown(owned[key], before, after, field or "")
            if not owned[key]:  # a node without children would be a leaf, and owned
                del owned[key]
        else:
            del owned[key]


def _merge_patch(target: Any, patch: Any) -> Any:
    if not isinstance(patch, dict):
        return patch
    target = target if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            target.pop(name, None)
        else:
            target[name] = _merge_patch(target.get(name), value)
    return target
