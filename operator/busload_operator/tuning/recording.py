"""What the core saw, as lines of JSON, and the core run over them again. Pure: lines in, lines out.

A recording is a header line and one line for each step. The header carries the state at that moment, so that each file,
and each part after a gap, can be replayed on its own. A step's line has the samples, the rest of `Inputs` where it
differs from the line before, and a digest of the `Result`. Nothing in it comes from prompts or answers.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any

from busload_operator.tuning.codec import CodecError, decode, dumps, encode
from busload_operator.tuning.counters import OPTIONAL_SAMPLES, SAMPLES, Counters
from busload_operator.tuning.state import State
from busload_operator.tuning.step import step
from busload_operator.tuning.types import Inputs, PodSample, Result

VERSION = 1
_DIGITS = 9
"""Significant digits of a digest's numbers. Python 3.12 sums floats with less rounding than 3.11: the last digits of
equal steps differ between them, what is decided does not."""
_COUNTERS = tuple(field.name for field in fields(Counters))
_SETTINGS = tuple(field.name for field in fields(Inputs) if field.name not in ("now", "pods"))


class RecordingError(ValueError):
    """A recording that cannot be read; the message names file, line, field and what is allowed."""


def header(service: str, started: str, state: State) -> str:
    """The line that a recording, or a part of one, begins with. `started` is the wall clock, for people."""
    body = {"busload": "recording", "version": VERSION, "service": service, "started": started, "counters": _COUNTERS}
    return dumps(body | {"state": encode(state)})


def line(inputs: Inputs, before: Inputs | None, result: Result) -> str:
    """The line of one step; `before` is what the line before it recorded, None after a header."""
    changed = {
        name: encode(getattr(inputs, name))
        for name in _SETTINGS
        if before is None or getattr(inputs, name) != getattr(before, name)
    }
    body: dict[str, Any] = {"now": encode(inputs.now), "pods": [_pod(sample) for sample in inputs.pods]}
    return dumps(body | ({"set": changed} if changed else {}) | {"result": digest(result)})


def digest(result: Result) -> str:
    """Sixteen digits that are the same for the same result."""
    return hashlib.sha256(dumps(encode(result, _DIGITS)).encode()).hexdigest()[:16]


def _pod(sample: PodSample) -> dict[str, Any]:
    body: dict[str, Any] = {"pod": sample.pod, "at": encode(sample.at), "ready": sample.ready}
    if sample.memory_kills:
        body["memory_kills"] = sample.memory_kills
    if sample.probed is not None:
        body["probed"] = encode(sample.probed)
    if sample.counters is None:
        return body | {"problem": sample.problem}
    return body | {"counters": [encode(getattr(sample.counters, name)) for name in _COUNTERS]}


@dataclass(frozen=True, slots=True)
class Replayed:
    """One step of a recording, taken again."""

    line: int
    """In the file, from 1."""
    service: str
    inputs: Inputs
    result: Result
    recorded: str
    """Digest of the result when it was recorded."""

    @property
    def agrees(self) -> bool:
        return digest(self.result) == self.recorded


def replay(lines: Iterable[str], file: str) -> Iterator[Replayed]:
    """Runs the core over the recorded steps. Raises `RecordingError` at the first line that cannot be used.

    A last line without its end is what a process leaves that was killed while it wrote: it is left out.
    """
    part: _Part | None = None
    number = 0
    for number, text in enumerate(lines, 1):
        if not text.endswith("\n"):
            break
        where = f"{file}: line {number}"
        body = _object(text, where)
        if "busload" in body:
            part = _start(body, where)
            continue
        if part is None:
            raise RecordingError(f"{where}: a step before any header; the file is not the beginning of a recording")
        inputs, recorded = _inputs(body, part, where)
        part.state, result = step(part.state, inputs)
        part.inputs = inputs
        yield Replayed(number, part.service, inputs, result, recorded)
    if part is None:
        raise RecordingError(f"{file}: holds no recording; expected a header line and a line for each step")


@dataclass(slots=True)
class _Part:
    """From one header to the next."""

    service: str
    counters: tuple[str, ...]
    state: State
    inputs: Inputs | None = None


def _object(text: str, where: str) -> dict[str, Any]:
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RecordingError(f"{where}: is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise RecordingError(f"{where}: must be an object, got {body!r:.80}")
    return body


def _start(body: dict[str, Any], where: str) -> _Part:
    if body.get("busload") != "recording" or body.get("version") != VERSION:
        found = f"{body.get('busload')!r:.40} of version {body.get('version')!r:.20}"
        raise RecordingError(f"{where}: is {found}; this busload reads recordings of version {VERSION}")
    names = body.get("counters")
    if not isinstance(names, list) or not set(SAMPLES) <= set(names) <= set(_COUNTERS) or len(names) > len(set(names)):
        raise RecordingError(
            f"{where}: counters are {names!r:.80}; must be {', '.join(SAMPLES)}, and may be "
            f"{', '.join(OPTIONAL_SAMPLES)}: replay with the version that recorded it"
        )
    try:
        return _Part(
            decode(str, body.get("service"), "service"), tuple(names), decode(State, body.get("state"), "state")
        )
    except CodecError as error:
        raise RecordingError(f"{where}: {error}") from None


def _inputs(body: dict[str, Any], part: _Part, where: str) -> tuple[Inputs, str]:
    if unknown := sorted(set(body) - {"now", "pods", "set", "result"}):
        raise RecordingError(f"{where}: unknown field {unknown[0]!r:.80}; allowed: now, pods, set, result")
    pods, changed = body.get("pods"), body.get("set", {})
    if not isinstance(pods, list) or not isinstance(changed, dict):
        raise RecordingError(f"{where}: pods must be a list and set an object")
    before = {} if part.inputs is None else {name: encode(getattr(part.inputs, name)) for name in _SETTINGS}
    try:
        samples = [_sample(pod, part.counters, f"pods[{index}]") for index, pod in enumerate(pods)]
        whole = {"now": body.get("now"), "pods": samples, **before, **changed}
        return decode(Inputs, whole, "inputs"), decode(str, body.get("result"), "result")
    except CodecError as error:
        raise RecordingError(f"{where}: {error}") from None


def _sample(pod: Any, names: tuple[str, ...], where: str) -> dict[str, Any]:
    """A pod's sample as `encode` would have it."""
    if not isinstance(pod, dict):
        raise CodecError(f"{where} is {pod!r:.80}; must be an object")
    counters = pod.get("counters")
    if counters is None:
        return {**pod, "counters": None}
    if not isinstance(counters, list) or len(counters) != len(names):
        raise CodecError(f"{where}.counters is {counters!r:.80}; must be a list of {len(names)} numbers")
    return {**pod, "counters": dict(zip(names, counters, strict=True))}


def decisions(replayed: Iterable[Replayed]) -> Iterator[str]:
    """A line of JSON for each decision made and each outcome known, in order; the same for the same steps."""
    for taken in replayed:
        for event, decision in (
            *(("closed", closed) for closed in taken.result.closed),
            *((("made", taken.result.decision),) if taken.result.decision is not None else ()),
        ):
            yield dumps({"line": taken.line, "event": event, **encode(decision, _DIGITS)})
