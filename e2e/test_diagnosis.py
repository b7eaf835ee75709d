"""Each bottleneck, made on purpose on a real service: the right name, with right numbers, in status and one event.

The tuner is off, so that what limits the service stays. Each scene changes the bounds (which the limits follow even
then) and the load; the service and its pod stay the same.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from e2e import services
from e2e.access import Cluster, wait_for

NAME = "chat"


@dataclass(frozen=True)
class Scene:
    bottleneck: str
    batch: int
    percent: int = 90
    load: dict[str, object] = field(default_factory=dict)

    def manifest(self) -> dict[str, Any]:
        bounds = {
            "maxSequenceLength": {"min": 1024, "max": 1024},
            "batchSize": {"min": self.batch, "max": self.batch},
            "kvCachePercent": {"min": self.percent, "max": self.percent},
            "replicas": {"min": 1, "max": 1},
        }
        return services.manifest(NAME, bounds=bounds, tuning={"mode": "Off"})


SHORT = {"input_tokens": 32, "output_tokens": 64}
SCENES = [
    Scene("Idle", 8),
    # Two of ten clients are served, and two are far from what the machine can do.
    Scene("SlotBound", 2, load={"concurrency": 10, **SHORT}),
    # Places for all clients, memory for a few: a pool of 10% is about 3,700 tokens.
    Scene("KVBound", 24, percent=10, load={"concurrency": 24, "input_tokens": 300, "output_tokens": 200}),
    # Nothing waits, and nearly all of a step's time goes to prompts.
    Scene("PrefillBound", 8, load={"concurrency": 2, "input_tokens": 700, "output_tokens": 4}),
    # More clients than places, and the batch far above its knee on any machine: with six prompt tokens for each
    # token, what a place adds to a step (g) is over ten times what it is with short prompts.
    Scene("Saturated", 32, load={"concurrency": 44, "input_tokens": 96, "output_tokens": 16}),
]


def test_what_limits_a_service_is_named_with_its_numbers(operator: Cluster, namespace: str) -> None:
    services.apply(operator, namespace, SCENES[0].manifest())
    services.wait_ready(operator, namespace, NAME)
    for scene in SCENES:
        services.apply(operator, namespace, scene.manifest())
        wait_for(partial(_applied, operator, namespace, scene), 180, f"the limits of {scene.bottleneck}")
        with _load(operator, namespace, scene):
            found = wait_for(partial(_diagnosed, operator, namespace, scene.bottleneck), 300, scene.bottleneck)
        print(f"{scene.bottleneck}: {found['evidence']}")
        assert _numbers_are_right(scene, found["evidence"]), found
        assert len(_events(operator, namespace, scene.bottleneck)) == 1

    pod = services.pods(operator, namespace, NAME)[0]["metadata"]["name"]
    engine = operator.kubectl(
        "exec", pod, "-n", namespace, "--", "sh", "-c", "for p in /proc/[0-9]*; do "
        "grep -qa [b]usload_runtime.engine.process $p/cmdline && kill -STOP ${p#/proc/} && echo ${p#/proc/}; done; true"
    ).split()  # fmt: skip
    assert engine, "the engine process was not found in the container"
    found = wait_for(lambda: _diagnosed(operator, namespace, "Stale"), 180, "bottleneck Stale")
    print(f"Stale: {found['evidence']}")
    assert pod in found["evidence"]
    (event,) = _events(operator, namespace, "Stale")
    assert event["type"] == "Warning"


@contextmanager
def _load(cluster: Cluster, namespace: str, scene: Scene) -> Iterator[None]:
    if not scene.load:
        with nullcontext():
            yield
        return
    load = services.Load(cluster, namespace, NAME, requests=100000, **scene.load)
    try:
        yield
    finally:
        load.process.terminate()
        report = load.report()
    assert report.errors == []


def _applied(cluster: Cluster, namespace: str, scene: Scene) -> bool:
    tuned = services.get(cluster, namespace, NAME).get("status", {}).get("tuned", {})
    return (tuned.get("batchSize"), tuned.get("kvCachePercent")) == (scene.batch, scene.percent)


def _diagnosed(cluster: Cluster, namespace: str, bottleneck: str) -> dict[str, Any]:
    """Raises KeyError, which says what it is instead, while it is not this."""
    found: dict[str, Any] = services.get(cluster, namespace, NAME)["status"].get("diagnosis") or {}
    if found.get("bottleneck") != bottleneck:
        raise KeyError(f"{found.get('bottleneck')}: {found.get('evidence')}")
    return found


def _events(cluster: Cluster, namespace: str, reason: str) -> list[dict[str, Any]]:
    """Events of the service with this reason."""
    selector = f"involvedObject.kind=InferenceService,reason={reason}"
    found: list[dict[str, Any]] = cluster.get("events", "-n", namespace, f"--field-selector={selector}")["items"]
    return found


def _numbers_are_right(scene: Scene, evidence: str) -> bool:
    """Clients without a place wait, and all places are taken: as means over seconds in which the load began."""
    waiting, places = re.search(r"([\d.]+) requests wait", evidence), re.search(r"([\d.]+) of (\d+) places", evidence)
    if places is None or int(places[2]) != scene.batch:
        return False
    taken, clients = float(places[1]), int(str(scene.load.get("concurrency", 0)))
    if scene.bottleneck == "Idle":
        return taken == 0 and waiting is None
    if scene.bottleneck == "PrefillBound":
        share = re.search(r"([\d.]+)% of step time goes to prompts", evidence)
        return share is not None and float(share[1]) > 50 and waiting is None
    if waiting is None or abs(float(waiting[1]) + taken - clients) > 0.25 * clients:
        return False
    return taken < 0.9 * scene.batch if scene.bottleneck == "KVBound" else taken > 0.75 * scene.batch
