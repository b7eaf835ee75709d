"""The token budget: raised when prompts wait for it and the law says that more of them at once are faster."""

from dataclasses import replace

import pytest
from fluid_service import BOUNDS, LIMITS, Service, StepLaw

from busload_operator.tuning import Knob, Mode, Objectives, Range, Reason, Verdict

GPU = StepLaw(a=0.010, b=0.0001, d=0.00005)
"""A step costs as much as 200 prompt tokens, whatever is in it."""
SMALL = replace(LIMITS, batch_size=64, token_budget=96, kv_cache_percent=90)
FIXED = replace(BOUNDS, replicas=Range(1, 1))


def prompts(budget: int = 96, law: StepLaw = GPU, rate: float = 6.0, **options: object) -> Service:
    """Prompts of 1,000 tokens and short answers: with 96 tokens a step at most 5 or 6 such requests a second."""
    usual = {"bounds": FIXED, "objectives": Objectives(1.0, 0.05), "blocks": 16_384, "noise": 0.1}
    usual |= {"prompts_queue": True}
    service = Service(law, replace(SMALL, token_budget=budget), **(usual | options))  # type: ignore[arg-type]
    service.client_request = (1000, 20)
    service.rate = lambda now: 0.3 * rate if now < 1060 else rate
    return service


def budgets(service: Service) -> list[tuple[int, int]]:
    return [(d.before, d.after) for d in service.decisions if d.knob is Knob.TOKEN_BUDGET]


@pytest.mark.parametrize("scrape", [1.0, 5.0])
def test_prompts_that_wait_for_the_token_budget_get_a_larger_one(scrape: float) -> None:
    service = prompts(scrape=scrape)
    service.run(400)
    assert budgets(service)[0] == (96, 192)
    assert 192 <= service.limits.token_budget <= 0.9 * 0.05 / GPU.d
    last = service.results[-1][1].observed
    assert last is not None
    assert last.queue_depth < 1
    assert last.time_to_first_token is not None
    assert last.time_to_first_token < 0.5
    assert service.limits == replace(SMALL, token_budget=service.limits.token_budget), "nothing else was changed"


def test_the_reason_and_the_numbers_are_told() -> None:
    service = prompts(probed=True)
    service.rate = lambda now: 2.0
    service.run(20)
    service.rate = lambda now: 8.0
    service.run(120)
    first = next(d for d in service.decisions if d.knob is Knob.TOKEN_BUDGET)
    assert first.reason in (Reason.WAIT_FROM_TOKEN_BUDGET, Reason.NEARLY_FULL)
    assert "lets through" in first.message
    assert "by the step law" in first.prediction.basis


def test_more_prompts_in_a_step_are_confirmed_by_the_prompts_computed() -> None:
    """Overloaded before and after: what the budget brings can be counted."""
    service = prompts(probed=True)
    service.rate = lambda now: 14.0
    service.run(200)
    judged = [d for d in service.decisions if d.knob is Knob.TOKEN_BUDGET]
    assert judged[0].outcome.verdict is Verdict.CONFIRMED
    assert "prompt tokens/s" in judged[0].outcome.message
    told = judged[0].prediction.tokens_per_second
    assert told == pytest.approx(judged[0].outcome.tokens_per_second_after, rel=0.25)


def test_where_a_prompt_token_costs_as_much_in_any_company_it_stays() -> None:
    """CPUs: a step of 96 prompt tokens takes ten times what an empty one does."""
    service = prompts(law=StepLaw(a=0.001, b=0.0001, d=0.0001), rate=12.0)
    service.run(300)
    assert budgets(service) == []


def test_the_inter_token_objective_bounds_it() -> None:
    service = prompts(rate=14.0, objectives=Objectives(1.0, 0.024), probed=True)
    service.run(400)
    assert budgets(service), "there is some room"
    assert service.limits.token_budget * GPU.d + GPU.a <= 0.024


def test_a_budget_that_is_not_used_up_stays() -> None:
    service = prompts(rate=2.0)
    service.run(600)
    assert budgets(service) == []


def test_places_come_before_prompts() -> None:
    """A burst of 32 at a batch limit of 4 waits for places."""
    service = Service(limits=replace(LIMITS, token_budget=68))
    service.run(20)
    service.send(32)
    service.run(60)
    assert service.decisions[0].knob is Knob.BATCH_SIZE
    assert budgets(service) == []


def test_it_is_not_recommended_where_nobody_could_set_it() -> None:
    service = prompts(mode=Mode.RECOMMEND, rate=14.0, probed=True)
    service.run(200)
    assert budgets(service) == []


def test_a_budget_that_another_hand_lowers_is_left_alone_for_a_while() -> None:
    service = prompts(rate=14.0, probed=True)
    service.run(150)
    assert service.limits.token_budget > 96
    service.limits = replace(service.limits, token_budget=96)
    service.generation += 1
    for pod in service.pods:
        pod.limits, pod.generation = service.limits, service.generation
    made = len(budgets(service))
    service.run(300)
    assert len(budgets(service)) == made
    assert service.limits.token_budget == 96
