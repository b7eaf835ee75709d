"""Which requests are sent, and when."""

import json
import random
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest

from busload_runtime.bench.client import Target
from busload_runtime.bench.lengths import Lengths, parse_lengths
from busload_runtime.bench.loops import poisson
from busload_runtime.bench.options import BenchOptions, checked, parse_ids, whole_numbers
from busload_runtime.bench.trace import read_trace
from busload_runtime.bench.workload import Workload


def options(**other: Any) -> BenchOptions:
    target = other.pop("target", Target("http://127.0.0.1:1/v1", "m"))
    return BenchOptions(target, other.pop("input_lengths", Lengths(8, 8)), Lengths(4, 4), **other)


def test_lengths() -> None:
    rng = random.Random(1)
    assert {parse_lengths("7", "--x").draw(rng) for _ in range(9)} == {7}
    assert {parse_lengths("3:5", "--x").draw(rng) for _ in range(200)} == {3, 4, 5}
    drawn = sorted(parse_lengths("lognormal:200:0.5:600", "--x").draw(rng) for _ in range(2001))
    assert drawn[1000] == pytest.approx(200, rel=0.1)
    assert drawn[1001 + 683] == pytest.approx(200 * 2.718**0.5, rel=0.1)  # one sigma above: 84.1%
    assert drawn[-1] == 600


@pytest.mark.parametrize("text", ["", "0", "5:3", "1:2:3", "a", "lognormal:5", "lognormal:0:1", "lognormal:5:0", "nan"])
def test_wrong_lengths_are_named(text: str) -> None:
    with pytest.raises(ValueError, match=r"--input-tokens .* is not a length"):
        parse_lengths(text, "--input-tokens")


def test_prompts_are_unique_repeatable_and_as_long_as_asked() -> None:
    def draw(seed: int) -> list[Any]:
        return [r.prompt for r in Workload(options(seed=seed)).requests(50)]

    prompts = draw(3)
    assert {len(prompt) for prompt in prompts} == {8}
    assert len({tuple(prompt) for prompt in prompts}) == 50
    assert all(1000 <= token < 30000 for prompt in prompts for token in prompt)
    assert draw(3) == prompts
    assert draw(4) != prompts


def test_words_are_as_many_as_asked() -> None:
    requests = list(Workload(options(words=True)).requests(5))
    assert all(len(r.prompt.split()) == r.input_tokens == 8 for r in requests if isinstance(r.prompt, str))


def test_prefixes_are_shared_and_come_on_top() -> None:
    requests = list(Workload(options(prefix_tokens=16, prefixes=3)).requests(100))
    assert {r.input_tokens for r in requests} == {24}
    assert len({tuple(r.prompt[:16]) for r in requests}) == 3
    assert len({tuple(r.prompt[16:]) for r in requests}) == 100


def test_a_poisson_process_has_its_rate_and_its_variance() -> None:
    times = list(islice(poisson(5, None, 4001, random.Random(2)), 4001))
    gaps = [b - a for a, b in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.2, rel=0.05)
    assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) == pytest.approx(mean**2, rel=0.1)
    assert all(at < 3 for at in poisson(100, 3, None, random.Random(2)))
    assert len(list(poisson(100, None, 7, random.Random(2)))) == 7


def test_levels_and_their_defaults() -> None:
    assert [(p.concurrency, p.requests) for p in Workload(options()).plans()] == [(1, 8), (8, 32), (32, 128)]
    assert [(p.rate, p.seconds) for p in Workload(options(rates=(2.0,))).plans()] == [(2.0, 60.0)]
    (plan,) = Workload(options(concurrencies=(4,), seconds=5.0)).plans()
    assert (plan.requests, plan.seconds) == (None, 5.0)


AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:50.9951690,396,109\n2023-11-16 18:15:46.6805900,374,44\n"
)
TRACES = {
    "azure.csv": (AZURE, [(0.0, 374, 44), (4.314579, 396, 109)]),
    "aibrix.csv": (
        "timestamp_ms,prompt_tokens,output_tokens\n6011,178,8\n6917,258,40\n",
        [(0, 178, 8), (0.906, 258, 40)],
    ),
    "burst.csv": ("Timestamp,Model,Request tokens,Response tokens\n5,G,4,2\n9,G,6,3\n", [(0, 4, 2), (4, 6, 3)]),
    "mooncake.jsonl": (
        '{"timestamp": 500, "input_length": 9, "output_length": 5, "hash_ids": [0]}\n\n'
        '{"timestamp": 3500, "input_length": 7, "output_length": 4, "hash_ids": [0]}\n',
        [(0, 9, 5), (3, 7, 4)],
    ),
    "own.csv": ("seconds,input_tokens,output_tokens\n1.5,3,2\n2,4,1\n", [(0, 3, 2), (0.5, 4, 1)]),
    "sim.jsonl": ('{"arrival_time": 1.5, "input_toks": 3, "output_toks": 2}\n', [(0, 3, 2)]),
}


@pytest.mark.parametrize("name", TRACES)
def test_traces_of_every_format(name: str, tmp_path: Path) -> None:
    text, rows = TRACES[name]
    (tmp_path / name).write_text(text)
    trace = read_trace(tmp_path / name, None, None, 0)
    assert [(row.at, row.input_tokens, row.output_tokens) for row in trace.rows] == [
        (pytest.approx(at, abs=1e-6), *lengths) for at, *lengths in rows
    ]
    assert (trace.timed, trace.spread) == (True, False)


def test_a_trace_is_replayed_at_its_times_and_lengths(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("seconds,input_tokens,output_tokens\n10,3,2\n12,999,1\n13,4,0\n14,5,3\n20,6,1\n")
    workload = Workload(options(trace=path, speed=2.0, longest=100, seconds=4.0))
    (plan,) = workload.plans()
    sent = [(at, r.input_tokens, r.output_tokens) for at, r in workload.arrivals(plan)]
    assert sent == [(0.0, 3, 2), (2.0, 5, 3)]
    assert workload.notes() == ["2 rows of the trace left out: no tokens, or more than --longest"]
    limited = Workload(options(trace=path, limit=2))
    assert [at for at, _ in limited.arrivals(limited.plans()[0])] == [0.0, 2.0]
    # With a pace of its own the trace gives lengths alone, over and over.
    paced = Workload(options(trace=path, concurrencies=(2,), longest=100))
    assert [r.input_tokens for r in paced.requests(4)] == [3, 5, 6, 3]


def test_coarse_times_are_spread_inside_their_step(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    rows = [{"timestamp": t, "input_length": 5, "output_length": 1} for t in (0, 3000, 6000) for _ in range(40)]
    path.write_text("\n".join(map(json.dumps, rows)))
    trace = read_trace(path, None, None, 7)
    assert trace.spread
    times = [row.at for row in trace.rows]
    assert times == sorted(times)
    assert len(set(times)) == 120
    first = trace.rows[0].at
    assert sum(at - first < 3 for at in times) == pytest.approx(40, abs=2)


def test_equal_hash_ids_make_equal_blocks(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    rows = [
        {"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [4, 5]},
        {"timestamp": 9, "input_length": 700, "output_length": 1, "hash_ids": [4, 6]},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    a, b = (r.prompt for r in Workload(options(trace=path)).requests(2))
    assert (len(a), len(b)) == (600, 700)
    assert a[:512] == b[:512]
    assert a[512:600] != b[512:600]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.csv", "when,what\n1,2\n", "has columns when, what; known are"),
        ("a.csv", "seconds,input_tokens,output_tokens\n1,x,2\n", "line 2: not a request"),
        ("a.csv", "seconds,input_tokens,output_tokens\n", "has no request to replay"),
        ("a.jsonl", "{", "line 1: not JSON"),
        ("a.jsonl", "[" * 200_000, "line 1: not JSON"),
        ("a.jsonl", '{"seconds": %s}' % ("9" * 5000), "line 1: not JSON"),
        ("a.jsonl", '{"seconds": 1, "input_tokens": Infinity, "output_tokens": 1}', "line 1: not a request"),
        ("a.csv", "seconds,input_tokens,output_tokens\n1,2,3\nnan,1,2\n", "line 3: not a request .*seconds is 'nan'"),
        ("a.csv", "seconds,input_tokens,output_tokens\ninf,1,2\n", "line 2: not a request .*seconds is 'inf'"),
        (
            "a.csv",
            "seconds,input_tokens,output_tokens\n1,1,99999999\n",
            "99999999 tokens; at most 16777216 are a request",
        ),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n0001-01-01,1,2\n", "line 2: not a request"),
        ("a.csv", "seconds,input_tokens,output_tokens\n1,2," + "3" * 200_000, "is not a CSV file .*field larger than"),
        ("a.jsonl", "[1]", "line 1: a list; one JSON object per line"),
        ("a.csv", "num_prefill_tokens,num_decode_tokens\n5,6\n", "has lengths but no times; give --concurrency"),
    ],
)
def test_a_wrong_trace_says_what_is_wrong(name: str, text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=said) as error:
        Workload(options(trace=tmp_path / name))
    assert str(tmp_path / name) in str(error.value)


def test_a_trace_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No such file"):
        Workload(options(trace=tmp_path / "no.csv"))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"target": Target("localhost:8000", "m")}, "--url 'localhost:8000' is not an http"),
        ({"concurrencies": (1,), "rates": (1.0,)}, "exclude each other"),
        ({"concurrencies": (0,)}, "--concurrency must be 1 or more, got 0"),
        ({"rates": (-1.0,)}, "--rate must be a number above 0, got -1"),
        ({"seconds": float("inf")}, "--seconds must be a number above 0, got inf"),
        ({"requests": 0}, "--requests must be 1 or more, got 0"),
        ({"speed": 2.0}, "give --trace FILE"),
        ({"trace": Path("x"), "prefix_tokens": 5}, "--shared-prefix-tokens does not go with --trace"),
        ({"target": Target("http://x:99999/v1", "m")}, "--url 'http://x:99999/v1': Port out of range"),
        ({"target": Target("http://x", "m", api_key="a\nb")}, "--api-key .* holds a line break"),
        ({"target": Target("http://x", "m", chat=True)}, "--prompt ids does not work with --endpoint chat"),
    ],
)
def test_wrong_flags_are_named(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        checked(options(**wrong))


def test_lists_and_ranges_on_the_command_line() -> None:
    assert whole_numbers("1, 8,32", "--concurrency") == (1, 8, 32)
    assert parse_ids("5:9", "--token-ids") == (5, 9)
    for text in ("1.5", "x", "nan", "inf"):
        with pytest.raises(ValueError, match="--concurrency"):
            whole_numbers(text, "--concurrency")
    for text in ("9:5", "5", "-1:5", "5:5"):
        with pytest.raises(ValueError, match="--token-ids"):
            parse_ids(text, "--token-ids")
