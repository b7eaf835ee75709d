"""A small service that simulates in a moment, and counters to show to policies."""

from dataclasses import fields, replace

from busload_operator.simulate.hardware import HARDWARE, Hardware
from busload_operator.simulate.run import Setup
from busload_operator.tuning import Bounds, Counters, Inputs, Mode, Objectives, PodSample, Range, Scaling
from busload_runtime.contract import Limits, StepLaw

LIMITS = Limits(2048, 16, 90, 256, 10_000, 10_000_000)
BOUNDS = Bounds(Range(1024, 2048), Range(20, 90), Range(1, 64), 8, Range(1, 8))
OBJECTIVES = Objectives(1.0, 0.06)


def hardware(law: StepLaw | None = None, kv_tokens: int = 40_000, noise: float = 0.0) -> Hardware:
    return replace(
        HARDWARE["roomy"],
        law=law or StepLaw(a=0.01, b=0.001, c=0.0, d=1e-4),
        kv_tokens=kv_tokens,
        limits=LIMITS,
        noise=noise,
        drift=0.0,
    )


def setup(machine: Hardware | None = None, limits: Limits = LIMITS, replicas: int = 1, **changes: object) -> Setup:
    made = Setup(machine or hardware(), limits, BOUNDS, OBJECTIVES, replicas, startup=30.0)
    return replace(made, **changes)  # type: ignore[arg-type]


def counters(**values: float) -> Counters:
    base = {field.name: 0.0 for field in fields(Counters) if field.name != "sequence_lengths"} | {
        "kv_blocks": 100.0,
        "kv_blocks_free": 100.0,
        "kv_block_size": 16.0,
        "batch_size": 16.0,
    }
    return Counters(**(base | values))


def look(now: float, replicas: int, *pods: Counters | None) -> Inputs:
    """Pods without counters are starting."""
    samples = tuple(PodSample(f"pod-{i}", now, c, ready=c is not None) for i, c in enumerate(pods, 1))
    return Inputs(now, samples, LIMITS, 1, replicas, BOUNDS, OBJECTIVES, Mode.AUTO, Scaling.OBSERVED)
