"""An operator is upgraded before its pods: what a pod makes of a document that is newer than itself."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from busload_runtime.contract import VERSION, Limits, LimitsDocument, LimitsError, Pace, StepLaw, parse_limits

LIMITS = Limits(2048, 8, 90, 512, 256, 262_144)
TRIAL = Limits(1024, 8, 70, 512, 256, 262_144)
WHOLE = LimitsDocument(3, LIMITS, "chat-1", TRIAL, Pace(2.0, 0.1, StepLaw(0.01, 0.001, 0.0, 1e-5)))
PLACES: tuple[tuple[str, ...], ...] = (
    (),
    ("default",),
    ("trial",),
    ("trial", "limits"),
    ("objectives",),
    ("stepLaw",),
)


def body(version: Any, places: tuple[tuple[str, ...], ...], value: Any = 7) -> str:
    """The whole document with an unknown field at each of the places."""
    made: dict[str, Any] = json.loads(WHOLE.to_json()) | {"version": version}
    for place in places:
        inside = made
        for name in place:
            inside = inside[name]
        inside["somethingNew"] = value
    return json.dumps(made)


@pytest.mark.parametrize("place", PLACES)
def test_a_later_version_may_add_fields_anywhere(place: tuple[str, ...]) -> None:
    assert parse_limits(body(VERSION + 1, (place,))) == WHOLE


@pytest.mark.parametrize("place", PLACES)
def test_in_its_own_version_an_unknown_field_is_a_mistake(place: tuple[str, ...]) -> None:
    with pytest.raises(LimitsError, match="unknown field 'somethingNew'"):
        parse_limits(body(VERSION, (place,)))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)


@given(st.lists(st.sampled_from(PLACES), unique=True).map(tuple), json_values, st.integers(VERSION + 1, 2**31))
def test_whatever_is_added_changes_nothing(places: tuple[tuple[str, ...], ...], value: Any, version: int) -> None:
    assert parse_limits(body(version, places, value)) == WHOLE


def test_what_a_later_version_says_must_still_be_right() -> None:
    wrong = json.loads(body(VERSION + 1, ()))
    wrong["default"]["batchSize"] = 0
    with pytest.raises(LimitsError, match=r"default.batchSize must be an integer from 1 to 4096, got 0"):
        parse_limits(json.dumps(wrong))
    del wrong["default"]["batchSize"]
    with pytest.raises(LimitsError, match=r"default.batchSize must be an integer from 1 to 4096, got None"):
        parse_limits(json.dumps(wrong))


@pytest.mark.parametrize("version", [0, -1, "2", 1.5, True, None, 2**40])
def test_a_version_is_a_number(version: Any) -> None:
    with pytest.raises(LimitsError, match="version must be an integer from 1"):
        parse_limits(body(version, ()))


def test_the_first_version_needs_no_mark() -> None:
    """Pods that know no versions refuse the field, so it is not written before there is a second one."""
    assert VERSION > 1 or "version" not in json.loads(WHOLE.to_json())
    assert parse_limits(WHOLE.to_json()) == WHOLE
