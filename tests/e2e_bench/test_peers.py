"""Ratios and bars of the comparison with other servers, on figures made by hand and on servers that are none."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from busload_runtime.bench.outcome import Level, Outcome
from e2e.bench.peers import __main__ as peers
from e2e.bench.peers.compare import Measured, Ratio, measured, ratios, report
from e2e.bench.peers.work import Measure, Work
from e2e.cluster.shell import Failure


def level(concurrency: int, rate: float, first: float) -> Level:
    """`concurrency` requests that start together; output arrives at `rate` tokens per second in all until 10 s."""
    tokens = round(rate * 10 / concurrency)
    chunks = [first + (9.99 - first) * i / (tokens - 1) for i in range(tokens)]
    outcomes = [
        Outcome(0.0, 0.0, 10.0, chunks, input_tokens=128, output_tokens=tokens, from_usage=True)
        for _ in range(concurrency)
    ]
    return Level(f"concurrency {concurrency}", 0.0, outcomes, concurrency)


def three_repeats(server: str, rates: tuple[float, ...], first: float, concurrency: int = 8) -> list[Measured]:
    return [measured(server, repeat, level(concurrency, rate, first)) for repeat, rate in enumerate(rates)]


def test_a_ratio_is_the_median_of_pairs_of_the_same_repeat() -> None:
    # The machine became twice as fast after the first repeat: medians of each alone would hide that ours kept 3x.
    found = ratios(three_repeats("busload", (96, 240, 240), 1) + three_repeats("openvino", (32, 80, 120), 2), 128, 128)
    rate, first = found
    assert (rate.figure, rate.bar, rate.passed) == ("tok/s", 2.0, True)
    assert rate.values == pytest.approx((3, 3, 2))
    assert rate.median == pytest.approx(3)
    assert (first.figure, first.bar, first.passed) == ("TTFT", 0.8, True)
    assert first.values == pytest.approx((0.5, 0.5, 0.5))


def test_a_missed_bar_fails_and_others_have_none() -> None:
    ours, theirs = three_repeats("busload", (160,), 1), three_repeats("llama.cpp", (80,), 2)
    rate, first = ratios(ours + theirs, 128, 128)
    assert (rate.bar, rate.passed, first.passed) == (5.0, False, None)
    assert "bar >= 5x   FAIL" in str(rate)
    assert [ratio.passed for ratio in ratios(ours + theirs, 128, 64)] == [None, None], "bars are set for 128 and 128"
    late = Ratio("openvino", 1, "TTFT", (1.2,), 1.0)
    assert "bar <= 1x   FAIL" in str(late)


def test_a_peer_that_failed_in_one_repeat_is_compared_in_the_others() -> None:
    all_measured = three_repeats("busload", (80, 80), 1) + three_repeats("openvino", (40, 40), 1)[:1]
    assert [len(ratio.values) for ratio in ratios(all_measured, 128, 128)] == [1, 1]
    assert "160.0 tok/s" not in report(all_measured, [], {"busload": "", "openvino": ""})


class Pretended:
    """A server whose figures are given; `rate` 0: it does not start."""

    what = "pretended"

    def __init__(self, name: str, rate: float, missing: str = "") -> None:
        self.name, self._rate, self._missing = name, rate, missing

    def install(self) -> str:
        if self._missing:
            raise Failure(self._missing)
        return "1.0"

    @contextmanager
    def session(self, most: int) -> Iterator[Measure]:
        if not self._rate:
            raise Failure("no room")

        def measure(work: Work) -> Level:
            assert work.concurrency <= most
            return level(work.concurrency, self._rate, 0.3 if self.name == "busload" else 0.5)

        yield measure


def run(monkeypatch: pytest.MonkeyPatch, folder: Path, ours: float, *others: Pretended) -> int:
    monkeypatch.setattr(peers, "Busload", lambda: Pretended("busload", ours))
    monkeypatch.setattr(peers, "PEERS", {other.name: lambda cache, other=other: other for other in others})
    monkeypatch.setattr(peers.machine, "busy_share", lambda: 0.5)
    names = ",".join(other.name for other in others)
    arguments = [
        f"--cache={folder}",
        f"--peers={names}",
        "--concurrency=1,8",
        "--repeats=2",
        f"--json={folder / 'out.json'}",
    ]
    monkeypatch.setattr("sys.argv", ["peers", *arguments])
    return peers.main()


def test_a_run_names_what_is_missing_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = Pretended("llama.cpp", 10, missing="it needs root")
    assert run(monkeypatch, tmp_path, 1600, Pretended("openvino", 400), absent, Pretended("late", 0)) == 0
    said = capsys.readouterr().out
    assert "tok/s  4.00x openvino  (4.00..4.00)   bar >= 3x   pass" in said
    assert "llama.cpp is missing, wholly or in part: it needs root" in said
    assert "late is missing, wholly or in part: no room" in said
    assert "the machine is not idle: others use 50% of its cores" in said
    document = json.loads((tmp_path / "out.json").read_text())
    assert len(document["measured"]) == 2 * 2 * 2
    assert [ratio["passed"] for ratio in document["ratios"]] == [True] * 4


def test_exit_code_1_when_a_bar_is_missed_or_nobody_can_be_compared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert run(monkeypatch, tmp_path, 800, Pretended("openvino", 400)) == 1
    assert run(monkeypatch, tmp_path, 800, Pretended("openvino", 400, missing="none")) == 1
