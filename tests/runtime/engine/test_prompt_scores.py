"""Log-probabilities of prompts: complete, in order and of the right tokens, whatever else is planned."""

from hashing_executor import HashingExecutor, expected_scores, expected_text
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler_checks import check_idle, check_scheduler, run_step

from busload_runtime.contract import Limits
from busload_runtime.engine.plan import SamplingParams
from busload_runtime.engine.request import Output, Request
from busload_runtime.engine.scheduler import Scheduler

BLOCK = 4


@settings(max_examples=150, deadline=None)
@given(
    prompts=st.lists(st.tuples(st.integers(1, 40), st.booleans(), st.integers(1, 12)), min_size=1, max_size=8),
    blocks=st.integers(14, 60),
    batch=st.integers(1, 5),
    budget=st.integers(1, 30),
    rows=st.integers(0, 20),
)
def test_each_prompt_gets_its_own_scores(
    prompts: list[tuple[int, bool, int]], blocks: int, batch: int, budget: int, rows: int
) -> None:
    """Few blocks preempt, equal prompts share blocks, little memory for logits cuts pieces: the scores are the same."""
    scheduler = Scheduler(Limits(64, batch, 100, budget, 0, 0), BLOCK, blocks)
    scheduler.logit_rows = rows
    executor = HashingExecutor(BLOCK, blocks)
    requests = []
    for number, (length, scored, max_tokens) in enumerate(prompts):
        sampling = SamplingParams(seed=number, logprobs=0)
        tokens = list(range(100, 100 + length))
        requests.append(Request(number, tokens, max_tokens, sampling=sampling, score_prompt=scored))
        scheduler.add(requests[-1])
    outputs: dict[int, list[Output]] = {request.request_id: [] for request in requests}
    while scheduler.has_work:
        for output in run_step(scheduler, executor):
            outputs[output.request_id].append(output)
        check_scheduler(scheduler)
    check_idle(scheduler)
    for number, (length, scored, max_tokens) in enumerate(prompts):
        prompt = list(range(100, 100 + length))
        mine = outputs[number]
        assert [output.token for output in mine] == expected_text(prompt, len(mine), number)
        assert len(mine) == max_tokens or mine[-1].finish_reason == "length"
        assert mine[0].prompt_logprobs == (expected_scores(prompt) if scored else None)
        assert all(output.prompt_logprobs is None for output in mine[1:])


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=6), batch=st.integers(1, 6), rows=st.integers(0, 12))
def test_no_step_has_more_rows_of_logits_than_there_is_memory_for(lengths: list[int], batch: int, rows: int) -> None:
    scheduler = Scheduler(Limits(128, batch, 100, 64, 0, 0), BLOCK, 400)
    scheduler.logit_rows = rows
    executor = HashingExecutor(BLOCK, 400)
    for number, length in enumerate(lengths):
        scheduler.add(Request(number, list(range(length)), 5, sampling=SamplingParams(logprobs=0), score_prompt=True))
    while scheduler.has_work:
        plan = scheduler.plan(0.0)
        drawing = sum(chunk.sampling is not None for chunk in plan.chunks)
        scoring = sum(len(chunk.scoring.targets) for chunk in plan.chunks if chunk.scoring is not None)
        assert drawing + scoring <= max(rows, batch)
        scheduler.commit(plan, executor.run(plan))
