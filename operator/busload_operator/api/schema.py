"""What the API models share: the base model, rules that hold in CEL and in Python, and errors in words.

A `Rule` is written once and judged twice: the API server evaluates its CEL, pydantic its Python twin, and both print
the same message. One table of manifests (tests/operator/api/cases) holds the two to the same verdict.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    GetJsonSchemaHandler,
    Strict,
    ValidationError,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

Reason = Literal["FieldValueInvalid", "FieldValueForbidden", "FieldValueRequired"]
_PLACEHOLDER = re.compile(r"{([A-Za-z0-9./\[\]']+)}")
_PATH_PART = re.compile(r"\['([^']+)'\]|([^.\[]+)")


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule over several fields of one object. `self` in the CEL and the argument of `holds` are that object.

    `message` may name fields in braces, relative to the object: `{min}` becomes their value, in CEL by a
    messageExpression. `field` is the path of the field to blame, relative to the object. A field whose name is no
    identifier stands in brackets in both, as in `limits['nvidia.com/gpu']`.
    """

    cel: str
    holds: Callable[[Any], bool]
    message: str
    field: str = ""
    reason: Reason = "FieldValueInvalid"

    def to_cel(self) -> dict[str, Any]:
        """The rule as an entry of `x-kubernetes-validations`."""
        # The API server falls back to `message` when a value makes the expression unprintable (a line break in it).
        message = _PLACEHOLDER.sub("…", self.message)
        entry: dict[str, Any] = {"rule": self.cel, "reason": self.reason, "message": message}
        if message != self.message:
            entry["messageExpression"] = self._message_expression()
        if self.field:
            entry["fieldPath"] = f".{self.field}"
        return entry

    def text(self, model: BaseModel) -> str:
        """The message with the values of this object."""
        return _PLACEHOLDER.sub(lambda found: str(_value(model, found[1])), self.message)

    def _message_expression(self) -> str:
        # Not `string(...) + ...`: the API server takes the length of string() for unbounded and refuses the cost.
        text = _PLACEHOLDER.sub("%s", self.message.replace("%", "%%"))
        literal = "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
        values = ", ".join(f"self.{cel_path(path)}" for path in _PLACEHOLDER.findall(self.message))
        return f"{literal}.format([{values}])"


def path_parts(path: str) -> list[str]:
    """The names along a path: `limits['nvidia.com/gpu']` is `limits`, then `nvidia.com/gpu`."""
    return [quoted or plain for quoted, plain in _PATH_PART.findall(path)]


def cel_path(path: str) -> str:
    """A path as CEL spells it, where names are identifiers: `limits.nvidia__dot__com__slash__gpu`.

    https://kubernetes.io/docs/reference/using-api/cel/#escaping
    """
    return ".".join(part.replace(".", "__dot__").replace("/", "__slash__") for part in path_parts(path))


def cel_name(identifier: str) -> str:
    """The name of the field that CEL spells so; undoes `cel_path`."""
    return identifier.replace("__dot__", ".").replace("__slash__", "/")


def _value(model: Any, path: str) -> Any:
    for part in path_parts(path):
        (name,) = (name for name, field in type(model).model_fields.items() if field.alias == part)
        model = getattr(model, name)
    return model


class Model(BaseModel):
    """Base of all API models: camelCase in manifests, immutable, unknown fields of newer versions ignored."""

    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, extra="ignore", frozen=True, use_attribute_docstrings=True
    )
    rules: ClassVar[tuple[Rule, ...]] = ()

    @model_validator(mode="before")
    @classmethod
    def _as_the_api_server_reads(cls, data: Any) -> Any:
        # It drops nulls of fields that are not nullable (none is) and then applies defaults, and it takes 8.0 where
        # the schema says integer, and stores it so.
        if not isinstance(data, Mapping):
            return data
        return {key: _integral(value) for key, value in data.items() if value is not None}

    @model_validator(mode="after")
    def _rules_hold(self) -> Self:
        broken = [(rule.field, rule.text(self)) for rule in self.rules if not rule.holds(self)]
        if broken:
            # A context value is the only way to hand several broken rules of one object through pydantic.
            raise PydanticCustomError(
                "rules", "{text}", {"text": "; ".join(text for _, text in broken), "broken": broken}
            )
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler.resolve_ref_schema(handler(core))
        if cls.rules:
            schema["x-kubernetes-validations"] = [rule.to_cel() for rule in cls.rules]
        return schema


def _integral(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


Integer = Annotated[int, Strict()]
"""An integer as the API server judges one: neither "8" nor true."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a manifest."""

    field: str
    """Path of the field, like `spec.bounds.batchSize.min`; empty for the object itself."""
    text: str
    """What is wrong, what is allowed and what to do."""

    def __str__(self) -> str:
        return f"{self.field}: {self.text}" if self.field else self.text


def unknown_field(path: str) -> Problem:
    """The problem with a field that no model has."""
    return Problem(path, "unknown field; check its spelling and place (kubectl explain shows both)")


def problems(error: ValidationError, prefix: str = "", only: str | None = None) -> list[Problem]:
    """A pydantic error of an API model in words, one entry per fault; `only` keeps faults of one pydantic type."""
    found = []
    for item in error.errors(include_url=False):
        if only not in (None, item["type"]):
            continue
        where = _path(prefix, *item["loc"])
        match item["type"], item.get("ctx", {}):
            case "rules", {"broken": broken}:
                found += [Problem(_path(where, *path_parts(field)), text) for field, text in broken]
            case "missing", _:
                found.append(Problem(where, "is required"))
            case "extra_forbidden", _:
                found.append(unknown_field(where))
            case _:
                found.append(Problem(where, f"got {item['input']!r}: {_lower(item['msg'])}"))
    return found


def _path(*parts: str | int) -> str:
    path = ""
    for part in parts:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part:
            path += f".{part}" if path else part
    return path


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
