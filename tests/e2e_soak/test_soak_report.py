"""The soak's verdict can fail: each thing that may remain is found."""

from collections.abc import Callable

import pytest

from e2e.soak.acts import Outcome
from e2e.soak.report import Run, render, summarise
from e2e.soak.watch import Sample, Watch

IDLE = {
    'vllm:num_requests_running{model_name="m"}': 0.0,
    'vllm:num_requests_waiting{model_name="m"}': 0.0,
    'vllm:kv_cache_usage_perc{model_name="m"}': 0.0,
    "busload_queued_prompt_tokens": 0.0,
    "busload_kv_blocks": 40.0,
    "busload_kv_blocks_free": 40.0,
    "busload_requests_arrived_total": 7.0,
    'busload_requests_finished_total{reason="stop"}': 4.0,
    'busload_requests_finished_total{reason="abort"}': 3.0,
    "busload_limits_errors_total": 2.0,
}
MIB = 1 << 20


def good() -> tuple[Run, Watch]:
    run = Run(1.0, 1, idle=dict(IDLE), refused_documents=2, exit_code=0)
    run.outcomes = [Outcome("canary", 200, text="Paris"), Outcome("canary", 429), Outcome("leave")]
    watch = Watch("127.0.0.1", 1, {"http": 1, "engine": 2}, health_seconds=[0.01], scrape_seconds=[0.02])
    watch.samples = [Sample(at, {"http": 90 * MIB, "engine": 200 * MIB}, {"http": 9, "engine": 5}) for at in range(11)]
    return run, watch


def level(run: Run, watch: Watch) -> None:
    run.idle['vllm:num_requests_waiting{model_name="m"}'] = 1


def block(run: Run, watch: Watch) -> None:
    run.idle["busload_kv_blocks_free"] = 39


def request_lost(run: Run, watch: Watch) -> None:
    run.idle["busload_requests_arrived_total"] = 8


def no_refusal(run: Run, watch: Watch) -> None:
    run.idle["busload_limits_errors_total"] = 0


def memory(run: Run, watch: Watch) -> None:
    watch.samples[-1].rss["engine"] += 20 * MIB


def files(run: Run, watch: Watch) -> None:
    watch.samples[-1].files["http"] += 3


def answer(run: Run, watch: Watch) -> None:
    run.outcomes.append(Outcome("canary", 200, text="Lyon"))


def problem(run: Run, watch: Watch) -> None:
    run.outcomes[2].problem = "a stream cut short"


def code(run: Run, watch: Watch) -> None:
    run.exit_code = 1


def probe(run: Run, watch: Watch) -> None:
    watch.problems.append("/health/live answered 503")


def test_a_good_run_has_no_problem() -> None:
    report = summarise(*good())
    assert report["problems"] == []
    assert render(report).endswith("no problem")


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (level, "num_requests_waiting"),
        (block, "39 of 40 KV blocks"),
        (request_lost, "8 requests arrived and 7 ended"),
        (no_refusal, "2 limits documents were bad and 0 were refused"),
        (memory, "memory of engine grew from 200 to 220 MiB"),
        (files, "http had 9 open files at first and 12 at last"),
        (answer, "2 answers"),
        (problem, "leave: a stream cut short"),
        (code, "exit code 1"),
        (probe, "answered 503"),
    ],
)
def test_what_remains_is_found(harm: Callable[[Run, Watch], None], said: str) -> None:
    run, watch = good()
    harm(run, watch)
    (found,) = summarise(run, watch)["problems"]
    assert said in found
