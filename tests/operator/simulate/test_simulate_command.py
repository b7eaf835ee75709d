"""`busload simulate` as a user meets it: table, JSON, plot, and one line for each thing that cannot be used."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from busload_operator.cli import build_app
from busload_operator.simulate import compare


def simulate(*arguments: str) -> Result:
    return CliRunner().invoke(build_app(), ["simulate", "--minutes", "2", "--load", "flat:2", *arguments])


def test_a_table_of_policies_and_their_decisions(tmp_path: Path) -> None:
    result = simulate("-p", "static:1", "-p", "tuner", "--batch-size", "2", "--max-batch-size", "64", "--decisions")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].split()[:3] == ["policy", "inside", "%"]
    assert [line.split()[0] for line in lines[1:3]] == ["static:1", "tuner"]
    assert "tuner at 0." in lines[3]
    assert "batchSize 2 -> 4" in lines[3]
    assert "requests in 2 min" in result.stderr
    assert "static:1: 1" in result.stderr
    assert "s simulated in" in result.stderr


def test_the_target_is_the_tuners_too(monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[float] = []
    run = compare.run

    def kept(name: str, load: Any, setup: Any, *rest: Any) -> Any:
        shares.append(setup.objectives.share)
        return run(name, load, setup, *rest)

    monkeypatch.setattr(compare, "run", kept)
    assert simulate("-p", "static:1", "--minutes", "0.1", "--target", "0.95").exit_code == 0
    assert shares == [0.95]


def test_order_and_time_budget_are_the_policys_unless_given() -> None:
    """Bursts on too few pods: what is lost is lost, and what can still be served is served."""
    burst = ("--load", "flat:6", "--cv", "4", "--hardware", "cpu", "--lengths", "300:20", "--minutes", "1")

    def inside(*arguments: str) -> list[float]:
        result = simulate(*burst, "--replicas", "1", "--json", "-", *arguments)
        assert result.exit_code == 0, result.output
        return [policy["inside"] for policy in json.loads(result.stdout)["policies"]]

    both, plain = ("--order", "late-last", "--time-budget"), ("--order", "fifo", "--no-time-budget")
    settings, static = inside("-p", "settings", "-p", "static:1")
    assert settings == inside("-p", "settings", *both)[0] != inside("-p", "settings", *plain)[0]
    assert static == inside("-p", "static:1", *plain)[0]
    order, budget = inside("-p", "static:1", *both[:2])[0], inside("-p", "static:1", *both[2:])[0]
    assert static not in (order, budget)
    assert inside("-p", "static:1", *both)[0] > max(static, budget) + 0.1


def test_json_has_every_number_and_is_the_same_each_time(tmp_path: Path) -> None:
    arguments = ("-p", "tuner", "--batch-size", "2", "--max-batch-size", "64", "--json", "-")
    first, second = simulate(*arguments).stdout, simulate(*arguments).stdout
    assert first == second
    (found,) = json.loads(first)["policies"]
    assert found["policy"] == "tuner"
    assert found["requests"] > 100
    assert found["limits_at_the_end"]["batchSize"] > 2
    assert len(found["timeline"]) == 23
    assert found["decisions"][0]["knob"] == "batchSize"
    assert found["decisions"][0]["prediction"]["basis"]
    path = tmp_path / "out.json"
    result = simulate("-p", "static:1", "--json", str(path))
    assert "static:1" in result.stdout
    assert json.loads(path.read_text())["policies"][0]["policy"] == "static:1"


def test_policies_beside_each_other_say_the_same() -> None:
    policies = ("-p", "tuner", "-p", "wva", "-p", "static:best", "--json", "-")
    beside = simulate(*policies, "--jobs", "2")
    assert beside.exit_code == 0, beside.output
    assert beside.stdout == simulate(*policies).stdout
    assert "3 policies in" in beside.stderr


@pytest.mark.parametrize(("suffix", "magic"), [(".svg", b"<?xml"), (".png", b"\x89PNG")])
def test_plots(tmp_path: Path, suffix: str, magic: bytes) -> None:
    files = [tmp_path / f"{n}{suffix}" for n in range(2)]
    for file in files:
        result = simulate(
            "-p", "tuner", "-p", "wva", "--batch-size", "2", "--max-batch-size", "64", "--plot", str(file)
        )
        assert result.exit_code == 0, result.output
    assert files[0].read_bytes().startswith(magic)
    assert files[0].read_bytes() == files[1].read_bytes()
    if suffix == ".svg":
        text = files[0].read_text()
        assert all(label in text for label in ("queue, seconds", "replicas", "wva: ", "batchSize 2"))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--load", "flat"), "--load 'flat' must be flat:RATE or diurnal:LOW:HIGH"),
        (("--load", "steps:3"), "--load 'steps:3' must be flat:RATE"),
        (("--load", "flat:0"), "rate: 0.0 must be a number above 0"),
        (("--lengths", "10:x"), "10:x: No such file"),
        (("--trace", "/nowhere.csv"), "/nowhere.csv: No such file"),
        (("--policy", "magic"), "policy 'magic' is unknown; known are tuner"),
        (("--hardware", "tpu"), "--hardware 'tpu' is unknown; known are roomy, tight, cpu"),
        (("--law", "a=fast"), "step law: 'a=fast' is not one of"),
        (("--ttft", "0"), "time to first token: 0.0 must be above 0"),
        (("--noise", "-1"), "noise: -1.0 must be 0 or more"),
        (("--noise", "inf"), "noise: inf must be 0 or more"),
        (("--front-end", "nan"), "front end: nan must be 0 or more"),
        (("--batch-size", "0"), "batchSize must be an integer from 1 to 4096, got 0"),
        (("--batch-size", "512", "--token-budget", "100"), "tokenBudget 100 is below batchSize 512"),
        (("--kv-tokens", "1000"), "less than one sequence of maxSequenceLength 16384"),
        (("--min-replicas", "4"), "replicas: 2 is outside the bounds 4 to 12"),
        (("--order", "lifo"), "--order 'lifo' is unknown; known are fifo, late-last"),
        (("--router", "fast"), "--router 'fast' is unknown; known are least-requests"),
        (("--fault", "fire:0@1"), "fault 'fire:0@1': expected KIND:POD@AT+SECONDS"),
        (("--jobs", "0"), "--jobs 0 must be at least 1"),
        (("--target", "99"), "--target 99.0 must be above 0 and at most 1"),
        (("--plot", "/tmp/x.pdf"), "must end with .svg or .png"),
        (("--plot", "/nowhere/x.svg"), "there is no folder /nowhere"),
        (("--json", "/nowhere/x.json"), "--json /nowhere/x.json: No such file"),
    ],
)
def test_what_cannot_be_used_is_told_in_one_line(arguments: tuple[str, ...], text: str) -> None:
    result = simulate("--minutes", "0.1", *arguments)
    assert result.exit_code == 2
    told = [line for line in result.stderr.splitlines() if line.startswith("busload simulate: ")]
    assert len(told) == 1
    assert text in told[0]
    assert "Traceback" not in result.stderr


def test_an_interrupt_shows_what_was_done(monkeypatch: pytest.MonkeyPatch) -> None:
    run = compare.run

    def interrupted(name: str, *rest: Any) -> compare.Entry:
        if name == "wva":
            raise KeyboardInterrupt
        return run(name, *rest)

    monkeypatch.setattr(compare, "run", interrupted)
    result = simulate("-p", "static:1", "-p", "wva", "-p", "tuner")
    assert result.exit_code == 130
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["policy", "static:1"]


def test_rates_over_a_day(tmp_path: Path) -> None:
    path = tmp_path / "rates.csv"
    path.write_text("model,window_start_s,requests_per_s\nm,0,100\nm,43200,200\n")
    result = simulate("--trace", str(path), "--rates", "m:1:3", "-p", "static:1")
    assert result.exit_code == 0, result.output
    assert "rates.csv" in result.stderr
    wrong = simulate("--trace", str(path), "--rates", "m:1", "-p", "static:1")
    assert "--rates 'm:1' must be MODEL:DAY:PEAK" in wrong.stderr


def test_only_the_plot_needs_matplotlib_and_says_so(tmp_path: Path) -> None:
    """In a process where neither matplotlib, numpy, kopf nor the server's libraries can be imported."""
    script = (
        "import sys\n"
        "for name in ('matplotlib', 'numpy', 'kopf', 'kubernetes', 'msgspec', 'fastapi', 'aiohttp', 'gguf'):\n"
        "    sys.modules[name] = None\n"
        "from busload_operator.cli import main\n"
        "main()\n"
    )
    base = [sys.executable, "-c", script, "simulate", "--minutes", "0.5", "-p", "tuner"]
    plain = subprocess.run(base, capture_output=True, text=True, timeout=120)
    assert plain.returncode == 0, plain.stderr
    plot = subprocess.run([*base, "--plot", str(tmp_path / "x.svg")], capture_output=True, text=True, timeout=120)
    assert plot.returncode == 2
    assert "--plot needs matplotlib: pip install 'busload[simulate]'" in plot.stderr
