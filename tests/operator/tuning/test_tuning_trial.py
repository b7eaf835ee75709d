"""Slow settings go to one pod first, are judged there against the others, and reach them when they are no worse."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from fluid_service import BOUNDS, LIMITS, Pod, Service, StepLaw

from busload_operator.tuning import Knob, PodSample, Range, Reason, State, Trial, Verdict
from busload_operator.tuning.state import TrialPod
from busload_operator.tuning.trial import _compare, scatter
from busload_operator.tuning.window import PodWindow

FULL = replace(BOUNDS, replicas=Range(3, 3))


def starved(tamper: Callable[[float, PodSample], PodSample] = lambda now, s: s, **options: object) -> Service:
    """Three pods whose KV cache is what requests wait for."""
    base: dict[str, object] = {"blocks": 100, "limits": replace(LIMITS, batch_size=16), "bounds": FULL, "replicas": 3}
    made = Service(noise=0.05, tamper=tamper, **(base | options))  # type: ignore[arg-type]
    made.clients = 60
    return made


def until_trial(service: Service) -> Trial:
    for _ in range(200):
        service.run(1)
        if service.trial is not None:
            return service.trial
    raise AssertionError("no trial began")


def test_one_pod_first_then_all() -> None:
    service = starved()
    trial = until_trial(service)
    assert trial.limits.kv_cache_percent == 90
    assert service.limits.kv_cache_percent == 50
    assert {p.name: p.limits.kv_cache_percent for p in service.pods} == {
        p.name: 90 if p.name == trial.pod else 50 for p in service.pods
    }
    made = service.decisions[0]
    assert made.message.endswith(f"{trial.pod} alone tries it first.")
    service.run(2)
    hold = service.results[-1][1].hold
    assert hold is not None
    assert f"is on trial in pod {trial.pod} alone" in hold
    service.run(60)
    assert service.trial is None
    assert {p.limits.kv_cache_percent for p in service.pods} == {90}
    service.run(60)
    first = service.decisions[0]
    assert (first.knob, first.after, first.outcome.verdict) == (Knob.KV_CACHE_PERCENT, 90, Verdict.CONFIRMED)


def test_a_pod_alone_has_nothing_to_be_compared_with() -> None:
    service = starved(replicas=1, bounds=replace(BOUNDS, replicas=Range(1, 1)))
    service.clients = 20
    service.run(120)
    assert service.limits.kv_cache_percent > 50
    assert all(result.trial is None for _, result in service.results)


def test_worse_in_one_pod_is_put_back_there_and_never_reaches_the_others() -> None:
    """Whoever has the larger cache is three times slower."""
    service = starved()
    trial = until_trial(service)
    pod = next(p for p in service.pods if p.name == trial.pod)
    pod.law = StepLaw(0.15, 0.015)
    given = {p.name: {p.limits.kv_cache_percent} for p in service.pods}
    for _ in range(80):
        service.run(1)
        for p in service.pods:
            given[p.name].add(p.limits.kv_cache_percent)
    made = service.decisions[0]
    assert made.outcome.verdict is Verdict.ROLLED_BACK
    assert made.outcome.message.endswith(f"on {trial.pod}, over the objective of 250ms; it was put back there.") or (
        f"on {trial.pod} against the other pods" in made.outcome.message
    )
    assert given == {p.name: {50, 90} if p.name == trial.pod else {50} for p in service.pods}
    assert [d.after for d in service.decisions if d.knob is Knob.KV_CACHE_PERCENT] == [90], "not tried again"


@pytest.mark.parametrize("killed", [True, False])
def test_a_trial_pod_that_goes_down_costs_no_other_its_settings(killed: bool) -> None:
    down: dict[str, float] = {}

    def tamper(now: float, sample: PodSample) -> PodSample:
        since = down.get(sample.pod)
        kills = 1 if killed and since is not None else 0
        if since is not None and now < since + 20:
            return replace(sample, counters=None, ready=False, memory_kills=kills)
        return replace(sample, memory_kills=kills)

    service = starved(tamper)
    trial = until_trial(service)
    service.run(10)
    down[trial.pod] = service.now
    service.run(60)
    made = service.decisions[0]
    assert made.outcome.verdict is Verdict.ROLLED_BACK
    assert f"{trial.pod} {'was killed for its memory' if killed else 'stopped being ready'}" in made.outcome.message
    assert service.limits.kv_cache_percent == 50
    assert not [d for d in service.decisions if d.reason is Reason.OUT_OF_MEMORY], "50% was not too much"


def test_a_kill_elsewhere_ends_the_trial_for_a_step_down() -> None:
    down: dict[str, float] = {}

    def tamper(now: float, sample: PodSample) -> PodSample:
        return replace(sample, memory_kills=1) if sample.pod in down else sample

    service = starved(tamper)
    trial = until_trial(service)
    other = next(p.name for p in service.pods if p.name != trial.pod)
    down[other] = service.now
    service.run(4)
    assert service.trial is None
    assert service.limits.kv_cache_percent == 40
    assert f"it was ended on {trial.pod}" in service.decisions[0].outcome.message


def test_a_trial_pod_that_is_replaced_decides_nothing() -> None:
    service = starved()
    trial = until_trial(service)
    gone = next(p for p in service.pods if p.name == trial.pod)
    service.pods.remove(gone)
    service.replicas = 2
    service._scale(0.0)
    service.replicas = 3
    service._scale(0.0)
    service.run(10)
    assert service.trial is None
    assert service.decisions[0].outcome.verdict is Verdict.INCONCLUSIVE
    assert service.limits.kv_cache_percent == 50


def test_load_that_ends_ends_the_trial() -> None:
    service = starved()
    trial = until_trial(service)
    service.clients = 0
    for pod in service.pods:
        pod.queue.clear()
        pod.running.clear()
        pod.finish = None
    service.run(160)
    assert service.trial is None
    assert service.decisions[0].outcome.verdict is Verdict.INCONCLUSIVE
    assert f"the load ended before it could be judged on {trial.pod}" in service.decisions[0].outcome.message
    assert service.limits.kv_cache_percent == 50


def test_a_trial_whose_operator_has_forgotten_it_ends() -> None:
    service = starved()
    until_trial(service)
    service.state = State.initial(next_id=2)
    service.run(2)
    assert service.trial is None
    hold = [result.hold for _, result in service.results][-1]
    assert hold is not None
    assert service.limits.kv_cache_percent == 50


def test_replicas_wait_for_a_trial_and_not_for_ever() -> None:
    """The larger cache helps so little that the wait stays: replicas come a minute after the trial began."""
    service = starved(bounds=replace(BOUNDS, replicas=Range(3, 6)), blocks=60)
    until_trial(service)
    began = service.decisions[0].at
    service.run(200)
    bought = [d for d in service.decisions if d.knob is Knob.REPLICAS]
    assert bought
    assert began + 60 <= bought[0].at <= began + 150


def test_room_made_ready_is_tried_though_nobody_waits() -> None:
    """Nothing can be faster yet: the pod runs well with it, so all get it."""
    service = starved(limits=replace(LIMITS, batch_size=32))
    service.clients = 2
    service.run(30)
    service.clients = 0
    service.rate = lambda now: 1.5
    for _ in range(300):
        service.run(1)
        if service.trial is not None:
            break
    assert service.decisions[-1].reason is Reason.NEARLY_FULL
    service.run(60)
    assert service.trial is None
    assert service.limits.kv_cache_percent == 90


def windows(pod: str, *rates: float) -> tuple[PodWindow, ...]:
    base = dict.fromkeys((f for f in PodWindow.__dataclass_fields__ if f != "sequence_lengths"), 0.0)
    return tuple(
        PodWindow(**base | {"pod": pod, "seconds": 1.0, "generated_tokens": r, "waiting_throughout": True})  # type: ignore[arg-type]
        for r in rates
    )


def test_what_happens_to_all_pods_is_not_the_settings_doing() -> None:
    before = windows("a", 100, 102, 98) + windows("b", 50, 51, 49)
    compared = _compare(TrialPod("a", before, after=windows("a", 150, 151, 149) + windows("b", 75, 76, 74)))
    assert compared is not None
    change, error = compared
    assert change == pytest.approx(0.0, abs=1e-9)
    assert 0.01 < error < 0.03
    alone = _compare(TrialPod("a", windows("a", 100, 102, 98), after=windows("a", 150, 151, 149)))
    assert alone is not None
    assert alone[0] == pytest.approx(0.5)
    assert _compare(TrialPod("a", before, after=windows("a", 150))) is None


def test_the_pod_with_most_work_is_chosen() -> None:
    service = starved()
    assert isinstance(service.pods[0], Pod)
    trial = until_trial(service)
    pending = service.state.pending
    assert pending is not None
    assert pending.trial is not None
    lately = [w for w in service.state.windows if w.end <= pending.decision.at]
    load = {
        name: sum(w.batch_seconds + w.queue_seconds for w in lately if w.pod == name)
        for name in ("chat-1", "chat-2", "chat-3")
    }
    assert max(load, key=lambda name: load[name]) == trial.pod


def test_scatter_is_the_standard_error_of_two_means() -> None:
    """Around each pod's own mean in each of the two: 10% off in all six windows, three degrees of freedom."""
    before, after = windows("a", 90, 110), windows("a", 180, 220) + windows("b", 45, 55)
    variance = 6 * 0.1**2 / 3
    assert scatter(before, after) == pytest.approx((variance * (1 / 2 + 1 / 4)) ** 0.5)
    assert scatter(windows("a", 100), windows("a", 50)) == 0.0, "single windows tell nothing of it"
    assert scatter((), windows("a", 50, 60)) == 0.0
