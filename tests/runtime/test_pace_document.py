"""Objectives and step law in the limits document: optional, checked like the limits, back as they were written."""

import json
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from busload_runtime.contract import Limits, LimitsDocument, LimitsError, Pace, StepLaw, parse_limits, parse_pace

LIMITS = Limits(2048, 8, 90, 512, 256, 262_144)
milliseconds = st.none() | st.integers(1, 3_600_000).map(lambda value: value / 1000)
seconds = st.floats(0, 3600)


@given(
    first=milliseconds,
    between=milliseconds,
    law=st.none() | st.builds(StepLaw, seconds, seconds, seconds, seconds),
    trial=st.booleans(),
)
def test_it_comes_back_as_it_was_written(
    first: float | None, between: float | None, law: StepLaw | None, trial: bool
) -> None:
    pace = Pace(first, between, law)
    document = LimitsDocument(3, LIMITS, "chat-1" if trial else None, LIMITS if trial else None, pace)
    assert parse_limits(document.to_json()) == document


def test_without_them_the_document_is_as_it_was() -> None:
    document = LimitsDocument(3, LIMITS)
    assert json.loads(document.to_json()).keys() == {"generation", "default"}
    assert parse_limits(document.to_json()).pace == Pace(None, None, None)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"objectives": {"timeToFirstTokenMs": 0}}, "objectives.timeToFirstTokenMs must be a number from 0.001"),
        ({"objectives": {"interTokenLatencyMs": "80"}}, "objectives.interTokenLatencyMs must be a number"),
        ({"objectives": {"interTokenLatencyMs": True}}, "objectives.interTokenLatencyMs must be a number"),
        ({"objectives": {"interTokenLatencyMs": None}}, "objectives.interTokenLatencyMs must be a number"),
        ({"objectives": {"ttft": 2}}, "unknown field 'ttft' in objectives; allowed: interTokenLatencyMs, timeToFirst"),
        ({"objectives": [2]}, "objectives must be an object with timeToFirstTokenMs and interTokenLatencyMs"),
        ({"stepLaw": {"a": 1, "b": 0, "c": 0}}, "stepLaw.d must be a number from 0 to 3600, got None"),
        ({"stepLaw": {"a": float("nan"), "b": 0, "c": 0, "d": 0}}, "stepLaw.a must be a number"),
        ({"stepLaw": {"a": -1e-9, "b": 0, "c": 0, "d": 0}}, "stepLaw.a must be a number"),
        ({"stepLaw": {"a": 0, "b": 0, "c": 0, "d": 0, "e": 0}}, "unknown field 'e' in stepLaw"),
        ({"objectives": None}, "objectives must be an object"),
        ({"stepLaw": None}, "stepLaw must be an object"),
        ({"stepLaw": "fast"}, "stepLaw must be an object with a, b, c, d"),
    ],
)
def test_what_cannot_be_used_is_named(body: dict[str, Any], text: str) -> None:
    whole = {"generation": 3, "default": LIMITS.to_json(), **body}
    for parse in (lambda: parse_limits(json.dumps(whole)), lambda: parse_pace(body)):
        with pytest.raises(LimitsError) as error:
            parse()
        assert text in str(error.value)
