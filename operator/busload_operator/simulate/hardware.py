"""What a simulated pod runs on: its step law, the size of its KV cache, and how steps scatter."""

import math
import random
from dataclasses import asdict, dataclass

from busload_runtime.contract import Limits, StepLaw, default_token_budget


class SetupError(ValueError):
    """A simulation that cannot be run as described; the message names the field, its value and what is allowed."""


def parse_law(text: str) -> StepLaw:
    """`a=0.0076,b=0.00017,c=0,d=0.00005`: seconds; what is left out is 0. Raises `SetupError`."""
    values = dict.fromkeys("abcd", 0.0)
    for part in text.split(","):
        name, equals, number = part.strip().partition("=")
        try:
            if name not in values or not equals:
                raise ValueError
            values[name] = float(number)
        except ValueError:
            raise SetupError(f"step law: {part!r} is not one of a=, b=, c=, d= with seconds, as in a=0.0076") from None
    for name, value in values.items():
        if not (math.isfinite(value) and value >= 0):
            raise SetupError(f"step law: {name} is {value}; seconds of 0 or more are allowed")
    law = StepLaw(**values)
    if law.a + law.b <= 0 or law.a + law.d <= 0:
        raise SetupError("step law: a decode or a prefill would take no time; give a, or both b and d, above 0")
    return law


@dataclass(frozen=True, slots=True)
class Hardware:
    """One pod's machine and model."""

    about: str
    law: StepLaw
    kv_tokens: int
    """Tokens that the KV cache would hold at `kvCachePercent` 100."""
    limits: Limits
    """What a service starts with."""
    time_to_first_token: float
    inter_token_latency: float
    """Objectives that suit it, in seconds."""
    block_size: int = 32
    noise: float = 0.15
    """Standard deviation of a step's time, as a share of it."""
    drift: float = 0.04
    """How far a pod is slower or faster than the law for minutes (sine over ten minutes, its phase by pod)."""
    front_end: float = 0.0
    """Seconds of a request outside the engine until its client has the first token: HTTP, tokenizer, both ways. Later
    tokens are as late, so their gaps are the engine's."""

    def __post_init__(self) -> None:
        law = self.law
        for name, value in asdict(law).items():
            if not (math.isfinite(value) and value >= 0):
                raise SetupError(f"step law: {name} is {value}; seconds of 0 or more are allowed")
        if law.a + law.b <= 0 or law.a + law.d <= 0:
            raise SetupError("step law: a decode or a prefill would take no time; give a, or both b and d, above 0")

    def num_blocks(self, limits: Limits) -> int:
        """KV blocks under these limits. Raises `SetupError` when one sequence of full length does not fit."""
        blocks = self.kv_tokens * limits.kv_cache_percent // (100 * self.block_size)
        if blocks * self.block_size < limits.max_sequence_length:
            raise SetupError(
                f"kvCachePercent {limits.kv_cache_percent} of {self.kv_tokens} tokens holds "
                f"{blocks * self.block_size}, less than one sequence of maxSequenceLength "
                f"{limits.max_sequence_length}: raise kvCachePercent or the KV tokens, or lower maxSequenceLength"
            )
        return blocks


def _limits(length: int, batch: int, percent: int, budget: int) -> Limits:
    return Limits(
        max_sequence_length=length,
        batch_size=batch,
        kv_cache_percent=percent,
        token_budget=budget,
        max_queued_requests=100_000,
        max_queued_tokens=2_000_000_000,
    )


HARDWARE: dict[str, Hardware] = {
    "roomy": Hardware(
        about="8B model on a card with room for 500,000 KV tokens: the inter-token objective bounds the batch",
        law=StepLaw(a=7.61e-3, b=0.1676e-3, c=0.0, d=0.0476e-3),
        kv_tokens=500_000,
        limits=_limits(16_384, 256, 90, 2048),
        time_to_first_token=1.0,
        inter_token_latency=0.045,
    ),
    "tight": Hardware(
        about="8B model on a 24 GB card: 41,408 KV tokens bound the batch (law fitted to a measured vLLM run)",
        law=StepLaw(a=10.436e-3, b=0.0, c=0.39e-6, d=0.0876e-3),
        kv_tokens=41_408,
        limits=_limits(16_384, 256, 90, 2048),
        time_to_first_token=2.0,
        inter_token_latency=0.080,
    ),
    "cpu": Hardware(
        about="135M model on two CPU cores: each request in the batch costs",
        law=StepLaw(a=3e-3, b=0.35e-3, c=1.5e-6, d=0.25e-3),
        kv_tokens=60_000,
        limits=_limits(8192, 64, 90, default_token_budget(64)),
        time_to_first_token=2.0,
        inter_token_latency=0.080,
    ),
}


class Noise:
    """Factors on step times, the same for a seed, and looked up by step: step n of a pod always takes the same one,
    however many steps are computed at once."""

    _PERIOD = 4096

    def __init__(self, seed: int, pod: str, share: float, drift: float) -> None:
        draw = random.Random(f"{seed}/{pod}")
        self._drift = drift
        self._phase = draw.uniform(0, 2 * math.pi)
        self._factors = [max(0.5, draw.gauss(1.0, share)) for _ in range(self._PERIOD)] if share > 0 else []

    def factor(self, step: int, now: float) -> float:
        factor = self._factors[step % self._PERIOD] if self._factors else 1.0
        if self._drift > 0:
            factor *= 1 + self._drift * math.sin(now / 97 + self._phase)
        return factor
