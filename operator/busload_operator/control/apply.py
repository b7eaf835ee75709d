"""Children of a service: compared with what lives, then written by server-side apply only when they differ.

A child is as desired when (1) the hash of the desired body, kept as an annotation on it, is the same and (2) we still
own each field of that body. The API server takes a field out of our `managedFields` entry as soon as anyone else
changes it, so (2) notices drift without knowing anything about defaults or normal forms of quantities.
"""

import hashlib
import json
from collections.abc import Collection
from typing import Any

from busload_operator.control.cache import Cache
from busload_operator.control.client import Client
from busload_operator.control.kinds import CHILDREN, Key, Kind, Object, child_kind, controller_of

MANAGER = "busload"
HASH_ANNOTATION = "busload.dev/desired-hash"


class ForeignObjectError(Exception):
    """An object of a child's name exists and belongs to somebody else. It is never touched."""


class Applier:
    """Brings the children of one service after another to their desired form."""

    def __init__(self, client: Client, cache: Cache):
        self._client, self._cache = client, cache

    async def apply(self, owner: Object, desired: list[Object], spared: Collection[str] = ()) -> list[Object]:
        """Applies children in order and removes those that are no longer desired, but none whose name is `spared`.
        Returns the live children.

        Raises `ForeignObjectError` before anything is written, or `ApiError`.
        """
        uid = owner["metadata"]["uid"]
        known = [await self._find(child, uid) for child in desired]
        live = [
            found if found is not None and is_applied(found, body) else await self._write(body, found)
            for body, found in zip(map(stamp, desired), known, strict=True)
        ]
        await self._prune(owner, desired, spared)
        return live

    async def apply_one(self, owner: Object, body: Object) -> None:
        """One child and nothing else. Raises `ForeignObjectError` or `ApiError`."""
        found, stamped = await self._find(body, owner["metadata"]["uid"]), stamp(body)
        if found is None or not is_applied(found, stamped):
            await self._write(stamped, found)

    async def _find(self, child: Object, owner_uid: str) -> Object | None:
        """The live object. What carries no label of ours is not in the cache, so a miss is asked from the server."""
        kind, metadata = child_kind(child), child["metadata"]
        namespace, name = metadata["namespace"], metadata["name"]
        found = self._cache.get(kind, namespace, name) or await self._client.get(kind, namespace, name)
        if found is not None and (controller_of(found) or {}).get("uid") != owner_uid:
            raise ForeignObjectError(_foreign(kind, found))
        return found

    async def _write(self, body: Object, found: Object | None) -> Object:
        kind = child_kind(body)
        if found is not None:  # the uid makes it an update of exactly this object, never a creation
            body = {**body, "metadata": {**body["metadata"], "uid": found["metadata"]["uid"]}}
        live = await self._client.apply(kind, body, MANAGER)
        self._cache.put(kind, live)
        return live

    async def _prune(self, owner: Object, desired: list[Object], spared: Collection[str]) -> None:
        key = Key(owner["metadata"]["namespace"], owner["metadata"]["name"])
        wanted = {(child_kind(child), child["metadata"]["name"]) for child in desired}
        for kind in CHILDREN:
            for obj in self._cache.of_service(kind, key):
                ours = (controller_of(obj) or {}).get("uid") == owner["metadata"]["uid"]
                leaving = obj["metadata"].get("deletionTimestamp")
                name = obj["metadata"]["name"]
                if ours and not leaving and name not in spared and (kind, name) not in wanted:
                    await self._client.delete(kind, obj)


def stamp(body: Object) -> Object:
    """The body with the hash of its content as an annotation."""
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:16]
    metadata = body["metadata"]
    annotations = {**(metadata.get("annotations") or {}), HASH_ANNOTATION: digest}
    return {**body, "metadata": {**metadata, "annotations": annotations}}


def is_applied(live: Object, stamped: Object) -> bool:
    """True when applying the stamped body would change nothing."""
    want = stamped["metadata"]["annotations"][HASH_ANNOTATION]
    if (live["metadata"].get("annotations") or {}).get(HASH_ANNOTATION) != want:
        return False
    metadata = {name: stamped["metadata"][name] for name in ("labels", "annotations") if name in stamped["metadata"]}
    content = {name: value for name, value in stamped.items() if name not in ("apiVersion", "kind", "metadata")}
    return wrote(live, {**content, "metadata": metadata})


def wrote(live: Object, content: Object) -> bool:
    """True when each field of this content is as we last applied it: nobody else has changed it since."""
    fields = _owned_fields(live)
    return bool(fields) and owns(content, fields)


def _owned_fields(live: Object) -> Object:
    for entry in live["metadata"].get("managedFields") or []:
        if entry.get("manager") == MANAGER and entry.get("operation") == "Apply" and not entry.get("subresource"):
            return dict(entry.get("fieldsV1") or {})
    return {}


def owns(value: Any, fields: Any) -> bool:
    """True when a `fieldsV1` tree covers every leaf of a value.

    Keys of the tree: `f:name` for a map's entry, `k:{...}` for a list's item by its key fields, `v:...` for a set's
    element, `.` for the thing itself. A node without children is a leaf, also when its value is a map or a list.
    """
    if not isinstance(fields, dict):
        return False
    if not fields:
        return True
    if isinstance(value, dict):
        return all(f"f:{name}" in fields and owns(item, fields[f"f:{name}"]) for name, item in value.items())
    if isinstance(value, list):
        return all(_owns_item(item, fields) for item in value)
    return True


def _owns_item(item: Any, fields: Object) -> bool:
    if not isinstance(item, dict):
        return f"v:{json.dumps(item)}" in fields
    for name, below in fields.items():
        if name.startswith("k:"):
            keys = json.loads(name[2:])
            # A key field that the item leaves to its default (a port's protocol) cannot be compared.
            if all(item.get(field, value) == value for field, value in keys.items()):
                return owns(item, below)
    return False


def _foreign(kind: Kind, found: Object) -> str:
    metadata = found["metadata"]
    owner = controller_of(found)
    belongs = f"belongs to {owner['kind']} {owner['name']}" if owner else "was not made by busload"
    return (
        f"{kind.name} {metadata['namespace']}/{metadata['name']} exists already and {belongs}; "
        "delete or rename it, or give the InferenceService another name"
    )
