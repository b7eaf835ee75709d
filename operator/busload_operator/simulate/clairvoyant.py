"""The limit of what replica scaling can do: a policy that knows the law, and the arrivals of the lead time ahead."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from busload_operator.simulate.hardware import Hardware
from busload_operator.simulate.policy import Action
from busload_operator.simulate.workload import Arrival
from busload_operator.tuning import Inputs, Objectives
from busload_runtime.contract import Limits

UTILISATION = 0.90
"""Share of a replica's capacity that it plans with; the rest is for the variance of steps and lengths."""
_KV_MARGIN = 0.9
_ITL_MARGIN = 0.9
_SMOOTH_SECONDS = 20


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one replica can do for this load within the inter-token objective (mean lengths, true law).

    `t(B) = a + B*g` with `g = b + c*h + d*P/D`, h the tokens a running request holds on average over its life: a
    request costs D*g seconds of pure work, and at batch B a replica does B*g/(a + B*g) seconds of it per second.
    """

    batch: float
    """The largest useful batch: by objective, KV cache or batch limit."""
    work_per_second: float
    slope: float
    """g, in seconds."""
    decode_slope: float
    """b + c*h, in seconds: what a running request adds to a step that computes no prompt."""


def capacity(load: Sequence[Arrival], hardware: Hardware, limits: Limits, objectives: Objectives) -> Capacity:
    law = hardware.law
    output = sum(a.output for a in load)
    held = sum(a.output * (a.prompt + a.output / 2) for a in load) / output
    g = law.b + law.c * held + law.d * sum(a.prompt for a in load) / output
    blocks = hardware.num_blocks(limits) * hardware.block_size
    within = (objectives.inter_token_latency - law.a) / g if g > 0 else math.inf
    batch = max(1.0, min(within, _KV_MARGIN * blocks / held, limits.batch_size))
    return Capacity(batch, batch * g / (law.a + batch * g), g, law.b + law.c * held)


class Clairvoyant:
    """As many replicas as the busiest moment of the next lead time needs.

    Sets the batch limit and the token budget once, by the law: the largest batch within 90% of the inter-token
    objective, and the prompt tokens that still fit a step at its usual batch. Prefix hits are not foreseen: every
    prompt counts whole.
    """

    def __init__(self, load: Sequence[Arrival], hardware: Hardware, startup: float, lead: float) -> None:
        self._load, self._hardware = load, hardware
        self._lead = max(1, math.ceil(startup + lead))
        law = hardware.law
        seconds = math.floor(load[-1].at) + 1
        work = [0.0] * (seconds + 1)
        for a in load:
            work[int(a.at)] += a.prompt * law.d + a.output * (law.b + law.c * (a.prompt + a.output / 2))
        half = _SMOOTH_SECONDS // 2
        self._work = []
        for t in range(seconds):
            around = work[max(0, t - half) : t + half]
            self._work.append(sum(around) / len(around))
        self._limits: Limits | None = None
        self._each = 0.0

    def __call__(self, look: Inputs) -> Action:
        if self._limits is None:
            self._limits = self._settings(look)
            found = capacity(self._load, self._hardware, self._limits, look.objectives)
            self._each = UTILISATION * found.work_per_second
        ahead = self._work[int(look.now) : int(look.now) + self._lead + 1]
        return Action(self._limits, max(1, math.ceil(max(ahead, default=0.0) / self._each - 1e-9)))

    def _settings(self, look: Inputs) -> Limits:
        law, bounds = self._hardware.law, look.bounds
        tau = _ITL_MARGIN * look.objectives.inter_token_latency
        percent = bounds.kv_cache_percent.max
        found = capacity(
            self._load,
            self._hardware,
            replace(look.limits, batch_size=bounds.batch_size.max, kv_cache_percent=percent),
            replace(look.objectives, inter_token_latency=tau),
        )
        batch = bounds.batch_size.clamp(math.floor(found.batch))
        busy = UTILISATION * found.work_per_second
        running = min(batch, law.a * busy / ((1 - busy) * found.slope))  # t = a / (1 - busy), and busy = B*g / t
        budget = look.limits.token_budget
        if law.d > 0:
            prefill = (tau - law.a - running * found.decode_slope) / law.d
            budget = max(batch + 64, min(8192, int(prefill + running)))
        return replace(look.limits, batch_size=batch, kv_cache_percent=percent, token_budget=budget)
