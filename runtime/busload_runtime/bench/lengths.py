"""How many tokens a request has: fixed, uniform or lognormal."""

import math
import random
from dataclasses import dataclass

_ALLOWED = "a number (128), a range drawn uniformly (64:256), or lognormal:MEDIAN:SIGMA[:MAX] (lognormal:200:0.8:2000)"


@dataclass(frozen=True)
class Lengths:
    """A distribution of lengths in tokens. `sigma` is of the logarithm; without one the draw is uniform."""

    low: int
    high: int
    median: float = 0.0
    sigma: float = 0.0

    def draw(self, rng: random.Random) -> int:
        if self.median:
            return min(self.high, max(self.low, round(rng.lognormvariate(math.log(self.median), self.sigma))))
        return rng.randint(self.low, self.high)


def parse_lengths(text: str, flag: str) -> Lengths:
    """The lengths that a flag's value asks for. Raises ValueError that names the flag."""
    kind, *rest = text.split(":")
    try:
        if kind == "lognormal" and len(rest) in (2, 3):
            median, sigma = float(rest[0]), float(rest[1])
            high = int(rest[2]) if len(rest) == 3 else 10**6
            if median >= 1 and 0 < sigma <= 5 and high >= 1:
                return Lengths(1, high, median, sigma)
        elif len(rest) <= 1:
            low, high = int(kind), int(rest[-1] if rest else kind)
            if 1 <= low <= high:
                return Lengths(low, high)
    except ValueError:
        pass
    raise ValueError(f"{flag} {text!r} is not a length in tokens, 1 or more: give {_ALLOWED}")
