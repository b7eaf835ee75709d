import re
import time

import pytest
from live_server import LiveServer, eventually
from prometheus_client.parser import text_string_to_metric_families

from busload_runtime.contract import METRICS, Limits
from busload_runtime.engine.messages import Submit
from busload_runtime.server.admission import Admission
from busload_runtime.server.deadline import Deadline, Timeouts
from busload_runtime.server.errors import ApiError
from busload_runtime.server.generation import Generation
from busload_runtime.server.metrics import Metrics
from busload_runtime.server.text import TextStream
from busload_runtime.server.trace import Trace


def test_the_first_scrape_holds_every_family_and_nothing_else() -> None:
    found = {family.name: family for family in text_string_to_metric_families(Metrics("m").render().decode())}
    process = {name for name in found if re.match(r"(busload_engine_)?process_", name)}
    assert set(found) - process == {metric.name.removesuffix("_total") for metric in METRICS}
    for metric in METRICS:
        family = found[metric.name.removesuffix("_total")]
        assert (family.type, family.documentation) == (metric.kind, metric.help)
        assert family.samples
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(metric.labels)
            if metric.name not in ("vllm:cache_config_info", "vllm:lora_requests_info"):
                assert sample.value == 0


def test_counters_add_up_after_requests(tiny: LiveServer) -> None:
    before = tiny.metrics()
    for _ in range(3):
        tiny.complete(prompt=[9, 8, 7], max_tokens=5, ignore_eos=True)
    tokens = "busload_generated_tokens_total"
    eventually(lambda: tiny.metrics()[tokens] >= before[tokens] + 15)
    after = tiny.metrics()

    def grown(name: str) -> float:
        return after[name] - before[name]

    assert grown("busload_requests_arrived_total") == 3
    assert grown("busload_prompt_tokens_arrived_total") == 9
    assert grown('busload_requests_finished_total{reason="length"}') == 3
    assert grown(tokens) == 15
    assert grown("busload_time_to_first_token_seconds_count") == 3
    assert grown("busload_inter_token_latency_seconds_count") == 12
    assert grown("busload_queue_wait_seconds_count") == 3
    assert grown('busload_prompt_length_tokens_bucket{le="4.0"}') == 3
    assert grown('busload_prompt_length_tokens_bucket{le="2.0"}') == 0
    assert grown("busload_output_length_tokens_sum") == 15
    assert grown("busload_engine_steps_total") >= 15
    assert 0 < grown("busload_engine_busy_seconds_total") <= grown("busload_engine_clock_seconds")


def test_whole_lengths_and_what_the_sequence_limit_refuses_or_cuts(tiny: LiveServer) -> None:
    limit = int(tiny.metrics()["busload_limit_max_sequence_length"])
    too_long, cut = 'busload_requests_refused_total{reason="too_long"}', "busload_answers_cut_total"
    before = tiny.metrics()

    def grown(name: str) -> float:
        return tiny.metrics()[name] - before[name]

    tiny.complete(prompt=[9, 8, 7], max_tokens=5, ignore_eos=True)
    eventually(lambda: grown("busload_sequence_length_tokens_count") == 1)
    assert (grown("busload_sequence_length_tokens_sum"), grown(cut), grown(too_long)) == (8, 0, 0)
    tiny.complete(prompt=[9] * (limit - 4), max_tokens=4, ignore_eos=True)
    eventually(lambda: grown("busload_sequence_length_tokens_count") == 2)
    assert grown(cut) == 0, "it got all that it allowed"
    for allowed in ({"max_tokens": 5}, {}):
        tiny.complete(prompt=[9] * (limit - 4), ignore_eos=True, **allowed)
    eventually(lambda: grown(cut) == 2)
    assert tiny.complete(prompt=[9] * limit, max_tokens=1).status_code == 400
    assert grown(too_long) == 1


def test_names_from_clients_never_become_series(tiny: LiveServer) -> None:
    before = set(tiny.metrics())
    for i in range(1000):
        assert tiny.complete(model=f"name-{i}", prompt="x").status_code == 404
    assert set(tiny.metrics()) == before
    assert len(tiny.http.get("/metrics").content) < 200_000


def test_what_fails_on_the_way_to_the_engine_counts_as_often_arrived_as_finished() -> None:
    class BrokenEngine:
        """Takes one request, then is gone."""

        sent = 0

        def submit(self, submit: Submit, deliver: object) -> None:
            if self.sent:
                raise ApiError(500, "the engine is gone", code="engine_error")
            self.sent += 1

        def abort(self, request_id: int) -> None: ...

    metrics, admission = Metrics("tiny"), Admission(Limits(2048, 4, 90, 512, 2, 100))
    deadline = Deadline(Timeouts(), time.monotonic())
    generation = Generation(BrokenEngine(), admission, metrics, Trace("id", 0.0), deadline)  # type: ignore[arg-type]
    admission.take(3)
    with pytest.raises(ApiError):
        generation.submit([Submit(n, [1], 1) for n in range(3)], lambda: TextStream(lambda token: b""))
    generation.close()
    text = metrics.render().decode()
    assert "busload_requests_arrived_total 3.0" in text
    assert 'busload_requests_finished_total{reason="abort"} 3.0' in text
    assert (admission.live, admission.waiting_tokens) == (0, 0)
