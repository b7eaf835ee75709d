"""The operator's own copy of the objects it cares about, fed by the watches and by complete lists.

The watches alone are not enough: after a gap they list again, but never tell what vanished meanwhile. A complete list
(`replace`) does. Resource versions are compared as integers, as Kubernetes defines them for one kind.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Iterable

from busload_operator.control.kinds import SERVICES, Key, Kind, Object, service_key

_Name = tuple[str, str]
_REMEMBERED = 10_000


class Cache:
    """Objects by kind, namespace and name, with an index by service. Not thread-safe: one event loop owns it."""

    def __init__(self) -> None:
        self._objects: dict[Kind, dict[_Name, Object]] = defaultdict(dict)
        self._by_service: dict[tuple[Kind, Key], set[_Name]] = defaultdict(set)
        self._gone: OrderedDict[str, None] = OrderedDict()

    def service(self, key: Key) -> Object | None:
        return self._objects[SERVICES].get((key.namespace, key.name))

    def services(self) -> list[Key]:
        return [Key(*name) for name in self._objects[SERVICES]]

    def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        return self._objects[kind].get((namespace, name))

    def of_service(self, kind: Kind, key: Key) -> list[Object]:
        """Objects labelled as belonging to a service, by name."""
        return [self._objects[kind][name] for name in sorted(self._by_service.get((kind, key), ()))]

    def put(self, kind: Kind, obj: Object) -> bool:
        """Stores a newer version of an object. False when ours is as new already (events and answers cross)."""
        name = _name(obj)
        known = self._objects[kind].get(name)
        if _uid(obj) in self._gone:  # an answer that was overtaken by the news of the deletion
            return False
        if known is not None:
            if version(obj) <= version(known):
                return False
            self._unindex(kind, name, known)
        self._objects[kind][name] = obj
        if key := service_key(kind, obj):
            self._by_service[kind, key].add(name)
        return True

    def remove(self, kind: Kind, obj: Object) -> bool:
        """Drops a deleted object, unless a newer one of the same name is stored already."""
        name = _name(obj)
        known = self._objects[kind].get(name)
        self._gone[_uid(obj)] = None
        if len(self._gone) > _REMEMBERED:
            self._gone.popitem(last=False)
        if known is None or (_uid(known) != _uid(obj) and version(known) > version(obj)):
            return False
        del self._objects[kind][name]
        self._unindex(kind, name, known)
        return True

    def replace(self, kind: Kind, items: Iterable[Object], listed_at: str, namespace: str = "") -> set[Key]:
        """Takes a complete list of a kind (of one namespace, or of all). Returns the services it changed.

        Objects that the list does not hold are gone, except those stored at a later version than the list's own.
        """
        listed = {_name(item): item for item in items}
        changed: set[Key] = set()
        for name, known in list(self._objects[kind].items()):
            in_scope = not namespace or name[0] == namespace
            if in_scope and name not in listed and version(known) <= int(listed_at):
                self.remove(kind, known)
                changed |= {key for key in [service_key(kind, known)] if key}
        for item in listed.values():
            if self.put(kind, item) and (key := service_key(kind, item)):
                changed.add(key)
        return changed

    def all(self, kind: Kind) -> list[Object]:
        return list(self._objects[kind].values())

    def count(self, kind: Kind) -> int:
        return len(self._objects[kind])

    def _unindex(self, kind: Kind, name: _Name, obj: Object) -> None:
        if key := service_key(kind, obj):
            names = self._by_service[kind, key]
            names.discard(name)
            if not names:
                del self._by_service[kind, key]


def version(obj: Object) -> int:
    """The resourceVersion as a number."""
    return int(obj["metadata"]["resourceVersion"])


def _name(obj: Object) -> _Name:
    return obj["metadata"]["namespace"], obj["metadata"]["name"]


def _uid(obj: Object) -> str:
    return str(obj["metadata"].get("uid", ""))
