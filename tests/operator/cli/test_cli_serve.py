from dataclasses import fields
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from busload_operator.cli import build_app
from busload_runtime.contract import Limits
from busload_runtime.server import start
from busload_runtime.server.options import ServeOptions


def run(*arguments: str, **environment: str) -> Result:
    return CliRunner(env={"COLUMNS": "200", "TERM": "dumb"} | environment).invoke(build_app(), arguments)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServeOptions]:
    """The options with which the server would have been started."""
    seen: list[ServeOptions] = []

    def serve(options: ServeOptions) -> int:
        seen.append(options)
        return 0

    monkeypatch.setattr(start, "serve", serve)
    return seen


def test_help_lists_every_flag_with_its_default() -> None:
    text = run("serve", "--help").output
    for flag in (
        "--model", "--served-model-name", "--host", "--port", "--executor", "--memory", "--limits-file", "--pod-name",
        "--drain-seconds", "--engine-timeout", *(f"--{field.name.replace('_', '-')}" for field in fields(Limits)),
    ):  # fmt: skip
        assert flag in text
    assert "POD_NAME" in text
    assert "262144" in text


def test_the_name_comes_from_the_model(served: list[ServeOptions]) -> None:
    run("serve")
    run("serve", "--model=/models/some.Q8_0.gguf")
    run("serve", "--model=/models/some.gguf", "--served-model-name=chat")
    assert [options.served_model_name for options in served] == ["smollm2-135m-instruct", "some.Q8_0", "chat"]


def test_the_pod_name_comes_from_the_environment(served: list[ServeOptions]) -> None:
    run("serve", POD_NAME="chat-0")
    assert served[0].pod_name == "chat-0"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--batch-size=0",), "--batch-size must be an integer from 1 to 4096, got 0"),
        (("--batch-size=64", "--token-budget=32"), "--token-budget 32 is below --batch-size 64"),
        (("--kv-cache-percent=101",), "--kv-cache-percent must be an integer from 1 to 100, got 101"),
        (("--limits-file=/nowhere/limits.json",), "/nowhere/limits.json"),
        (("--host=203.0.113.7",), "--host 203.0.113.7"),
        (("--port=99999",), "--port must be from 0 to 65535 (0 takes a free one), got 99999"),
        (("--port=http",), "--port"),
        (("--memory=0",), "--memory must be a positive number of bytes, got 0"),
        (("--drain-seconds=-1",), "--drain-seconds must be 0 or more, got -1"),
        (("--engine-timeout=nan",), "--engine-timeout must be 1 or more seconds, got nan"),
        (("--no-such-flag",), "--no-such-flag"),
    ],
)
def test_wrong_flags_end_with_exit_code_2_and_say_which(
    flags: tuple[str, ...], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    result = run("serve", "--port=0", *flags)
    assert result.exit_code == 2
    # What typer refuses comes through Python's stderr, what the server refuses straight from the descriptor.
    assert said in result.stderr + capfd.readouterr().err


@pytest.mark.parametrize("content", ["", "{}", '{"generation": 1, "default": {"batchSize": 4}}', "\xff"])
def test_a_limits_file_that_is_wrong_from_the_start_ends_the_start(
    tmp_path: Path, content: str, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "limits.json"
    path.write_bytes(content.encode("latin-1"))
    result = run("serve", "--port=0", f"--limits-file={path}")
    assert result.exit_code == 2
    said = result.stderr + capfd.readouterr().err
    assert str(path) in said
    assert len(said.strip().splitlines()) == 1
