"""The kinds of objects the operator reads and writes, and their paths in the API."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from busload_operator.api.v1alpha1 import GROUP, KIND, PLURAL, VERSION
from busload_operator.resources.labels import MANAGED_BY as MANAGED_BY_VALUE
from busload_operator.resources.labels import MANAGED_BY_LABEL, SERVICE_LABEL

Object = dict[str, Any]
"""A Kubernetes object as JSON. Never a typed client model: those drop fields they do not know."""

MANAGED_BY = f"{MANAGED_BY_LABEL}={MANAGED_BY_VALUE}"


class Key(NamedTuple):
    """Names one InferenceService."""

    namespace: str
    name: str


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind, as the API server spells it. `selector` limits lists and watches to what concerns us."""

    group: str
    version: str
    plural: str
    name: str
    selector: str = ""

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """Path of one object, of a namespace's collection, or (without arguments) of all namespaces' collection."""
        parts = ["/apis", self.group, self.version] if self.group else ["/api", self.version]
        if namespace:
            parts += ["namespaces", namespace]
        parts += [part for part in (self.plural, name, subresource) if part]
        return "/".join(parts)


SERVICES = Kind(GROUP, VERSION, PLURAL, KIND)
DEPLOYMENTS = Kind("apps", "v1", "deployments", "Deployment", MANAGED_BY)
PODS = Kind("", "v1", "pods", "Pod", MANAGED_BY)
CONFIG_MAPS = Kind("", "v1", "configmaps", "ConfigMap", MANAGED_BY)
CORE_SERVICES = Kind("", "v1", "services", "Service", MANAGED_BY)
SERVICE_ACCOUNTS = Kind("", "v1", "serviceaccounts", "ServiceAccount", MANAGED_BY)
EVENTS = Kind("", "v1", "events", "Event")
LEASES = Kind("coordination.k8s.io", "v1", "leases", "Lease")

CHILDREN = (SERVICE_ACCOUNTS, CONFIG_MAPS, DEPLOYMENTS, CORE_SERVICES)
"""Kinds the operator makes for a service."""
WATCHED = (SERVICES, *CHILDREN, PODS)


def child_kind(obj: Object) -> Kind:
    """The kind of a child built by `resources`. Raises KeyError for a kind the operator has no rights on."""
    by_name = {(kind.api_version, kind.name): kind for kind in CHILDREN}
    return by_name[obj["apiVersion"], obj["kind"]]


def controller_of(obj: Object) -> Object | None:
    """The ownerReference that is marked as the controller."""
    references = obj["metadata"].get("ownerReferences") or []
    return next((reference for reference in references if reference.get("controller")), None)


def service_key(kind: Kind, obj: Object) -> Key | None:
    """The service that an object concerns; None when it carries no label that says so."""
    metadata = obj["metadata"]
    if kind == SERVICES:
        return Key(metadata["namespace"], metadata["name"])
    name = (metadata.get("labels") or {}).get(SERVICE_LABEL)
    return Key(metadata["namespace"], name) if name else None
