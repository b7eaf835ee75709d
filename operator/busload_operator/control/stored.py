"""The status that is stored, as far as this version of the operator understands it. Pure.

A newer version, or a person, may have left what this one does not know: it must neither stop the reconcile nor be
written back (server-side apply refuses fields that the CRD does not declare).
"""

import copy
from typing import Any

from pydantic import ValidationError

from busload_operator.api.status import Status
from busload_operator.control.kinds import Object

_ROUNDS = 8  # no deeper: each round may take a part out of a thing that then lacks it, and goes in the next


def stored_status(live: Object) -> Object:
    """The status of a service without each part that the API of this version would refuse."""
    status = live.get("status")
    if not isinstance(status, dict):
        return {}
    for _ in range(_ROUNDS):
        try:
            known = Status.model_validate(status)
            return known.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude_none=True)
        except ValidationError as error:
            wrong = dict(map(_place, error.errors(include_url=False, include_input=False)))
            status = copy.deepcopy(status)
        for place, most in reversed(wrong.items()):  # from the end, so that the numbers of list items stay right
            if not any(place[:length] in wrong for length in range(len(place))):
                _take_out(status, place, most)
    return {}


def _place(problem: Any) -> tuple[tuple[str | int, ...], int]:
    """Where the part is that must go, and how much of it may stay. What lacks something goes whole."""
    place: tuple[str | int, ...] = problem["loc"]
    if problem["type"] == "too_long":
        return place, problem["ctx"]["max_length"]
    return (place[:-1] if problem["type"] == "missing" else place), 0


def _take_out(status: Object, place: tuple[str | int, ...], most: int) -> None:
    if not place:
        status.clear()
        return
    inside: Any = status
    for step in place[:-1]:
        inside = inside[step]
    if most:
        inside[place[-1]] = inside[place[-1]][:most]
    else:
        del inside[place[-1]]
