"""The benchmark of continuous against static batching, on its step law."""

import json
from pathlib import Path

import pytest

from e2e.bench.static_batching import StepLaw, compare, main, mix


def test_all_ways_draw_the_same_tokens_and_continuous_wins() -> None:
    result = compare(StepLaw(), "long", batch_size=8, repeats=2)
    assert result.tokens == 3 * (800 + 7 * 40)
    # Static: the long request of each group in turn. Continuous: the second long request takes a place that
    # the short ones leave after 40 steps, the third one after 80.
    assert {name: way.steps for name, way in result.ways.items()} == {
        "padded": 3 * 800,
        "static": 3 * 800,
        "continuous": 80 + 800,
    }
    padded, static, continuous = (result.ways[name] for name in ("padded", "static", "continuous"))
    assert padded.ratio > static.ratio > 2
    assert continuous.ratio == 1
    assert static.ratios == pytest.approx([static.ratio] * 2)


def test_one_at_a_time_is_the_same_any_way() -> None:
    result = compare(StepLaw(), "mix", batch_size=1, repeats=1)
    assert [way.ratio for way in result.ways.values()] == pytest.approx([1.0] * 3)


def test_the_mix_follows_its_quantiles() -> None:
    outputs = sorted(length.output for length in mix(400, 3, long_prompts=True))
    assert [outputs[share * 400 // 100] for share in (25, 50, 90)] == pytest.approx([16, 34, 179], abs=3)
    prompts = sorted(length.prompt for length in mix(400, 3, long_prompts=True))
    assert prompts[200] == pytest.approx(263, abs=3)
    assert {length.prompt for length in mix(10, 3, long_prompts=False)} == {32}


def test_prints_a_table_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    assert main(["--executor", "fake", "--workloads", "mix", "--json", str(file)]) == 0
    result = json.loads(file.read_text())["workloads"][0]
    assert f"{result['ways']['padded']['ratio']:.2f}x" in capsys.readouterr().out
