"""A long prompt beside a stream: with an objective for the time between tokens it is computed in smaller pieces."""

from pathlib import Path

import pytest
from live_server import LiveServer, events, eventually, running

LENGTH = 4000
BUDGET = 1024
IMPOSSIBLE = 1e-4
"""An objective that no machine meets: a prompt then gets the least of each step, one block of 32 tokens."""


def steps_of_a_long_prompt(server: LiveServer) -> int:
    """Engine steps from the arrival of the prompt to its first token, while another stream decodes."""
    body = {"prompt": "Once", "max_tokens": 3800, "ignore_eos": True, "stream": True}
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


@pytest.mark.parametrize(("objective", "cut"), [(f"--inter-token-latency={IMPOSSIBLE}", True), (None, False)])
def test_pieces_of_a_prompt_leave_time_for_the_tokens_of_others(
    tmp_path: Path, objective: str | None, cut: bool
) -> None:
    flags = ("--executor=cpu", f"--token-budget={BUDGET}", "--max-sequence-length=4096")
    with running(tmp_path, *flags, *([objective] if objective else [])) as server:
        found = server.metrics()
        assert found['busload_step_law_seconds{coefficient="d"}'] > 0, "the engine has found its step law"
        assert found['busload_objective_seconds{objective="inter_token_latency"}'] == (IMPOSSIBLE if cut else 0)
        steps = steps_of_a_long_prompt(server)
    # In the smallest pieces it takes 125 steps, by the token budget alone 4, and some more until the counters are read.
    assert (steps >= LENGTH // 32) == cut, steps
