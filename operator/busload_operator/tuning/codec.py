"""The core's frozen dataclasses as JSON and back, by their type hints: nothing is lost, and what does not match raises.

Floats keep every bit; those that JSON has no number for are strings. A field that is missing takes its default, so
that what an older version wrote can be read; a field that is unknown is an error.
"""

import json
import math
import types
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
_NOT_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_EXACT = 2.0**53


class CodecError(ValueError):
    """JSON that is not what was to be read; the message names the place, the value and what is allowed there."""


def dumps(value: Any) -> str:
    """JSON without spaces, keys in the order they are in, no NaN."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def encode(value: Any, digits: int | None = None) -> Any:
    """What `json` can write. `digits`: significant digits of floats (None: all of them)."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: encode(getattr(value, field.name), digits) for field in fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple):
        return [encode(item, digits) for item in value]
    if isinstance(value, float):
        return _number(value, digits)
    if value is None or isinstance(value, (str, bool, int)):
        return value
    raise TypeError(f"{type(value).__name__} cannot be recorded")


def _number(value: float, digits: int | None) -> float | int | str:
    if not math.isfinite(value):
        return next(name for name, other in _NOT_NUMBERS.items() if repr(other) == repr(value))
    if digits is not None:
        value = float(f"{value:.{digits}g}")
    whole = value.is_integer() and abs(value) < _EXACT and math.copysign(1.0, value) > 0
    return int(value) if whole else value  # 812 instead of 812.0: most counters are whole


def decode(hint: type[T], raw: Any, where: str) -> T:
    """The value of type `hint`. Raises `CodecError`; `where` is the place that its message begins with."""
    value: T = _decode(hint, raw, where)
    return value


def _decode(hint: Any, raw: Any, where: str) -> Any:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        options = get_args(hint)
        if raw is None and type(None) in options:
            return None
        (only,) = (option for option in options if option is not type(None))
        return _decode(only, raw, where)
    if origin is tuple:
        return _tuple(get_args(hint), raw, where)
    if origin is Literal:
        return _one_of(get_args(hint), raw, where)
    if is_dataclass(hint):
        return _dataclass(hint, raw, where)
    if issubclass(hint, Enum):
        return hint(_one_of([item.value for item in hint], raw, where))
    if hint is float:
        return _float(raw, where)
    if type(raw) is hint:
        return raw
    raise _wrong(where, raw, {int: "a whole number", str: "a text", bool: "true or false"}.get(hint, hint.__name__))


def _tuple(items: tuple[Any, ...], raw: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(raw, list):
        raise _wrong(where, raw, "a list")
    if len(items) == 2 and items[1] is Ellipsis:
        items = (items[0],) * len(raw)
    if len(items) != len(raw):
        raise _wrong(where, raw, f"a list of {len(items)}")
    return tuple(
        _decode(hint, item, f"{where}[{index}]") for index, (hint, item) in enumerate(zip(items, raw, strict=True))
    )


def _dataclass(hint: Any, raw: Any, where: str) -> Any:
    if not isinstance(raw, dict):
        raise _wrong(where, raw, f"an object with the fields of {hint.__name__}")
    hints, known = _hints(hint), {field.name: field for field in fields(hint)}
    if unknown := sorted(set(raw) - set(known)):
        raise CodecError(f"{where}: unknown field {unknown[0]!r:.80}; allowed: {', '.join(known)}")
    values = {}
    for name, field in known.items():
        if name in raw:
            values[name] = _decode(hints[name], raw[name], f"{where}.{name}")
        elif field.default is MISSING and field.default_factory is MISSING:
            raise CodecError(f"{where}: field {name} is missing")
    try:
        return hint(**values)
    except ValueError as error:  # what the type itself refuses
        raise CodecError(f"{where}: {error}") from None


@cache
def _hints(hint: Any) -> dict[str, Any]:
    return get_type_hints(hint)


def _float(raw: Any, where: str) -> float:
    if isinstance(raw, str) and raw in _NOT_NUMBERS:
        return _NOT_NUMBERS[raw]
    if isinstance(raw, bool) or not isinstance(raw, (int, float)):
        raise _wrong(where, raw, "a number")
    try:
        return float(raw)
    except OverflowError:
        raise _wrong(where, raw, "a number") from None


def _one_of(allowed: Any, raw: Any, where: str) -> Any:
    if isinstance(raw, (str, int)) and raw in allowed:
        return raw
    raise _wrong(where, raw, f"one of {', '.join(map(str, allowed))}")


def _wrong(where: str, raw: Any, allowed: str) -> CodecError:
    return CodecError(f"{where} is {raw!r:.80}; must be {allowed}")
