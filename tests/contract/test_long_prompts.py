"""A long prompt beside a stream: with an objective for the time between tokens it is computed in smaller pieces."""

from pathlib import Path

import pytest
from live_server import LiveServer, events, eventually, running

LENGTH = 2000
BUDGET = 512


def steps_of_a_long_prompt(server: LiveServer) -> int:
    """Engine steps from the arrival of the prompt to its first token, while another stream decodes."""
    body = {"prompt": "Once", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body) as stream:
        seen = events(stream)
        assert "choices" in next(seen)
        before = server.metrics()
        answer = server.complete(prompt=list(range(500, 500 + LENGTH)), max_tokens=1)
        assert answer.status_code == 200
        eventually(lambda: server.level("busload_step_prefill_tokens_total") >= LENGTH)
        after = server.metrics()
        assert "choices" in next(seen), "it still runs"
    steps = "busload_engine_steps_total"
    return int(after[steps] - before[steps])


@pytest.mark.parametrize(("objective", "cut"), [("--inter-token-latency=0.02", True), (None, False)])
def test_pieces_of_a_prompt_leave_time_for_the_tokens_of_others(
    tmp_path: Path, objective: str | None, cut: bool
) -> None:
    flags = ("--executor=cpu", f"--token-budget={BUDGET}", "--max-sequence-length=4096")
    with running(tmp_path, *flags, *([objective] if objective else [])) as server:
        found = server.metrics()
        assert found['busload_step_law_seconds{coefficient="d"}'] > 0, "the engine has found its step law"
        assert found['busload_objective_seconds{objective="inter_token_latency"}'] == (0.02 if cut else 0)
        steps = steps_of_a_long_prompt(server)
    # By the token budget alone it takes 4 steps, and a few more until the counters are read.
    assert (steps > 16) == cut, steps
