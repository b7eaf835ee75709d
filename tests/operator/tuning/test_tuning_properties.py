"""Whatever the pods say: bounds hold, one change at a time, nothing moves on bad data, the same twice."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from fluid_service import BOUNDS, LIMITS, Service, StepLaw
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from busload_operator.tuning import (
    Bounds,
    Counters,
    Inputs,
    Knob,
    Mode,
    Objectives,
    PodSample,
    Range,
    Result,
    Scaling,
    State,
    step,
)
from busload_operator.tuning.step import step as step_again

FAULTS: dict[str, Callable[[Counters], Counters | None]] = {
    "none": lambda c: c,
    "silent": lambda c: None,
    "nan": lambda c: replace(c, busy_seconds=float("nan")),
    "negative": lambda c: replace(c, waiting=-3.0),
    "reset": lambda c: replace(c, steps=0.0, busy_seconds=0.0),
    "stuck clock": lambda c: replace(c, clock=1.0),
    "busy lie": lambda c: replace(c, busy_seconds=c.busy_seconds * 1e3 + 1e6),
    "batch lie": lambda c: replace(c, batch_seconds=c.batch_seconds * 1e3 + 1e6),
}

bounds = st.builds(
    lambda low, span, initial, pods, extra, percent: Bounds(
        max_sequence_length=Range(1024, 8192),
        kv_cache_percent=Range(20, percent),
        batch_size=Range(low, low + span),
        batch_size_initial=min(low + initial, low + span),
        replicas=Range(pods, pods + extra),
    ),
    st.integers(1, 8),
    st.integers(0, 60),
    st.integers(0, 10),
    st.integers(1, 2),
    st.integers(0, 3),
    st.integers(50, 90),
)
laws = st.builds(
    StepLaw,
    a=st.floats(0.001, 0.2),
    b=st.floats(0.0, 0.02),
    c=st.floats(0.0, 1e-5),
    d=st.floats(0.0, 0.002),
)
phases = st.lists(st.tuples(st.integers(0, 60), st.sampled_from(sorted(FAULTS)), st.integers(4, 60)), max_size=4)


class Checked(Service):
    """Checks every step, and runs each twice."""

    faults: list[str]

    def _loop(self) -> None:
        before, state = (self.limits, self.replicas), self.state
        super()._loop()
        _, result = self.results[-1]
        self._check_bounds(result)
        if (result.limits, result.replicas) != before and result.decision is None:
            allowed = any(d.outcome.verdict == "RolledBack" for d in result.closed)
            moved_inside = not self._inside(*before)
            assert allowed or moved_inside or state.pending or state.restored, "a change without a reason"
        if result.decision is not None:
            assert result.decision.applied == (self.mode is Mode.AUTO)
            assert sum(self._differences(before, result)) == result.decision.applied

    def _differences(self, before: tuple[object, int], result: Result) -> list[bool]:
        limits = before[0]
        names = ("max_sequence_length", "batch_size", "kv_cache_percent", "max_queued_requests", "max_queued_tokens")
        return [getattr(limits, n) != getattr(result.limits, n) for n in names] + [before[1] != result.replicas]

    def _inside(self, limits: object, replicas: int) -> bool:
        b = self.bounds
        return (
            b.batch_size.clamp(limits.batch_size) == limits.batch_size  # type: ignore[attr-defined]
            and b.kv_cache_percent.clamp(limits.kv_cache_percent) == limits.kv_cache_percent  # type: ignore[attr-defined]
            and (self.scaling is Scaling.EXTERNAL or b.replicas.clamp(replicas) == replicas)
        )

    def _check_bounds(self, result: Result) -> None:
        b, limits = self.bounds, result.limits
        assert b.batch_size.min <= limits.batch_size <= b.batch_size.max
        assert b.kv_cache_percent.min <= limits.kv_cache_percent <= b.kv_cache_percent.max
        assert b.max_sequence_length.min <= limits.max_sequence_length <= b.max_sequence_length.max
        assert limits.token_budget >= limits.batch_size
        if self.scaling is Scaling.EXTERNAL:
            assert result.replicas == self.replicas
        else:
            assert b.replicas.min <= result.replicas <= b.replicas.max


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(bounds, laws, phases, st.sampled_from(list(Mode)), st.sampled_from(list(Scaling)), st.booleans())
def test_invariants(
    bounds: Bounds,
    law: StepLaw,
    phases: list[tuple[int, str, int]],
    mode: Mode,
    scaling: Scaling,
    only_one_pod: bool,
) -> None:
    fault = "none"

    def tamper(now: float, sample: PodSample) -> PodSample:
        if sample.counters is None or (only_one_pod and sample.pod != "chat-1"):
            return sample
        return replace(sample, counters=FAULTS[fault](sample.counters))

    limits = replace(LIMITS, batch_size=bounds.batch_size_initial)
    service = Checked(law=law, bounds=bounds, limits=limits, mode=mode, scaling=scaling, tamper=tamper, blocks=400)
    if scaling is Scaling.OBSERVED:
        service.replicas = bounds.replicas.min
        service._scale(0.0)
    for clients, fault, seconds in phases:
        service.clients = clients
        count = len(service.decisions)
        service.run(seconds)
        if fault != "none" and not only_one_pod and fault not in ("reset",):
            # A step that still bridges the last good scrape may come first; nothing after it.
            late = [d for d in service.decisions[count:] if d.at > service.now - seconds + 2.1]
            assert not late, (fault, [d.message for d in late])
    if mode is not Mode.AUTO:
        assert service.limits == limits
    if mode is Mode.OFF:
        assert not service.decisions


finite = st.floats(0, 1e9) | st.sampled_from([float("nan"), float("inf"), -1.0, 0.0])
counters = st.builds(Counters, **dict.fromkeys(Counters.__dataclass_fields__, finite))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(counters | st.none(), max_size=3), max_size=8), st.sampled_from(list(Mode)))
def test_any_numbers_are_survived_alike(scrapes: list[list[Counters | None]], mode: Mode) -> None:
    """Random numbers: never an exception, never out of bounds, and the same twice."""
    one, two = State.initial(), State.initial()
    for i, pods in enumerate(scrapes):
        now = 100.0 + 2 * i
        inputs = Inputs(
            now=now,
            pods=tuple(PodSample(f"p{k}", now, c, True) for k, c in enumerate(pods)),
            limits=LIMITS,
            generation=0,
            replicas=1,
            bounds=BOUNDS,
            objectives=Objectives(2.0, 0.1),
            mode=mode,
            scaling=Scaling.OBSERVED,
        )
        one, first = step(one, inputs)
        two, second = step_again(two, inputs)
        assert first == second
        assert one == two
        assert first.limits.batch_size <= BOUNDS.batch_size.max
        assert first.replicas <= 2
        if all(c is None for c in pods):
            assert first.decision is None


@pytest.mark.parametrize("fault", [f for f in sorted(FAULTS) if f not in ("none", "reset")])
def test_a_faulty_majority_holds_and_a_faulty_minority_does_not(fault: str) -> None:
    def tamper(count: int) -> Callable[[float, PodSample], PodSample]:
        bad = {f"chat-{i + 1}" for i in range(count)}
        return lambda now, s: (
            replace(s, counters=FAULTS[fault](s.counters)) if s.pod in bad and s.counters is not None else s
        )

    for count, acts in ((1, True), (2, False)):
        service = Service(replicas=3, bounds=replace(BOUNDS, replicas=Range(1, 3)), tamper=tamper(count))
        service.clients = 60
        service.run(30)
        assert bool(service.decisions) is acts
        # The first scrape has nothing to compare with.
        hold = service.results[1][1].hold or ""
        assert ("Only 1 of 3 ready pods gave usable numbers" in hold) is not acts
        if acts:
            assert service.decisions[0].knob is Knob.BATCH_SIZE
