"""pydantic's JSON schema -> structural schema of a CustomResourceDefinition. Refuses whatever would not survive.

The API server rejects some of what pydantic emits and silently ignores other parts of it (an unreachable default, a
scale path to a missing field); both end here as a `NotStructural` that names the place. Rules followed:
https://kubernetes.io/docs/tasks/extend-kubernetes/custom-resources/custom-resource-definitions/#specifying-a-structural-schema
"""

import re
from typing import Any

from busload_operator.api.schema import cel_name, path_parts

Schema = dict[str, Any]

_KEPT = {
    "type", "description", "default", "enum", "format", "pattern", "required", "properties", "items",
    "additionalProperties", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "minLength", "maxLength",
    "minItems", "maxItems", "minProperties", "maxProperties", "x-kubernetes-validations", "x-kubernetes-list-type",
    "x-kubernetes-list-map-keys", "x-kubernetes-int-or-string",
}  # fmt: skip
_STRIPPED = {"title", "examples", "$defs"}
_FORMATS = {"int32", "int64", "date-time"}
_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "boolean": (bool,), "array": (list,), "object": (dict,),
}  # fmt: skip
_LOOK_AROUND_OR_BACK_REFERENCE = re.compile(r"\(\?(?:[=!]|<[=!])|\\[1-9]")
_SELF_FIELD = re.compile(r"\bself((?:\.[A-Za-z_]\w*(?!\w*\())+)")
# Metadata that every rule on the root object may read.
_ROOT_METADATA = {"metadata"}


class NotStructural(ValueError):
    """A schema that a CustomResourceDefinition cannot hold; the message names the field and the reason."""


def structural(schema: Schema) -> Schema:
    """A structural schema from the JSON schema (draft 2020-12) of a pydantic model, by alias, in validation mode."""
    return _convert(schema, schema.get("$defs", {}), "", ())


def _convert(schema: Schema, defs: dict[str, Schema], path: str, seen: tuple[str, ...]) -> Schema:
    node = _without_null(dict(schema), path)
    if "$ref" in node:
        name = node.pop("$ref").rsplit("/", 1)[-1]
        if name in seen:
            raise NotStructural(f"{path}: {name} contains itself; a structural schema cannot recurse")
        # What stands beside the reference (the description of the field) wins over the referenced class's own.
        return _convert({**defs[name], **node}, defs, path, (*seen, name))
    node = _plain(node, path)
    if unknown := sorted(set(node) - _KEPT):
        raise NotStructural(f"{path}: {unknown[0]} is not allowed in a structural schema")
    kind = node.get("type")
    if node.get("x-kubernetes-int-or-string") and kind is None:
        return node  # a quantity: the one union that a structural schema knows
    if not isinstance(kind, str) or kind not in _JSON_TYPES:
        raise NotStructural(f"{path}: type is {kind!r}; allowed: {', '.join(_JSON_TYPES)} (numbers are strings)")
    if kind == "object":
        _object(node, defs, path, seen)
    elif kind == "array":
        _list(node, defs, path, seen)
    elif kind == "string":
        _string(node, path)
    _default(node, path)
    _rules(node, path)
    return node


def _without_null(node: Schema, path: str) -> Schema:
    """Keeps X of `X | None`. Null and absent are the same to the API server, so the default null goes too."""
    if "anyOf" in node:
        others = [one for one in node.pop("anyOf") if one.get("type") != "null"]
        if len(others) != 1:
            raise NotStructural(f"{path}: a union; use an object with optional members and a rule")
        node = {**others[0], **node}
    if "default" in node and node["default"] is None:
        del node["default"]
    return node


def _plain(node: Schema, path: str) -> Schema:
    """Rewrites what a CRD spells differently and drops what it has no word for."""
    node = {key: value for key, value in node.items() if key not in _STRIPPED}
    if "description" in node:
        node["description"] = " ".join(node["description"].split())
    if "const" in node:
        node["enum"] = [node.pop("const")]
    for exclusive, inclusive in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
        if not isinstance(node.get(exclusive, False), bool):
            node[inclusive], node[exclusive] = node[exclusive], True
    if node.get("additionalProperties") is False:
        # Unknown fields are dropped by the API server, or refused at the client's wish.
        del node["additionalProperties"]
    if not node.get("enum", True):
        raise NotStructural(f"{path}: enum without values")
    return node


def _object(node: Schema, defs: dict[str, Schema], path: str, seen: tuple[str, ...]) -> None:
    properties, extra = node.get("properties"), node.get("additionalProperties")
    if (properties is None) == (extra is None):
        raise NotStructural(f"{path}: an object has either fields or free keys, not both and not neither")
    if extra is not None:
        if not isinstance(extra, dict):
            raise NotStructural(f"{path}: a free object; give its values a type")
        if "maxProperties" not in node:
            raise NotStructural(f"{path}: a map without maxProperties")
        node["additionalProperties"] = _convert(extra, defs, f"{path}{{}}", seen)
        return
    required = node.get("required", [])
    node["properties"] = {
        name: _field(child, defs, f"{path}.{name}", seen, required=name in required)
        for name, child in (properties or {}).items()
    }


def _field(schema: Schema, defs: dict[str, Schema], path: str, seen: tuple[str, ...], *, required: bool) -> Schema:
    node = _convert(schema, defs, path, seen)
    if required or "default" in schema:
        return node
    # pydantic leaves default_factory out of its schema. Without a default the API server would not look inside for
    # the defaults of the object's own fields.
    if node.get("type") != "object" or node.get("required"):
        raise NotStructural(f"{path}: a default_factory that is not an object of defaults")
    # The API server judges a default by the rules of its object before it fills in anything: `{}` would break them.
    children = node.get("properties", {})
    if default := {name: child["default"] for name, child in children.items() if "default" in child}:
        node["default"] = default
    return node


def _list(node: Schema, defs: dict[str, Schema], path: str, seen: tuple[str, ...]) -> None:
    if "items" not in node or "maxItems" not in node:
        raise NotStructural(f"{path}: a list needs the type of its items and maxItems")
    items = node["items"] = _convert(node["items"], defs, f"{path}[]", seen)
    kind = node.setdefault("x-kubernetes-list-type", "atomic")
    keys = node.get("x-kubernetes-list-map-keys")
    if kind not in ("atomic", "set", "map"):
        raise NotStructural(f"{path}: list type {kind!r}; allowed: atomic, set, map")
    if kind == "set" and items["type"] not in ("string", "integer", "boolean"):
        raise NotStructural(f"{path}: a set of {items['type']}s; only scalars can be compared")
    if (kind == "map") != bool(keys):
        raise NotStructural(f"{path}: list type map needs x-kubernetes-list-map-keys, and only it has them")
    for key in keys or ():
        child = items.get("properties", {}).get(key)
        if child is None or (key not in items.get("required", []) and "default" not in child):
            raise NotStructural(f"{path}: list map key {key} must be a required or defaulted field of the items")


def _string(node: Schema, path: str) -> None:
    if "enum" not in node and "maxLength" not in node:
        raise NotStructural(f"{path}: a string without maxLength makes every rule over it too costly")
    if "format" in node and node["format"] not in _FORMATS:
        raise NotStructural(f"{path}: format {node['format']!r} is not known to the API server")
    if "pattern" in node and _LOOK_AROUND_OR_BACK_REFERENCE.search(node["pattern"]):
        raise NotStructural(f"{path}: pattern {node['pattern']!r} needs look-around or back-references; RE2 has none")


def _default(node: Schema, path: str) -> None:
    if "default" not in node:
        return
    value, kind = node["default"], node["type"]
    if kind in ("array", "object"):
        if value:
            raise NotStructural(f"{path}: a default that is not empty; give the fields of the {kind} their defaults")
        # Absent and empty are the same to every reader, and an empty list in each stored object says nothing.
        del node["default"]
    elif not isinstance(value, _JSON_TYPES[kind]) or (kind == "integer" and isinstance(value, bool)):
        raise NotStructural(f"{path}: default {value!r} is not of type {kind}")
    elif "enum" in node and value not in node["enum"]:
        raise NotStructural(f"{path}: default {value!r} is not among {node['enum']}")


def _rules(node: Schema, path: str) -> None:
    """Finds rules that name fields which do not exist, the usual case being snake_case."""
    for rule in node.get("x-kubernetes-validations", ()):
        if "\n" in rule.get("message", ""):
            raise NotStructural(f"{path}: line break in the message {rule['message']!r}")
        for expression in (rule["rule"], rule.get("messageExpression", "")):
            for found in _SELF_FIELD.finditer(expression):
                _resolve(node, [cel_name(part) for part in found[1].lstrip(".").split(".")], path)
        if "fieldPath" in rule:
            _resolve(node, path_parts(rule["fieldPath"].lstrip(".")), path)


def _resolve(node: Schema, parts: list[str], path: str) -> None:
    for part in parts:
        if part in _ROOT_METADATA and part in node["properties"]:
            return
        if part not in node.get("properties", {}):
            raise NotStructural(f"{path}: a rule names {'.'.join(parts)}, but there is no field {part}")
        node = node["properties"][part]
