"""A recording replays to the same results; golden ones pin what the core decides from given observations.

A change of policy changes the golden recordings: `UPDATE_GOLDEN=1` runs the scenarios anew, and the difference of the
`.decisions.jsonl` files is what a reviewer reads.
"""

import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import fluid_service
import pytest
from fluid_service import BOUNDS, Service, StepLaw
from hypothesis import given
from hypothesis import strategies as st

from busload_operator.tuning import Counters, Inputs, Mode, PodSample, Range, Result, State, step
from busload_operator.tuning.codec import CodecError, decode, dumps, encode
from busload_operator.tuning.recording import RecordingError, decisions, header, line, replay

GOLDEN = Path(__file__).parent / "recordings"


class Recorder:
    """Takes the place of `step` in a scenario."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.results: list[Result] = []
        self.states: list[State] = []
        self._before: Inputs | None = None

    def __call__(self, state: State, inputs: Inputs) -> tuple[State, Result]:
        if not self.lines:
            self.lines.append(header("demo/chat", "2026-01-01T00:00:00Z", state) + "\n")
        after, result = step(state, inputs)
        self.lines.append(line(inputs, self._before, result) + "\n")
        self.results.append(result)
        self.states.append(after)
        self._before = inputs
        return after, result


def burst() -> None:
    """32 requests at once: the batch limit is doubled until they flow, and lowered again when they are gone."""
    service = Service(noise=0.1)
    service.run(20)
    service.send(32)
    service.run(100)


def overload() -> None:
    """More than all settings can serve: a replica comes."""
    service = Service(law=StepLaw(a=0.06, b=0.02), startup=10, noise=0.05)
    service.clients = 40
    service.run(120)


def bad_data() -> None:
    """A pod whose counters lie, restart, and fall silent while requests wait."""

    def tamper(now: float, sample: PodSample) -> PodSample:
        if sample.counters is None or now < 1030:
            return sample
        if now < 1040:
            return replace(sample, counters=replace(sample.counters, generated_tokens=math.nan))
        if now < 1050:
            return replace(sample, counters=replace(sample.counters, steps=0.0, busy_seconds=0.0))
        return replace(sample, counters=None, problem="did not answer") if now < 1070 else sample

    service = Service(tamper=tamper, bounds=replace(BOUNDS, replicas=Range(1, 1)), mode=Mode.RECOMMEND)
    service.clients = 16
    service.run(90)


def record(scenario: Callable[[], None], patch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    with patch.context() as patched:
        patched.setattr(fluid_service, "step", recorder)
        scenario()
    return recorder


def replayed(lines: list[str]) -> Iterator[Any]:
    return replay(lines, "test.jsonl")


@pytest.mark.parametrize("scenario", [burst, overload, bad_data])
def test_golden_recordings(scenario: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    path, made = GOLDEN / f"{scenario.__name__}.jsonl", GOLDEN / f"{scenario.__name__}.decisions.jsonl"
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.mkdir(exist_ok=True)
        lines = record(scenario, monkeypatch).lines
        path.write_text("".join(lines), encoding="utf-8")
        made.write_text("".join(f"{text}\n" for text in decisions(replayed(lines))), encoding="utf-8")
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    steps = list(replayed(lines))
    assert len(steps) == len(lines) - 1 >= 40
    first = next((taken for taken in steps if not taken.agrees), None)
    assert first is None, f"{path}: line {first.line}: {first.result}; after a change of policy run UPDATE_GOLDEN=1"
    assert "".join(f"{text}\n" for text in decisions(steps)) == made.read_text(encoding="utf-8")


def test_the_scenarios_say_something() -> None:
    kinds = {}
    for name in ("burst", "overload", "bad_data"):
        text = (GOLDEN / f"{name}.decisions.jsonl").read_text(encoding="utf-8")
        kinds[name] = {(body["event"], body["knob"]) for body in map(json.loads, text.splitlines())}
    assert kinds["burst"] >= {("made", "batchSize"), ("closed", "batchSize")}
    assert ("made", "replicas") in kinds["overload"]
    assert ("made", "batchSize") in kinds["bad_data"]


def test_a_recording_replays_to_the_very_results_and_states(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = record(bad_data, monkeypatch)
    steps = list(replayed(recorder.lines))
    assert [dumps(encode(taken.result)) for taken in steps] == [dumps(encode(result)) for result in recorder.results]
    assert all(taken.agrees for taken in steps)


def test_any_part_can_be_replayed_from_the_state_in_its_header(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = record(overload, monkeypatch)
    whole = list(replayed(recorder.lines))
    at = 30
    # The header of a part takes the settings anew, so its first line carries them all.
    first = line(whole[at].inputs, None, whole[at].result) + "\n"
    part = [header("demo/chat", "", recorder.states[at - 1]) + "\n", first, *recorder.lines[at + 2 :]]
    later = list(replayed(part))
    assert all(taken.agrees for taken in later)
    assert list(decisions(later))[-1].partition(",")[2] == list(decisions(whole))[-1].partition(",")[2]
    # And one after the other in one file.
    assert sum(1 for taken in replayed([*recorder.lines, *part]) if taken.agrees) == len(whole) + len(later)


def test_another_result_is_noticed_at_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = record(burst, monkeypatch).lines
    body = json.loads(lines[25])
    body["pods"][0]["counters"][5] += 100_000
    lines[25] = dumps(body) + "\n"
    differing = [taken.line for taken in replayed(lines) if not taken.agrees]
    assert differing[0] == 26


def test_a_line_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = record(burst, monkeypatch).lines
    assert sum(map(len, lines[2:])) / len(lines[2:]) < 500


START = header("demo/chat", "", State.initial()) + "\n"


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("", "test.jsonl: holds no recording"),
        ("{\n", "line 1: is not JSON"),
        ("[]\n", "line 1: must be an object, got []"),
        ('{"now":1,"pods":[],"result":""}\n', "line 1: a step before any header"),
        (
            '{"busload":"recording","version":2}\n',
            "line 1: is 'recording' of version 2; this busload reads recordings of",
        ),
        (START.replace("next_id", "another"), "line 1: state: unknown field 'another'"),
        (START.replace('"next_id":1', '"next_id":"x"'), "line 1: state.next_id is 'x'; must be a whole number"),
        (START.replace('"clock",', ""), "line 1: counters are"),
        (START + '{"now":1,"pods":[],"result":"x"}\n', "line 2: inputs: field limits is missing"),
        (START + '{"now":1,"pods":[],"result":"x","more":1}\n', "line 2: unknown field 'more'"),
        (
            START + '{"now":1,"pods":[{"pod":"a","at":1,"ready":true,"counters":[1]}],"result":"x"}\n',
            "a list of 38 numbers",
        ),
        (START + '{"now":1,"pods":[3],"result":"x"}\n', "line 2: pods[0] is 3; must be an object"),
        (START + "\n", "line 2: is not JSON"),
        (START + "[" * 100_000 + "\n", "line 2: is not JSON"),
    ],
)
def test_a_bad_file_names_file_line_and_field(text: str, hint: str) -> None:
    with pytest.raises(RecordingError) as caught:
        list(replayed(text.splitlines(keepends=True)))
    assert hint in str(caught.value)
    assert str(caught.value).startswith("test.jsonl")
    assert len(str(caught.value)) < 800


def test_a_last_line_that_was_cut_off_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = record(burst, monkeypatch).lines
    assert len(list(replayed([*lines[:-1], lines[-1][:50]]))) == len(lines) - 2


numbers = st.floats(allow_nan=True, allow_infinity=True) | st.integers(0, 2**40).map(float)
samples = st.builds(
    PodSample,
    pod=st.text(max_size=5),
    at=numbers,
    counters=st.none()
    | st.builds(
        Counters,
        *[numbers] * (len(fields(Counters)) - 1),
        sequence_lengths=st.none() | st.lists(numbers, max_size=3).map(tuple),
    ),
    ready=st.booleans(),
    problem=st.text(max_size=5),
)


@given(samples)
def test_samples_keep_every_bit(sample: PodSample) -> None:
    raw = json.loads(dumps(encode(sample)))
    assert repr(decode(PodSample, raw, "sample")) == repr(sample)


@given(st.data())
def test_what_does_not_match_is_refused_and_never_taken(data: st.DataObject) -> None:
    raw = json.loads(dumps(encode(State.initial())))
    name = data.draw(st.sampled_from(sorted(raw)))
    junk = data.draw(st.sampled_from(["x", -1, 1.5, True, [1], {"a": 1}, [[["x"]]]]))
    raw[name] = junk
    problem = ""
    try:
        found = decode(State, raw, "state")
    except CodecError as error:
        problem = str(error)
    else:
        assert json.loads(dumps(encode(found)))[name] == junk
    assert not problem or f"state.{name}" in problem
