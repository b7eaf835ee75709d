"""What is remembered over restarts: nothing is lost, nothing false is taken, and only what was calm counts as safe."""

import json
from dataclasses import replace

import pytest
from fluid_service import Service, StepLaw
from hypothesis import given
from hypothesis import strategies as st

from busload_operator.tuning.codec import decode, dumps, encode
from busload_operator.tuning.fit import Fit, add, solve
from busload_operator.tuning.headroom import PRIOR_SIZE, Errors, Kappa
from busload_operator.tuning.learned import (
    MAX_ENTRIES,
    Identity,
    Learned,
    Memory,
    UnusableMemoryError,
    learn,
    recall,
)
from busload_operator.tuning.sizing import Sizing
from busload_operator.tuning.state import State, Usage
from busload_operator.tuning.window import PodWindow

CHAT = Identity("bundled:chat", "Auto", "2 CPU, 2Gi")

WINDOW = PodWindow(
    pod="a",
    waiting_throughout=False,
    sequence_lengths=None,
    **{
        name: 0.0
        for name in PodWindow.__dataclass_fields__
        if name not in ("pod", "waiting_throughout", "sequence_lengths")
    },
)
windows = st.builds(
    lambda steps, seconds, batch, kv, prefill: replace(
        WINDOW,
        steps=float(steps),
        busy_seconds=steps * seconds,
        step_batch=steps * batch,
        step_kv_tokens=steps * batch * kv,
        prefill_tokens=float(prefill),
    ),
    st.integers(3, 1000),
    st.floats(1e-4, 10),
    st.floats(0.01, 500),
    st.floats(0, 1e5),
    st.integers(0, 10**6),
)


@st.composite
def fits(draw: st.DrawFn) -> Fit:
    fit = Fit()
    for window in draw(st.lists(windows, max_size=6)):
        fit = add(fit, window)
    return fit


optional = st.none() | st.floats(0, 1e6)
share = st.none() | st.floats(0.01, 1.1)
learneds = st.builds(
    Learned,
    fits(),
    optional,
    optional,
    st.none() | st.integers(1, 100),
    st.none() | st.integers(16, 10**6),
    share,
    share,
    share,
    st.just(()) | st.lists(st.floats(0, 10), min_size=PRIOR_SIZE, max_size=PRIOR_SIZE).map(tuple),
)
identities = st.builds(Identity, st.text(max_size=8), st.text(max_size=4), st.text(max_size=8))


@given(st.lists(st.tuples(identities, learneds), max_size=6))
def test_a_memory_keeps_every_bit_of_the_newest(entries: list[tuple[Identity, Learned]]) -> None:
    memory = Memory()
    for identity, learned in entries:
        memory = memory.with_(identity, learned)
    assert len(memory.entries) <= MAX_ENTRIES
    if entries:
        assert memory.entries[0].identity == entries[-1][0]
        assert memory.of(entries[-1][0]) == entries[-1][1]
    again = Memory.from_json(memory.to_json())
    assert repr(again) == repr(memory)
    assert again.to_json() == memory.to_json()


@given(learneds, st.integers(1, 1000))
def test_what_is_recalled_is_what_was_learned(learned: Learned, next_id: int) -> None:
    state = recall(learned, next_id)
    assert state.next_id == next_id
    assert learn(state, 55, learned) == learned, "a state that has seen nothing adds nothing"
    assert solve(state.fit) == solve(learned.fit)
    assert decode(State, json.loads(dumps(encode(state))), "state") == state


def test_the_law_goes_on_after_a_restart_as_without_one() -> None:
    service = Service(law=StepLaw(), noise=0.1)
    service.clients = 12
    service.run(120)
    before = service.results[-1][1].law
    assert before is not None
    assert before.usable
    kept = Memory().with_(CHAT, learn(service.state, service.limits.kv_cache_percent, Learned())).to_json()
    learned = Memory.from_json(kept).of(CHAT)
    assert learned is not None
    service.state = recall(learned, service.state.next_id)
    service.run(6)
    after = service.results[-1][1].law
    assert after is not None
    assert after.usable
    assert after.samples > before.samples
    assert after.b == pytest.approx(before.b, rel=0.2)


def test_another_model_precision_or_size_inherits_nothing() -> None:
    memory = Memory().with_(CHAT, Learned(kv_cache_percent=60))
    for other in ({"model": "bundled:other"}, {"precision": "INT8"}, {"hardware": "4 CPU, 2Gi"}):
        assert memory.of(replace(CHAT, **other)) is None
    assert memory.of(CHAT) == Learned(kv_cache_percent=60)


def usage(times: list[float]) -> tuple[Usage, ...]:
    return tuple(Usage(at, 1.0, 1.0, 0.0, 1.0) for at in times)


@pytest.mark.parametrize(
    ("times", "safe"),
    [
        ([2.0 * n for n in range(130)], 70),
        ([15.0 * n for n in range(20)], 70),
        ([2.0 * n for n in range(100)], 50),  # not for long enough
        ([2.0 * n for n in range(130) if n != 60], 50),  # a pod did not answer once: it may have been killed
        ([], 50),
    ],
)
def test_a_kv_fraction_is_safe_after_minutes_without_a_gap(times: list[float], safe: int) -> None:
    state = replace(State.initial(), usage=usage(times))
    assert learn(state, 70, Learned(kv_cache_percent=50)).kv_cache_percent == safe


GOOD = Memory().with_(CHAT, Learned(Fit(samples=0), 3.0, None, 60)).to_json()


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("", "Expecting value"),
        ("[]", "must be an object of version 1"),
        (GOOD.replace('"version":1', '"version":2'), "must be an object of version 1"),
        (GOOD.replace('"output_length":3', '"output_length":-3'), "memory.entries[0].learned: every number must be"),
        (GOOD.replace('"output_length":3', '"output_length":"NaN"'), "every number must be finite"),
        (
            GOOD.replace('"kv_cache_percent":60', '"kv_cache_percent":101'),
            "kv_cache_percent is 101; must be from 1 to 100",
        ),
        (GOOD.replace('"samples":0', '"samples":5'), "samples 5 do not agree with its 0 bins"),
        (GOOD.replace('"moment":[0,', '"moment":['), "moment 4 numbers"),
        (GOOD.replace('"gram":[[0,0,', '"gram":[[0,1,'), "gram must be symmetric"),
        (GOOD.replace('"precision"', '"other"'), "unknown field 'other'"),
        ("{" * 100_000, "Expecting property name"),
        ("[" * 100_000, ""),
    ],
)
def test_what_is_corrupt_is_refused(text: str, hint: str) -> None:
    assert text != GOOD
    with pytest.raises(UnusableMemoryError) as caught:
        Memory.from_json(text)
    assert hint in str(caught.value)


def test_what_was_learned_of_planning_goes_on_after_a_restart() -> None:
    seen = tuple((15.0 * i, 1.0 + 0.01 * i) for i in range(60))
    errors = Errors(seen=seen, quantile=0.86, quantile_at=900.0)
    kappa = Kappa(value=0.7, bad=0.75, since=0.0, changed_at=800.0)
    before = replace(State.initial(), sizing=Sizing(errors=errors, kappa=kappa))
    again = recall(
        Memory.from_json(Memory().with_(CHAT, learn(before, 90, Learned())).to_json()).of(CHAT) or Learned(), 1
    )
    assert (again.sizing.kappa.value, again.sizing.kappa.bad) == (0.7, 0.75)
    assert again.sizing.errors.quantile == 0.86
    assert again.sizing.errors.up() == pytest.approx(errors.up(), rel=0.03)
    assert again.sizing.errors.up() > 1.1 * Errors(quantile=0.86).up(), "not what is assumed of any service"
    assert learn(again, 90, learn(before, 90, Learned())) == learn(before, 90, Learned()), "nothing new, nothing lost"


def test_a_state_that_has_learned_nothing_of_planning_stores_nothing_of_it() -> None:
    learned = learn(State.initial(), 90, Learned())
    assert (learned.kappa, learned.kappa_bad, learned.quantile, learned.errors) == (None, None, None, ())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"kappa": 0.0}, "kappa, kappa_bad and quantile must be above 0"),
        ({"quantile": float("nan")}, "kappa, kappa_bad and quantile must be above 0"),
        ({"errors": (1.0, 2.0)}, "errors must be 14 finite numbers"),
        ({"errors": (float("inf"),) * PRIOR_SIZE}, "errors must be 14 finite numbers"),
        ({"max_sequence_length": 0}, "max_sequence_length is 0; must be at least 1"),
    ],
)
def test_planning_that_cannot_be_is_refused(changes: dict[str, object], says: str) -> None:
    text = Memory().with_(CHAT, replace(Learned(), **changes)).to_json()  # type: ignore[arg-type]
    with pytest.raises(UnusableMemoryError, match=says):
        Memory.from_json(text)
