"""JSON schemas for tests of constrained output: what is followed, what is refused, and what would take for ever."""

from typing import Any

Schema = dict[str, Any]


def _object(required: list[str] | None = None, **properties: Any) -> Schema:
    needed = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": needed, "additionalProperties": False}


SHORT = {"type": "string", "maxLength": 8}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}

# Each ends by itself within some 200 tokens, whatever is drawn.
FOLLOWED: dict[str, Schema] = {
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "constant": {"const": {"a": [1, "x", None]}},
    "enum of words": {"enum": ["red", "green", "blue"]},
    "enum of anything": {"enum": [1, "one", None, True, {"k": []}]},
    "integer in bounds": {"type": "integer", "minimum": -17, "maximum": 304},
    "integer in open bounds": {"type": "integer", "exclusiveMinimum": 7, "exclusiveMaximum": 9},
    "multiple": {"type": "integer", "minimum": 0, "maximum": 1000, "multipleOf": 7},
    "number in bounds": _object(x={"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.01}),
    "short text": {"type": "string", "minLength": 3, "maxLength": 12},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
    "pattern with choices": {"type": "string", "pattern": "^(mon|tues|wednes)day( morning)?$"},
    "date": {"type": "string", "format": "date"},
    "uuid": {"type": "string", "format": "uuid"},
    "address of version 4": {"type": "string", "format": "ipv4"},
    "object": _object(name=SHORT, age=DIGIT),
    "object with optional keys": _object(["b"], a=DIGIT, b=DIGIT, c={"type": "boolean"}),
    "empty object": {"type": "object", "properties": {}, "additionalProperties": False},
    "nested": _object(outer=_object(middle=_object(inner=DIGIT)), flag={"type": "boolean"}),
    "list": {"type": "array", "items": DIGIT, "minItems": 2, "maxItems": 5},
    "list of lists": {"type": "array", "items": {"type": "array", "items": DIGIT, "maxItems": 2}, "maxItems": 3},
    "list of objects": {"type": "array", "items": _object(x=DIGIT, y=DIGIT), "minItems": 1, "maxItems": 3},
    "tuple": {
        "type": "array",
        "prefixItems": [DIGIT, {"type": "boolean"}, {"const": "end"}],
        "items": False,
        "minItems": 3,
    },
    "any of types": {"type": ["integer", "boolean", "null"], "minimum": 0, "maximum": 99},
    "any of objects": {"anyOf": [_object(kind={"const": "a"}, x=DIGIT), _object(kind={"const": "b"}, y=SHORT)]},
    "one of what differs": {"oneOf": [_object(kind={"const": "a"}), _object(kind={"const": "b"})]},
    "all of": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]},
    "nullable": _object(x={"anyOf": [DIGIT, {"type": "null"}]}),
    "reference": {
        **_object(from_={"$ref": "#/$defs/point"}, to={"$ref": "#/$defs/point"}),
        "$defs": {"point": _object(x=DIGIT, y=DIGIT)},
    },
    "definitions of older drafts": {"definitions": {"n": DIGIT}, **_object(x={"$ref": "#/definitions/n"})},
    "recursion": {
        "$ref": "#/$defs/tree",
        "$defs": {
            "tree": _object(["value"], value=DIGIT, next={"anyOf": [{"$ref": "#/$defs/leaf"}, {"type": "null"}]}),
            "leaf": _object(value=DIGIT),
        },
    },
    "map": {
        "type": "object",
        "patternProperties": {"^[a-c]$": DIGIT},
        "additionalProperties": False,
        "maxProperties": 2,
    },
    "keys that need escapes": _object(**{'quote "': DIGIT, "line\nend": DIGIT, "back\\slash": DIGIT, "ünï": DIGIT}),
    "values that need escapes": {"enum": ['say "hi"', "two\nlines", "back\\slash", "日本語 👩‍👩‍👧"]},
    "annotations": {
        "title": "A",
        "description": "b",
        "default": 1,
        "examples": [2],
        "$comment": "c",
        "deprecated": True,
        **DIGIT,
    },
}

# What the answer must say of each: the keyword or what is wrong with it.
REFUSED: dict[str, tuple[Schema, str]] = {
    "not": ({"not": {"type": "string"}}, "not"),
    "if": ({"if": {"type": "string"}, "then": {"minLength": 1}}, "if"),
    "contains": ({"type": "array", "contains": DIGIT}, "contains"),
    "uniqueItems": ({"type": "array", "items": DIGIT, "uniqueItems": True}, "uniqueItems"),
    "propertyNames": ({"type": "object", "propertyNames": {"pattern": "^a"}}, "propertyNames"),
    "dependentRequired": ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    "unevaluatedProperties": ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties"),
    "format": ({"type": "string", "format": "nonsense"}, "nonsense"),
    "type": ({"type": "strin"}, "strin"),
    "look-ahead": ({"type": "string", "pattern": "^(?=a)b$"}, "look-ahead"),
    "broken pattern": ({"type": "string", "pattern": "("}, "unclosed"),
    "nothing fits": ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
    "empty enum": ({"enum": []}, "empty"),
    "missing reference": ({"$ref": "#/$defs/none"}, "none"),
    "reference elsewhere": ({"$ref": "http://127.0.0.1:9/x.json"}, "127.0.0.1:9"),
}


def _deep(levels: int) -> Schema:
    schema: Schema = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def _doubling(levels: int) -> Schema:
    doubles = {
        f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}, {"$ref": f"#/$defs/d{i + 1}"}]} for i in range(levels)
    }
    return {"$defs": {**doubles, f"d{levels}": {"type": "string"}}, "$ref": "#/$defs/d0"}


# Each is refused, within the checker's limits.
HOSTILE: dict[str, Schema] = {
    "a megabyte": {"enum": [f"value {i}" for i in range(60_000)]},
    "nested deeply": _deep(900),
    "nested beyond the parser": _deep(200),
    "patterns that all must match": {"allOf": [{"type": "string", "pattern": f"x.{{{i + 50}}}y"} for i in range(40)]},
    "patterns of powers": {"allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{i + 5}}}"} for i in range(20)]},
    "multiples of a large prime": {"type": "integer", "multipleOf": 99991},
    "multiples of three primes": {"allOf": [{"type": "integer", "multipleOf": p} for p in (9973, 9967, 9949)]},
    "combinations": {"allOf": [{"anyOf": [_object(**{f"p{i}{j}": SHORT}) for j in range(4)]} for i in range(9)]},
    "many keys": {"type": "object", "properties": {f"p{i}": {} for i in range(3000)}},
    "itself": {"$ref": "#"},
    "a circle": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    "a circle that must be": {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, SHORT]}}, "$ref": "#/$defs/a"},
}

# These look hostile and cost little: followed, or refused, but never slowly.
HARMLESS: dict[str, Schema] = {
    "catastrophic for backtracking": {"type": "string", "pattern": "^(a+)+b$"},
    "references that double": _doubling(30),
    "endless list": {"type": "array", "items": DIGIT, "minItems": 10**9},
    "long text": {"type": "string", "maxLength": 10**9},
}

# Over single bytes these are nothing special; over a whole vocabulary they take more than a step may.
TOO_MUCH_FOR_A_STEP: dict[str, Schema] = {
    "nested repetition": {"type": "string", "pattern": "^((([a-z]{1,99}){1,99}){1,99}){1,99}$"},
}
