"""`busload bench` as a user runs it: output, exit codes, signals, and a real server."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fake_openai import Behaviour, FakeOpenAI, serving

from busload_runtime.bench.outcome import levels_from_json
from e2e.bench.server import BusloadServer

COMMAND = (sys.executable, "-m", "busload_operator.cli", "bench")

NOBODY = ("--url=http://127.0.0.1:9/v1", "--model=m")


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=120)


def test_a_real_server_gives_what_was_asked_for(real: BusloadServer, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    arguments = ("--url", real.url, "--model", real.model, "--concurrency=1,4", "--requests=6", "--input-tokens=40:60")
    done = bench(*arguments, "--output-tokens=12", f"--json={out}", "--records", "--seed=5")
    assert done.returncode == 0, done.stderr
    one, four = levels_from_json(json.loads(out.read_text()))
    for level in (one, four):
        assert len(level.outcomes) == 6
        assert all(outcome.ok and outcome.from_usage for outcome in level.outcomes)
        assert {outcome.output_tokens for outcome in level.outcomes} == {12}
        assert all(40 <= outcome.input_tokens <= 60 for outcome in level.outcomes)
        assert all(outcome.cached_tokens == 0 for outcome in level.outcomes), "prompts must be new to the server"
    assert "concurrency 4" in done.stdout
    assert "seed 5" in done.stdout


def test_a_shared_prefix_is_found_in_the_servers_cache(real: BusloadServer, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    arguments = ("--url", real.url, "--model", real.model, "--concurrency=1", "--requests=4", "--input-tokens=9")
    done = bench(*arguments, "--output-tokens=2", "--shared-prefix-tokens=256", f"--json={out}", "--records")
    assert done.returncode == 0, done.stderr
    (level,) = levels_from_json(json.loads(out.read_text()))
    assert {outcome.input_tokens for outcome in level.outcomes} == {265}
    # The warm-up brought the prefix in.
    assert all(outcome.cached_tokens == 256 for outcome in level.outcomes)


def test_refusals_of_a_full_queue_are_counted_and_fail_the_command(real: BusloadServer) -> None:
    arguments = ("--url", real.url, "--model", real.model, "--concurrency=12", "--requests=12", "--output-tokens=256")
    done = bench(*arguments, "--json=-")
    assert done.returncode == 1
    document = json.loads(done.stdout)
    failures = document["levels"][0]["summary"]["failures"]
    assert set(failures) == {"refused"}
    assert failures["refused"] >= 7 - 4, "four run, one waits; whoever comes while places are free gets in"
    assert "failed (refused), the first: HTTP 429" in done.stderr
    assert bench(*arguments, "--allow-errors").returncode == 0


def test_chat_with_words_on_a_real_server(real: BusloadServer) -> None:
    arguments = ("--url", real.url, "--model", real.model, "--endpoint=chat", "--rate=2", "--requests=3")
    done = bench(*arguments, "--output-tokens=8", "--slo-ttft=60", "--slo-itl=60")
    assert done.returncode == 0, done.stderr
    assert "3 of 3 succeeded within the goals" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "Missing option '--model'"),
        (("--model=m", "--concurrency=x"), "--concurrency 'x' is not a list of numbers"),
        (("--model=m", "--input-tokens=-3"), "--input-tokens '-3' is not a length in tokens"),
        (("--model=m", "--url=nowhere"), "--url 'nowhere' is not an http(s) URL"),
        (("--model=m", "--json=/no/such/folder/x"), "--json /no/such/folder/x: No such file or directory; name a file"),
        (("--model=m", "--trace=/no/such"), "--trace /no/such: No such file"),
    ],
)
def test_wrong_flags_end_with_exit_code_2(arguments: tuple[str, ...], said: str) -> None:
    done = bench(*arguments)
    assert done.returncode == 2
    assert said in done.stderr


def test_nobody_there_fails_and_says_so() -> None:
    done = bench(*NOBODY, "--requests=2", "--concurrency=1")
    assert done.returncode == 1
    assert "2 failed (connection), the first: " in done.stdout


def test_a_result_that_cannot_be_written_is_said_below_the_table() -> None:
    done = bench(*NOBODY, "--requests=2", "--concurrency=1", "--json=/dev/full", "--allow-errors")
    assert done.returncode == 1
    assert "2 failed (connection)" in done.stdout
    assert done.stderr.splitlines()[-1] == "--json /dev/full: not written: No space left on device"


def test_more_clients_than_open_files_are_refused_at_once() -> None:
    limited = ("sh", "-c", 'ulimit -n 64; exec "$@"', "sh", *COMMAND, *NOBODY)
    done = subprocess.run([*limited, "--concurrency=1,33"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "--concurrency 33 needs 65 open files and this process may have 64" in done.stderr
    assert "or give at most 32" in done.stderr
    done = subprocess.run([*limited, "--concurrency=32"], capture_output=True, text=True, timeout=120)
    assert "failed (connection)" in done.stdout
    assert "Too many open files" not in done.stdout


@pytest.mark.parametrize(("number", "interrupted"), [(signal.SIGINT, True), (signal.SIGTERM, False)])
async def test_a_signal_prints_what_was_measured(number: signal.Signals, interrupted: bool) -> None:
    fake = FakeOpenAI(Behaviour(gap=0.05))
    async with serving(fake) as url:
        process = await asyncio.create_subprocess_exec(
            *COMMAND, f"--url={url}", "--model=m", "--concurrency=2", "--seconds=600", "--output-tokens=8",
            "--warmup=0", "--json=-", "--records",
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | {"COLUMNS": "200"},
        )  # fmt: skip
        await fake.received(4)  # the second request of both clients
        process.send_signal(number)
        output, errors = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, errors
    (level,) = levels_from_json(json.loads(output))
    assert level.errors == []
    assert len(level.outcomes) >= 4
    assert any(outcome.interrupted for outcome in level.outcomes) == interrupted
    assert sum(outcome.ok for outcome in level.outcomes) >= 2
    assert ("still ran when the measurement was ended" in errors.decode()) == interrupted
