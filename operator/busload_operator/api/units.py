"""Quantities and durations as the API spells them: bounded strings with one parser each.

Kubernetes objects carry no floats, so memory, CPU and times are strings. The patterns are a subset of what the API
server's own `quantity()` and `duration()` accept; pydantic, the CRD schema and the CEL rules therefore agree on them.
"""

import re
from decimal import ROUND_CEILING, Decimal
from typing import Annotated

from pydantic import Field, Strict, WithJsonSchema

_BYTES_PATTERN = r"^[0-9]{1,15}(\.[0-9]{1,3})?(k|M|G|T|Ki|Mi|Gi|Ti)?$"
_CPU_PATTERN = r"^[0-9]{1,6}(m|\.[0-9]{1,3})?$"
_DURATION_PATTERN = r"^([0-9]{1,5}(\.[0-9]{1,3})?(ms|s|m|h)){1,4}$"

ByteQuantity = Annotated[str, Field(max_length=21, pattern=_BYTES_PATTERN)]
"""Memory, like "2Gi" or "512Mi"."""
CpuQuantity = Annotated[str, Field(max_length=11, pattern=_CPU_PATTERN)]
"""CPU, like "2", "1.5" or "500m"."""
Count = Annotated[
    Annotated[int, Strict()] | Annotated[str, Strict(), Field(max_length=16)],
    WithJsonSchema({"x-kubernetes-int-or-string": True}),
]
"""A number of devices as pods spell it: 1 or "1". What it may be is for a rule to say."""
Duration = Annotated[str, Field(max_length=48, pattern=_DURATION_PATTERN)]
"""A time span as Go spells it, like "2s", "100ms" or "1m30s"."""

_BYTE_UNITS = {"": 1} | {unit: 1000**n for n, unit in enumerate("kMGT", 1)}
_BYTE_UNITS |= {f"{unit}i": 1024**n for n, unit in enumerate("KMGT", 1)}
_SECONDS = {"ms": Decimal("0.001"), "s": Decimal(1), "m": Decimal(60), "h": Decimal(3600)}
_NUMBER_AND_UNIT = re.compile(r"([0-9.]+)([A-Za-z]*)")


def parse_bytes(text: str) -> int:
    """Bytes of a memory quantity, rounded up as Kubernetes does. Raises ValueError for anything else."""
    number, unit = _single(text, _BYTES_PATTERN, 'a memory quantity like "2Gi" or "512Mi"')
    return _ceil(number * _BYTE_UNITS[unit])


def parse_cpu(text: str) -> int:
    """Thousandths of a CPU of a CPU quantity. Raises ValueError for anything else."""
    number, unit = _single(text, _CPU_PATTERN, 'a CPU quantity like "2" or "500m"')
    return _ceil(number * (1 if unit == "m" else 1000))


def parse_duration(text: str) -> float:
    """Seconds of a duration. Raises ValueError for anything else."""
    if not re.fullmatch(_DURATION_PATTERN, text):
        raise ValueError(f'{text!r} is not a duration; write one like "2s", "100ms" or "1m30s"')
    return float(sum(Decimal(number) * _SECONDS[unit] for number, unit in _NUMBER_AND_UNIT.findall(text)))


def _single(text: str, pattern: str, wanted: str) -> tuple[Decimal, str]:
    if not re.fullmatch(pattern, text):
        raise ValueError(f"{text!r} is not {wanted}")
    ((number, unit),) = _NUMBER_AND_UNIT.findall(text)
    return Decimal(number), unit


def _ceil(value: Decimal) -> int:
    return int(value.to_integral_value(rounding=ROUND_CEILING))
