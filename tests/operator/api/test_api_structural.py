"""The generator refuses what an API server would reject, and what it would accept and silently ignore."""

from typing import Annotated, Any, Literal, Optional

import pytest
from pydantic import Field

from busload_operator.api.schema import Integer, Model, Rule
from busload_operator.api.structural import NotStructural, structural

Text = Annotated[str, Field(max_length=10)]


def convert(annotation: Any, default: Any = ..., **extra: Any) -> dict[str, Any]:
    """The schema of a field `someField` of this type."""
    body = {"__annotations__": {"some_field": annotation}, "__module__": __name__, **extra}
    if default is not ...:
        body["some_field"] = default
    model = type("Sample", (Model,), body)
    return structural(model.model_json_schema(by_alias=True))


class Child(Model):
    """A child."""

    size: Annotated[Integer, Field(ge=1)] = 4


class Loop(Model):
    """Contains itself."""

    again: Optional["Loop"] = None


class Named(Model):
    """An item of a list."""

    name: Text
    other: Text | None = None


class Plain(Model):
    """A plain class."""

    count: Annotated[int, Field(gt=0, lt=9)] = 1
    child: Child = Field(default_factory=Child)
    """A child with defaults."""
    choice: Literal["only"] = "only"
    maybe: Child | None = None
    names: Annotated[tuple[Named, ...], Field(max_length=3)] = ()
    labels: Annotated[dict[str, Text], Field(max_length=5)] = {}  # noqa: RUF012 - pydantic copies it


def test_a_plain_class():
    size = {"type": "integer", "minimum": 1, "default": 4}
    named = {
        "type": "object",
        "description": "An item of a list.",
        "required": ["name"],
        "properties": {"name": {"type": "string", "maxLength": 10}, "other": {"type": "string", "maxLength": 10}},
    }
    assert structural(Plain.model_json_schema(by_alias=True)) == {
        "type": "object",
        "description": "A plain class.",
        "properties": {
            "count": {
                "type": "integer",
                "minimum": 0,
                "exclusiveMinimum": True,
                "maximum": 9,
                "exclusiveMaximum": True,
                "default": 1,
            },
            # default_factory becomes a default, and a whole one: rules over the child judge it as it stands here.
            "child": {
                "type": "object",
                "description": "A child with defaults.",
                "default": {"size": 4},
                "properties": {"size": size},
            },
            "choice": {"type": "string", "enum": ["only"], "default": "only"},
            "maybe": {"type": "object", "description": "A child.", "properties": {"size": size}},
            "names": {"type": "array", "maxItems": 3, "x-kubernetes-list-type": "atomic", "items": named},
            "labels": {
                "type": "object",
                "maxProperties": 5,
                "additionalProperties": {"type": "string", "maxLength": 10},
            },
        },
    }


def listed(**extra: Any) -> Any:
    return Field(max_length=3, json_schema_extra=extra)


AS_SET = listed(**{"x-kubernetes-list-type": "set"})
AS_MAP = listed(**{"x-kubernetes-list-type": "map"})


def keyed(key: str) -> Any:
    return listed(**{"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]})


@pytest.mark.parametrize(
    ("annotation", "message"),
    [
        (str, "a string without maxLength"),
        (float, "type is 'number'"),
        (Any, "type is None"),
        (Text | int, "a union"),
        (dict[str, Text], "a map without maxProperties"),
        (Annotated[dict[str, Any], Field(max_length=3)], "a free object"),
        (dict, "a free object"),
        (tuple[Text, ...], "maxItems"),
        (Annotated[set[Text], Field(max_length=3)], "uniqueItems is not allowed"),
        (tuple[Text, Text], "prefixItems is not allowed"),
        (Annotated[dict[Text, Text], Field(max_length=3)], "propertyNames is not allowed"),
        (Annotated[tuple[Named, ...], AS_SET], "a set of objects"),
        (Annotated[tuple[Named, ...], AS_MAP], "needs x-kubernetes-list-map-keys"),
        (Annotated[tuple[Named, ...], keyed("other")], "list map key other must be a required or defaulted field"),
        (Annotated[tuple[Named, ...], keyed("nothing")], "list map key nothing must be"),
        (Annotated[tuple[Text, ...], listed(**{"x-kubernetes-list-type": "bag"})], "list type 'bag'"),
        (Annotated[str, Field(max_length=9, json_schema_extra={"pattern": "^(?!x).*$"})], "look-around"),
        (Annotated[str, Field(max_length=9, json_schema_extra={"pattern": r"^(a)\1$"})], "back-references"),
        (Annotated[str, Field(max_length=9, json_schema_extra={"format": "json-string"})], "format 'json-string'"),
        (Annotated[str, Field(max_length=9, json_schema_extra={"nullable": True})], "nullable is not allowed"),
        (Loop, "Loop contains itself"),
    ],
)
def test_refused(annotation: Any, message: str):
    with pytest.raises(NotStructural, match="someField") as caught:
        convert(annotation)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("annotation", "default", "message"),
    [
        (Text, Field(default=3), "default 3 is not of type string"),
        (Integer, Field(default=True), "default True is not of type integer"),
        (Literal["a", "b"], Field(default="c"), "default 'c' is not among"),
        (Child, Child(size=9), "a default that is not empty"),
        (Text, Field(default_factory=lambda: "x"), "a default_factory that is not an object of defaults"),
        (Named, Field(default_factory=lambda: Named(name="x")), "a default_factory that is not an object of defaults"),
    ],
)
def test_defaults_that_would_not_arrive(annotation: Any, default: Any, message: str):
    with pytest.raises(NotStructural, match="someField") as caught:
        convert(annotation, default)
    assert message in str(caught.value)


def test_a_null_default_is_dropped():
    assert convert(Text | None, None)["properties"] == {"someField": {"type": "string", "maxLength": 10}}


@pytest.mark.parametrize(
    "rule",
    [
        Rule("self.some_field == 'x'", lambda _: True, "m"),
        Rule("self.someField.size == 'x'", lambda _: True, "m"),
        Rule("true", lambda _: True, "got {otherField}"),
        Rule("true", lambda _: True, "m", field="otherField"),
        Rule("true", lambda _: True, "two\nlines"),
    ],
)
def test_rules_that_the_api_server_would_refuse(rule: Rule):
    with pytest.raises(NotStructural):
        convert(Text, rules=(rule,))


def test_a_rule_in_cel():
    rule = Rule(
        "self.someField.matches('^x')",
        lambda s: s.some_field.startswith("x"),
        "it's {someField}, not 1% x",
        "someField",
    )
    assert convert(Text, rules=(rule,))["x-kubernetes-validations"] == [
        {
            "rule": "self.someField.matches('^x')",
            "reason": "FieldValueInvalid",
            "message": "it's …, not 1% x",
            "messageExpression": "'it\\'s %s, not 1%% x'.format([self.someField])",
            "fieldPath": ".someField",
        }
    ]
