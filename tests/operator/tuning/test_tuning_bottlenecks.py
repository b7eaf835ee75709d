"""Every bottleneck, made on purpose on a small model of a service: its name, and the numbers that decided."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from fluid_service import BOUNDS, LIMITS, Service, StepLaw

from busload_operator.tuning import Bottleneck, Mode, Objectives, PodSample, Range

PLENTY = replace(LIMITS, batch_size=32)
ONE = replace(BOUNDS, replicas=Range(1, 1))


def silent(now: float, sample: PodSample) -> PodSample:
    return replace(sample, counters=None, problem="no answer in time") if now > 1030 else sample


def starting(now: float, sample: PodSample) -> PodSample:
    return replace(sample, counters=None, ready=False)


def clients(count: int, prompt: int = 32, output: int = 128) -> Callable[[Service], None]:
    def set_up(service: Service) -> None:
        service.clients, service.client_request = count, (prompt, output)

    return set_up


def arrivals(rate: float, prompt: int, output: int) -> Callable[[Service], None]:
    def set_up(service: Service) -> None:
        service.rate, service.clients, service.client_request = lambda now: rate, 0, (prompt, output)

    return set_up


@dataclass(frozen=True)
class Case:
    made_by: Callable[[Service], None]
    name: Bottleneck
    says: tuple[str, ...]
    options: dict[str, Any] = field(default_factory=dict)


CASES = [
    # Nobody is there.
    Case(clients(0), Bottleneck.IDLE, ("0.0 of 32 places are taken and nothing waits",)),
    # Two requests at a time where half the step is shared up to a batch of about ten.
    Case(clients(2), Bottleneck.UNDER_BATCHED, ("2.0 of 32 places are taken", "objective 250ms")),
    # 20 clients, 4 places, an empty cache.
    Case(
        clients(20),
        Bottleneck.SLOT_BOUND,
        ("15.9 requests wait (29.0s)", "4.0 of 4 places are taken", "KV cache use peaks at"),
        {"limits": LIMITS},
    ),
    # 20 clients, places for all, a cache for five of them.
    Case(clients(20), Bottleneck.KV_BOUND, ("requests wait", "preemption", "of 32 places are taken"), {"blocks": 100}),
    # Five requests in six seconds with prompts of 1,000 tokens and answers of 20: there is place for all, and a step's
    # time goes to prompts.
    Case(
        arrivals(5 / 6, prompt=1000, output=20),
        Bottleneck.PREFILL_BOUND,
        ("of 32 places are taken and nothing waits", "% of step time goes to prompts"),
        {"blocks": 32_000, "objectives": Objectives(5.0, 1.0)},
    ),
    # Nothing waits, and a token takes longer than it may.
    Case(
        clients(30),
        Bottleneck.DECODE_BOUND,
        ("of 32 places are taken and nothing waits", "a token takes 171ms (objective 100ms)"),
        {"objectives": Objectives(2.0, 0.1)},
    ),
    # Twice the places would be twice the step: a/g is 1, and 16 places are full.
    Case(
        clients(40),
        Bottleneck.SATURATED,
        ("requests wait", "16.0 of 16 places are taken", "times the knee of"),
        {"limits": replace(LIMITS, batch_size=16), "law": StepLaw(0.02, 0.02)},
    ),
    Case(clients(5), Bottleneck.STARTING, ("No pod is ready yet.",), {"tamper": starting}),
    Case(clients(5), Bottleneck.STALE, ("chat-1: no answer in time", "nothing is changed"), {"tamper": silent}),
]


@pytest.mark.parametrize("case", CASES, ids=[case.name.value for case in CASES])
def test_each_bottleneck_has_its_name_and_its_numbers(case: Case) -> None:
    """Tuning is off: what is wrong stays wrong."""
    options: dict[str, Any] = {"limits": PLENTY, "bounds": ONE, "mode": Mode.OFF, "scrape": 1.0}
    service = Service(**options | case.options)
    if case.name in (Bottleneck.SATURATED, Bottleneck.PREFILL_BOUND):  # a small batch, too, so that the law is known
        service.clients = 2
        service.run(40)
    case.made_by(service)
    service.run(90)
    result = service.results[-1][1]
    assert result.bottleneck is case.name, result.evidence
    for text in case.says:
        assert text in result.evidence, result.evidence
    late = [r.bottleneck for now, r in service.results if now > service.now - 30]
    # Clients that all begin at once come in waves: prompts first, then tokens.
    assert late.count(case.name) >= 0.8 * len(late), "and it stays so while nothing changes"


def test_there_is_a_case_for_each() -> None:
    assert {case.name for case in CASES} == set(Bottleneck)
