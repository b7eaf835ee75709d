"""Auto, Recommend and Off: who decides, who writes, and that all three observe."""

import json
from dataclasses import replace
from typing import Any

import pytest
from fluid_service import BOUNDS, LIMITS, Service

from busload_operator.tuning import Bottleneck, Knob, Mode, Range


def busy(mode: Mode, **options: Any) -> Service:
    """Two clients for a while, then many: batches of which a law can be learned."""
    service = Service(mode=mode, noise=0.05, **options)
    service.clients = 2
    service.run(60)
    service.clients = 40
    service.run(60)
    return service


def test_off_goes_on_observing_and_learning() -> None:
    service = busy(Mode.OFF)
    result = service.results[-1][1]
    assert service.decisions == []
    assert service.limits == LIMITS
    assert result.observed is not None
    assert result.observed.batch == pytest.approx(4, abs=0.2)
    assert result.bottleneck is Bottleneck.SLOT_BOUND
    assert result.law is not None
    assert result.law.usable
    assert service.state.lengths.known
    assert service.state.arrivals
    service.mode = Mode.AUTO
    service.run(10)
    assert service.decisions, "what was learned meanwhile is used at once"
    assert service.decisions[0].prediction.basis.startswith("step law")


def test_off_ends_what_is_on_trial_and_leaves_it_in_force() -> None:
    service = Service(noise=0.05)
    service.clients = 40
    service.run(12)
    assert service.limits.batch_size == 8
    service.mode = Mode.OFF
    service.run(60)
    assert service.limits.batch_size == 8
    assert "tuning is Off now" in service.decisions[0].outcome.message


def test_off_ends_a_trial_in_one_pod() -> None:
    service = Service(
        noise=0.05,
        blocks=100,
        replicas=3,
        limits=replace(LIMITS, batch_size=16),
        bounds=replace(BOUNDS, replicas=Range(3, 3)),
    )
    service.clients = 60
    while service.trial is None:
        service.run(1)
    service.mode = Mode.OFF
    service.run(4)
    assert service.trial is None
    assert service.limits.kv_cache_percent == 50


@pytest.mark.parametrize(
    ("knob", "options", "bounds"),
    [
        (Knob.BATCH_SIZE, {}, {"batchSize": {"min": 8, "initial": 8}}),
        (
            Knob.KV_CACHE_PERCENT,
            {"blocks": 100, "limits": replace(LIMITS, batch_size=16)},
            {"kvCachePercent": {"min": 70, "initial": 70}},
        ),
        (Knob.REPLICAS, {"bounds": replace(BOUNDS, batch_size=Range(1, 4))}, {"replicas": {"min": 2}}),
    ],
)
def test_recommend_changes_nothing_and_holds_the_patch(
    knob: Knob, options: dict[str, Any], bounds: dict[str, Any]
) -> None:
    service = busy(Mode.RECOMMEND, **options)
    assert service.limits == options.get("limits", LIMITS)
    assert (service.replicas, service.trial) == (1, None)
    made = next(d for d in service.decisions if d.knob is knob)
    assert not made.applied
    patch = json.loads(made.message.partition("As a merge patch: ")[2])
    assert patch == {"spec": {"bounds": bounds}}
    hold = service.results[-1][1].hold
    assert hold is not None
    assert hold.startswith("Only recommended")
