"""A service that starts with bad settings reaches good ones by itself: under load, losing nothing, before it buys.

The settings it reached and the best ones by hand then serve the same mix at the same time, with equal shares of the
same cores, so that a machine whose speed changes meanwhile is no advantage to either. `pytest -s` prints every decision
with what it predicted and what came. A shared machine is a quarter slower or faster from one ten seconds to the next,
while a change is judged too, so it may take more than one try.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from functools import partial
from typing import Any

from e2e import services
from e2e.access import Cluster, wait_for

CLIENTS = 24
MIX = {"input_tokens": "lognormal:60:0.7:300", "output_tokens": "lognormal:120:0.6:300"}
LENGTHS = {"min": 640, "max": 8192}
BAD = {
    "maxSequenceLength": LENGTHS,
    "kvCachePercent": {"initial": 20, "min": 10, "max": 90},
    "batchSize": {"initial": 4, "min": 1, "max": 32},
    "replicas": {"min": 1, "max": 2},
}
OBJECTIVES = {"timeToFirstToken": "200ms", "interTokenLatency": "5s"}
"""Missed by a batch of 4 on a fast machine too, and met by the best settings on a slow one too."""
ONE = {"replicas": {"min": 1, "max": 1}}
# By hand: a place for every client, all the memory, and nothing else moves the throughput of this mix.
BEST = {
    "maxSequenceLength": LENGTHS,
    "kvCachePercent": {"min": 10, "max": 90},
    "batchSize": {"initial": 32, "min": 1, "max": 32},
    **ONE,
}
FILLING, MEASURED = 8.0, 30.0
"""Seconds until all places are taken, and then counted."""
PREDICTED = 0.20
"""By which share of its outcome a prediction may be off."""
WRONG = 2.0
"""Factor by which no prediction of a law may be off in any try: a neighbour takes or leaves half of the machine."""
SHARE = 0.9
"""Of the throughput by hand that is to be reached, in `WITHIN` seconds."""
WITHIN = 600.0
SETTLED = 90.0
"""Seconds without a decision: longer than the wait after a raise that showed nothing, some windows, and a judgement."""
TRIES = 2
"""For the throughput. Work of neighbours while a change is judged makes the tuner careful, rightly; twice is chance no
more."""
TRIES_TO_PREDICT = 5
"""For throughput and all predictions in one try: what neighbours do in the seconds of one measurement is in no law."""


def test_bad_settings_become_good_ones_before_anything_is_bought(operator: Cluster, namespace: str) -> None:
    tries: list[str] = []
    reached = False
    for number in range(1, TRIES_TO_PREDICT + 1):
        share, off, told = _share_of_best(operator, namespace, f"tuned-{number}", f"hand-{number}")
        tries.append(told)
        reached = reached or share >= SHARE
        if share >= SHARE and all(abs(by) <= PREDICTED for by in off):
            return
        assert reached or number < TRIES, "under the throughput by hand in each try:\n" + "\n".join(tries)
    raise AssertionError("no try reached it with predictions that came true:\n" + "\n".join(tries))


def _share_of_best(operator: Cluster, namespace: str, own: str, by_hand: str) -> tuple[float, list[float], str]:
    """Throughput of the settings that service `own` reaches, over that of the best by hand; by which shares of their
    outcomes predictions were off; all of it in words, also printed."""
    services.apply(operator, namespace, services.manifest(own, bounds=BAD, objectives=OBJECTIVES))
    services.wait_ready(operator, namespace, own)
    began = time.time()
    with _load(operator, namespace, own) as load:
        decisions = wait_for(lambda: _settled(operator, namespace, own), 900, "settings to come to rest", every=2)
        reached = time.time() - began - SETTLED
    assert load.report().errors == [], "requests were lost while settings changed"
    # The settings are compared, on one replica each: a second one on the same cores would only divide them.
    services.apply(
        operator, namespace, services.manifest(own, bounds=BAD | ONE, objectives=OBJECTIVES, tuning={"mode": "Off"})
    )
    wait_for(lambda: len(services.pods(operator, namespace, own)) == 1, 300, "one replica")
    services.apply(
        operator, namespace, services.manifest(by_hand, bounds=BEST, objectives=OBJECTIVES, tuning={"mode": "Off"})
    )
    services.wait_ready(operator, namespace, by_hand)
    tuned, hand = _rates(operator, namespace, own, by_hand)

    told = "\n  ".join((
        f"at rest after {reached:.0f} s; {tuned:.0f} tokens/s beside {hand:.0f} by hand, {tuned / hand:.0%}",
        *(_words(decision) for decision in decisions),
    ))  # fmt: skip
    print(f"\n{told}", flush=True)
    assert reached <= WITHIN, told
    off = _predictions(decisions, told)
    for name in (own, by_hand):
        operator.kubectl("delete", "inferenceservice", name, "-n", namespace)
    left = partial(services.pods, operator, namespace)
    wait_for(lambda: not left(own) + left(by_hand), 300, "no pods of this try")
    return tuned / hand, off, told


def _predictions(decisions: list[dict[str, Any]], told: str) -> list[float]:
    """By which shares of their outcomes predictions of settings were off. Checks what holds whatever the machine did:
    settings first, and predictions of the right size where there was a law and something to compare with."""
    settings = _settings(decisions)
    bought = [decision for decision in decisions if decision["knob"] == "replicas"]
    assert settings[0]["knob"] == "batchSize", told
    # Settings have a minute for a missed objective, which on a slow machine is not enough to judge each.
    first = [purchase for purchase in bought if purchase["reason"] != "TimeLimitPassed"]
    assert all(purchase["id"] > settings[-1]["id"] for purchase in first), told
    for decision in settings:
        if "linear bound, at best" in decision["message"] or decision["outcome"]["verdict"] == "Inconclusive":
            continue
        predicted = float(decision["prediction"]["tokensPerSecond"])
        after = float(decision["outcome"]["tokensPerSecondAfter"])
        assert predicted / WRONG <= after <= predicted * WRONG, _words(decision)
    measured = [decision for decision in settings if decision["outcome"].get("tokensPerSecondAfter")]
    assert measured, told
    return [
        float(decision["prediction"]["tokensPerSecond"]) / float(decision["outcome"]["tokensPerSecondAfter"]) - 1
        for decision in measured
    ]


def _rates(cluster: Cluster, namespace: str, *names: str) -> list[float]:
    """Tokens per second that clients get from each of the services, all loaded at once, every place taken."""
    with ExitStack() as stack:
        loads = [stack.enter_context(_load(cluster, namespace, name)) for name in names]
        time.sleep(FILLING)
        start = time.time()
        time.sleep(MEASURED)
        end = time.time()
    return [load.report().rate_between(start, end) for load in loads]


@contextmanager
def _load(cluster: Cluster, namespace: str, name: str) -> Iterator[services.Load]:
    load = services.Load(cluster, namespace, name, requests=100000, concurrency=CLIENTS, **MIX)
    try:
        yield load
    finally:
        load.process.terminate()


def _settled(cluster: Cluster, namespace: str, name: str) -> list[dict[str, Any]]:
    """The decisions, oldest first, once the last setting has an outcome and none followed; nothing before that."""
    status = services.get(cluster, namespace, name)["status"]
    decisions = sorted(status.get("decisions", []), key=lambda decision: decision["id"])
    settings = _settings(decisions)
    if not settings or any(decision["outcome"]["verdict"] == "Pending" for decision in settings):
        return []
    last = datetime.fromisoformat(settings[-1]["time"]).timestamp()
    return decisions if time.time() - last > SETTLED else []


def _settings(decisions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [decision for decision in decisions if decision["knob"] != "replicas"]


def _words(decision: dict[str, Any]) -> str:
    outcome = decision["outcome"]
    predicted = decision["prediction"].get("tokensPerSecond")
    return (
        f"{decision['knob']} {decision['from']} -> {decision['to']} ({decision['reason']}): {outcome['verdict']}, "
        f"predicted {predicted}, came to {outcome.get('tokensPerSecondAfter')} tokens/s"
    )
