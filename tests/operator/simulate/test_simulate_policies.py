"""Each baseline does what its rule says, holds without data; the clairvoyant is ahead; search finds the best number."""

from dataclasses import replace

import pytest
from simulate_helpers import LIMITS, OBJECTIVES, counters, hardware, look, setup

from busload_operator.simulate import compare
from busload_operator.simulate.baselines import Busy, Concurrency, Saturation, TokenCapacity, Waiting
from busload_operator.simulate.clairvoyant import Clairvoyant, capacity
from busload_operator.simulate.hardware import SetupError
from busload_operator.simulate.policy import Policy
from busload_operator.simulate.workload import Arrival, Lengths, flat
from busload_operator.tuning import Counters
from busload_runtime.contract import StepLaw


def wanted(policy: Policy, now: float, replicas: int, *pods: Counters | None) -> int:
    return policy(look(now, replicas, *pods)).replicas


def wanted_later(policy: Policy, replicas: int, *pods: Counters | None) -> int:
    """After five minutes of the same: longer than scaling down is held back."""
    for now in range(0, 300, 15):
        wanted(policy, now, replicas, *pods)
    return wanted(policy, 300, replicas, *pods)


def test_waiting_divides_the_queue_and_comes_down_late() -> None:
    policy = Waiting(5)
    assert wanted(policy, 0, 1, counters(waiting=22)) == 5
    assert wanted(policy, 5, 1, counters(waiting=40)) == 1, "it decides every 15 s"
    assert wanted(policy, 15, 5, *[counters()] * 5) == 5
    assert wanted(policy, 375, 5, *[counters()] * 5) == 1, "360 s after the last need"


def test_waiting_is_limited_to_a_doubling_or_four_more() -> None:
    assert wanted(Waiting(5), 0, 1, counters(waiting=1000)) == 5
    assert wanted(Waiting(5), 0, 8, *[counters(waiting=1000)] * 8) == 8, "the bounds hold"


def busy(clock: float, seconds: float) -> Counters:
    return counters(clock=clock, busy_seconds=seconds)


def test_busy_follows_the_share_of_time() -> None:
    policy = Busy(0.80)
    assert wanted(policy, 0, 2, busy(0, 0), busy(0, 0)) == 2
    assert wanted(policy, 15, 2, busy(15, 15), busy(15, 15)) == 3, "ceil(2 * 100 / 80)"
    assert wanted(policy, 30, 3, busy(30, 30), busy(30, 30), None) == 3, "the starting pod counts as idle"
    assert wanted(policy, 45, 3, busy(45, 42.5), busy(45, 42.5), None) == 3, "within the tolerance"


def test_busy_ignores_counters_that_fell() -> None:
    policy = Busy(0.80)
    wanted(policy, 0, 1, busy(100, 90))
    assert wanted(policy, 15, 1, busy(5, 5)) == 1
    assert wanted(policy, 30, 1, busy(20, 20)) == 2


def test_concurrency_divides_requests_in_flight() -> None:
    policy = Concurrency(limit=20, utilisation=0.7)
    assert wanted(policy, 0, 2, counters(running=14), counters(running=10)) == 2
    assert wanted(policy, 5, 2, counters(running=20, waiting=30), counters(running=10)) == 3, "mean of (24, 60) / 14"
    assert wanted(policy, 10, 2, counters(running=20, waiting=90), counters(running=10)) == 7, "panic: twice the target"
    assert wanted(policy, 60, 7, *[counters(running=1)] * 7) == 7, "no way down in a panic"


def pod(kv: float, waiting: float = 0) -> Counters:
    return counters(kv_blocks_free=100 * (1 - kv), waiting=waiting)


def test_saturation_steps_by_one() -> None:
    assert wanted(Saturation(), 0, 2, pod(0.9), pod(0.85)) == 3
    assert wanted(Saturation(), 0, 2, pod(0.75), pod(0.9)) == 3, "spare of 5% is below 10%"
    assert wanted(Saturation(), 0, 2, pod(0.5), pod(0.5)) == 2, "1.0 on the other one would be too much"
    assert wanted(Saturation(), 0, 2, pod(0.3, 4), pod(0.3, 4)) == 3, "spare of 1 waiting is below 3"
    assert wanted(Saturation(), 0, 3, pod(0.2), pod(0.2), pod(0.2)) == 3, "down only after 240 s"
    assert wanted_later(Saturation(), 3, pod(0.2), pod(0.2), pod(0.2)) == 2
    assert wanted_later(Saturation(), 2, pod(0.5), pod(0.5)) == 2, "1.0 on the other one would be too much"
    assert wanted(Saturation(), 0, 3, pod(0.9), pod(0.9), None) == 3, "nothing while a pod starts"


def test_saturation_looks_at_the_peak_of_a_minute() -> None:
    policy = Saturation()
    wanted(policy, 0, 1, pod(0.2))
    wanted(policy, 5, 1, pod(0.95))
    assert wanted(policy, 15, 1, pod(0.2)) == 2
    later = Saturation()
    wanted(later, 0, 1, pod(0.95))
    assert wanted(later, 300, 1, pod(0.2)) == 1


def test_token_capacity_counts_demand_in_tokens() -> None:
    def tokens(used: float, waiting: float = 0) -> Counters:
        return counters(kv_blocks_free=100 - used / 16, waiting=waiting, prefill_tokens=1000.0, ttft_count=10.0)

    # A pod holds 0.8 * 1600 = 1280 tokens; a prompt has 100.
    assert wanted(TokenCapacity(), 0, 1, tokens(1040)) == 1
    assert wanted(TokenCapacity(), 0, 1, tokens(1120)) == 2, "over 85%"
    assert wanted(TokenCapacity(), 0, 1, tokens(800, waiting=4)) == 2, "800 + 4 * 100"
    assert wanted_later(TokenCapacity(), 3, tokens(160), tokens(160), tokens(160)) == 1
    assert wanted(TokenCapacity(), 0, 2, counters(), counters()) == 2, "no request seen yet"


@pytest.mark.parametrize("make", [Waiting, Busy, lambda: Concurrency(10), Saturation, TokenCapacity])
def test_one_pod_and_none_that_speaks_changes_no_settings(make: type) -> None:
    action = make()(look(0.0, 2, None, None))
    assert action.limits == LIMITS


@pytest.mark.parametrize("make", [Busy, Saturation, TokenCapacity])
def test_without_data_the_number_stays(make: type) -> None:
    assert wanted(make(), 0.0, 3, None, None, None) == 3


def test_capacity_by_hand() -> None:
    load = [Arrival(0.0, 100, 50)]
    law = StepLaw(a=0.01, b=0.001, c=1e-6, d=1e-4)
    found = capacity(load, hardware(law), LIMITS, OBJECTIVES)
    g = 0.001 + 1e-6 * 125 + 1e-4 * 2
    assert found.batch == 16, "the batch limit is the smallest bound"
    assert found.work_per_second == pytest.approx(16 * g / (0.01 + 16 * g))
    wide = replace(LIMITS, batch_size=1000, token_budget=1000)
    assert capacity(load, hardware(law), wide, OBJECTIVES).batch == pytest.approx((0.06 - 0.01) / g)
    small = capacity(load, hardware(law, kv_tokens=2500), wide, OBJECTIVES)
    assert small.batch == pytest.approx(0.9 * 2240 / 125)


def test_the_clairvoyant_buys_before_the_step_and_sells_after_it() -> None:
    load = [Arrival(t / 2, 100, 100) for t in range(600)]
    load += [Arrival(300 + t / 20, 100, 100) for t in range(4000)]
    load += [Arrival(500 + t / 2, 100, 100) for t in range(400)]
    policy = Clairvoyant(load, hardware(), startup=30.0, lead=5.0)
    numbers = {t: wanted(policy, float(t), 1) for t in range(0, 700, 5)}
    assert numbers[200] == numbers[600] == 1
    assert numbers[280] == numbers[290] > 2, "bought 35 s ahead, ready in time"
    assert numbers[250] == 1


def test_the_best_number_is_the_fewest_that_reach_the_target() -> None:
    load = flat(12.0, 240, Lengths(((100, 100),)), 1)
    made = setup(hardware(noise=0.1), replace(LIMITS, batch_size=32))
    told: list[str] = []
    best = compare.run("static:best", load, made, 0.99, lambda name, share: told.append(name))
    replicas = best.summary.replicas_at_the_end
    assert best.summary.policy == f"static:{replicas} (best)"
    assert best.summary.inside >= 0.99
    fewer = compare.run(f"static:{replicas - 1}", load, made, 0.99, lambda name, share: None)
    assert replicas > 1
    assert fewer.summary.inside < 0.99
    assert {name.split(" ")[0] for name in told} == {"static:best"}


def test_a_target_out_of_reach_means_the_most_that_can_be_reached() -> None:
    load = [Arrival(t / 10, 100, 40) for t in range(600)]
    made = setup(hardware(StepLaw(0.08, 0, 0, 0)))  # no step meets the inter-token objective
    best = compare.run("static:best", load, made, 0.99, lambda name, share: None)
    assert best.summary.inside == 0
    assert best.summary.replicas_at_the_end == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("foo", "policy 'foo' is unknown; known are tuner, settings, static:N"),
        ("tuner:3", "policy 'tuner:3' is unknown"),
        ("static:", "'' must be a whole number of at least 1, or best"),
        ("static:2.5", "'2.5' must be a whole number"),
        ("static:99", "replicas: 99 is outside the bounds 1 to 8"),
        ("busy:x", "'x' must be a number above 0"),
        ("waiting:-1", "'-1' must be a number above 0"),
    ],
)
def test_policies_that_are_not_are_told(name: str, text: str) -> None:
    with pytest.raises(SetupError, match=text):
        compare.check(name, [Arrival(0.0, 1, 1)], setup())


@pytest.mark.parametrize("name", [*compare.COMPARED, "settings", "busy:70", "waiting:9", "static:2"])
def test_every_policy_runs(name: str) -> None:
    load = flat(3.0, 90, Lengths(((50, 20),)), 1)
    compare.check(name, load, setup())
    entry = compare.run(name, load, setup(), 0.99, lambda name, share: None)
    assert entry.summary.requests == len(load)
    assert not entry.summary.failed
