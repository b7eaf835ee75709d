"""Recordings on disk: what the operator writes can be replayed, stays inside its size, and is never in its way."""

import asyncio
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from control_helpers import pod, roll_out, service, until
from fake_api import FakeApi
from typer.testing import CliRunner

from busload_operator.cli import build_app
from busload_operator.control.kinds import Key
from busload_operator.control.record import Recording
from busload_operator.tuning import (
    Bounds,
    Inputs,
    Mode,
    Objectives,
    PodSample,
    Range,
    Scaling,
    State,
    step,
)
from busload_operator.tuning.recording import replay
from busload_runtime.contract import Limits

Running = Callable[..., Any]
KEY = Key("demo", "chat")
INPUTS = Inputs(
    now=0.0,
    pods=(PodSample("chat-0", 0.0, None, True, "did not answer"),),
    limits=Limits(2048, 4, 90, 512, 256, 262_144),
    generation=1,
    replicas=1,
    bounds=Bounds(Range(1024, 8192), Range(20, 90), Range(1, 64), 4, Range(1, 2)),
    objectives=Objectives(2.0, 0.1),
    mode=Mode.AUTO,
    scaling=Scaling.OBSERVED,
)


class Steps:
    """A tuner's steps, one after the other."""

    def __init__(self) -> None:
        self.state, self.now = State.initial(), 0.0

    def take(self, recording: Recording | None, count: int = 1) -> None:
        for _ in range(count):
            self.now += 2
            inputs = replace(INPUTS, now=self.now)
            before = self.state
            self.state, result = step(before, inputs)
            if recording is not None:
                recording.add(before, inputs, result, self.state)


def read(path: Path) -> list[float]:
    """Times of the steps; every result agrees."""
    with path.open(encoding="utf-8") as lines:
        steps = list(replay(lines, str(path)))
    assert all(taken.agrees for taken in steps)
    return [taken.inputs.now for taken in steps]


def headers(path: Path) -> int:
    return path.read_text(encoding="utf-8").count('"busload":"recording"')


def test_steps_with_gaps_and_restarts_replay(tmp_path: Path) -> None:
    path, steps = tmp_path / "demo.chat.jsonl", Steps()
    recording = Recording(tmp_path, KEY, 2**20)
    steps.take(recording, 3)
    steps.take(None, 2)  # the service was kept out for a while
    steps.take(recording, 2)
    assert read(path) == [2, 4, 6, 12, 14]
    assert headers(path) == 2
    with path.open("a") as file:
        file.write('{"now":16,"po')  # killed while it wrote
    steps.take(Recording(tmp_path, KEY, 2**20), 2)
    assert read(path) == [2, 4, 6, 12, 14, 16, 18]
    assert headers(path) == 3


def test_both_files_stay_inside_the_size(tmp_path: Path) -> None:
    recording, steps = Recording(tmp_path, KEY, 8192), Steps()
    steps.take(recording, 300)
    new, old = tmp_path / "demo.chat.jsonl", tmp_path / "demo.chat.1.jsonl"
    assert set(tmp_path.iterdir()) == {new, old}
    assert new.stat().st_size + old.stat().st_size < 8192 + 2 * 1024
    times = read(old) + read(new)
    assert times == [600 - 2 * i for i in reversed(range(len(times)))], (
        "the newest steps, none missing between the files"
    )


def test_a_disk_that_takes_nothing_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording, steps = Recording(tmp_path, KEY, 2**20), Steps()
    steps.take(recording)
    with monkeypatch.context() as broken, caplog.at_level(logging.WARNING):
        broken.setattr(Recording, "_write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        steps.take(recording, 3)
    assert [record.message for record in caplog.records] == [
        "recording is interrupted: [Errno 28] No space left on device"
    ]
    steps.take(recording)
    assert read(tmp_path / "demo.chat.jsonl") == [2, 10]


async def test_the_operator_records_what_its_tuners_see(api: FakeApi, running: Running, tmp_path: Path) -> None:
    folder = tmp_path / "recordings"
    os.mkdir(folder)
    path = folder / "demo.chat.jsonl"
    async with running(BUSLOAD_RECORD_DIRECTORY=str(folder)):
        await api.put("inferenceservices", service())
        quiet = service("silent")
        quiet["metadata"]["annotations"] = {"busload.dev/record": "false"}
        await api.put("inferenceservices", quiet)
        await until(lambda: api.get("deployments", "demo", "silent"))
        await until(lambda: api.get("deployments", "demo", "chat"))
        await roll_out(api)
        await api.put("pods", pod("silent-0", of="silent"))
        await until(lambda: path.exists() and path.read_text().count("\n") > 5)
        await asyncio.sleep(0.5)
    assert os.listdir(folder) == ["demo.chat.jsonl"]
    assert len(read(path)) >= 5


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(build_app(), ["replay", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_replay_and_verify(tmp_path: Path) -> None:
    golden = Path(__file__).parents[1] / "tuning" / "recordings"
    code, text = run(str(golden / "burst.jsonl"))
    assert code == 0
    *made, summary = text.splitlines(keepends=True)
    assert "".join(made) == (golden / "burst.decisions.jsonl").read_text(encoding="utf-8")
    assert "every result as it was recorded" in summary
    code, text = run(str(golden / "burst.jsonl"), "--verify")
    assert (code, len(text.splitlines())) == (0, 1)

    changed = (golden / "burst.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    start = changed[30].index('"result":"') + 10
    changed[30] = changed[30][:start] + "0" * 16 + changed[30][start + 16 :]
    path = tmp_path / "changed.jsonl"
    path.write_text("".join(changed), encoding="utf-8")
    code, text = run(str(path), "--verify")
    assert code == 1
    assert f"{path}: line 31: the result differs from the recorded one" in text
    assert run(str(path))[0] == 0


@pytest.mark.parametrize(
    ("content", "hint"),
    [
        (None, "cannot be read: [Errno 2] No such file"),
        (b"", "holds no recording"),
        (b"\xff\xfe\n", "cannot be read: 'utf-8' codec"),
        (b"hello\n", "line 1: is not JSON"),
    ],
)
def test_replay_of_a_bad_file(tmp_path: Path, content: bytes | None, hint: str) -> None:
    path = tmp_path / "bad.jsonl"
    if content is not None:
        path.write_bytes(content)
    code, text = run(str(path))
    assert code == 2
    assert f"{path}: " in text
    assert hint in text
