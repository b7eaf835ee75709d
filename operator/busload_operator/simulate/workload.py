"""Requests over time: what arrives when, with how many tokens. Synthetic loads; traces are read in `traces.py`."""

import math
import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from busload_operator.simulate.hardware import SetupError

PREFIX_TOKENS = 512
"""Tokens per prefix id (Mooncake's `hash_ids`)."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request. `at` in seconds from the start of the load, lengths in tokens."""

    at: float
    prompt: int
    output: int
    prefix: tuple[int, ...] = ()
    """Ids of the leading blocks of `PREFIX_TOKENS` tokens; equal leading ids are equal prompts so far. Empty: a prompt
    that shares nothing."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Where synthetic requests take their lengths from: drawn with replacement from pairs (prompt, output)."""

    pairs: tuple[tuple[int, int], ...]

    def draw(self, source: random.Random) -> tuple[int, int]:
        return self.pairs[source.randrange(len(self.pairs))]

    @classmethod
    def lognormal(cls, prompt: float, output: float, sigma: float = 0.8, longest: int = 8192) -> "Lengths":
        """Lognormal lengths with these medians, independent of each other, cut at `longest`. Raises `SetupError`."""
        if prompt < 1 or output < 1 or sigma < 0:
            raise SetupError(
                f"lengths: medians {prompt} and {output} must be at least 1 token, sigma {sigma} at least 0"
            )
        source = random.Random(7)

        def one(median: float) -> int:
            return max(1, min(longest, round(source.lognormvariate(math.log(median), sigma))))

        return cls(tuple((one(prompt), one(output)) for _ in range(4096)))


def flat(rate: float, seconds: float, lengths: Lengths, seed: int, cv: float = 1.0) -> list[Arrival]:
    """A constant rate in requests per second; gaps are gamma distributed with this coefficient of variation
    (1: Poisson)."""
    _positive(rate=rate, seconds=seconds, cv=cv)
    return by_rate([0.0, seconds], [rate], lengths, seed, cv)


def diurnal(
    low: float, high: float, seconds: float, lengths: Lengths, seed: int, bursts: int = 4, cv: float = 1.2
) -> list[Arrival]:
    """A day in `seconds`: a cosine from `low` up to `high` requests per second and back, with bursts of 60% more for
    about a minute each."""
    _positive(low=low, high=high, seconds=seconds, cv=cv)
    source = random.Random(f"bursts/{seed}")
    centres = [source.uniform(0.1 * seconds, 0.9 * seconds) for _ in range(bursts)]

    def rate(t: float) -> float:
        base = low + (high - low) * 0.5 * (1 - math.cos(2 * math.pi * t / seconds))
        return base * (1 + sum(0.6 * math.exp(-0.5 * ((t - centre) / 25.0) ** 2) for centre in centres))

    edges = [float(t) for t in range(int(seconds))] + [seconds]
    return by_rate(edges, [rate(0.5 * (t + u)) for t, u in pairwise(edges)], lengths, seed, cv)


def by_rate(
    edges: Sequence[float], rates: Sequence[float], lengths: Lengths, seed: int, cv: float = 1.0
) -> list[Arrival]:
    """Arrivals of a piecewise constant rate: `rates[i]` requests per second from `edges[i]` to `edges[i+1]`.

    Gamma gaps of mean 1 and coefficient of variation `cv`, drawn in operational time (the integral of the rate) and
    mapped back, so that the rate is met exactly in the mean.
    """
    if len(edges) != len(rates) + 1 or min(rates) < 0 or any(u <= t for t, u in pairwise(edges)):
        raise SetupError("rates: need rising edges, one more than rates, and rates of 0 or more")
    source = random.Random(f"arrivals/{seed}")
    steps = [rate * (u - t) for rate, t, u in zip(rates, edges, edges[1:], strict=False)]
    passed = [0.0, *accumulate(steps)]
    shape = 1 / cv**2
    arrivals, clock = [], source.gammavariate(shape, 1 / shape)
    while clock < passed[-1]:
        piece = bisect_right(passed, clock) - 1
        at = edges[piece] + (clock - passed[piece]) / rates[piece]
        arrivals.append(Arrival(at, *lengths.draw(source)))
        clock += source.gammavariate(shape, 1 / shape)
    return arrivals


def repeat(arrivals: Sequence[Arrival], copies: int, spread: float, seed: int) -> list[Arrival]:
    """Each request `copies` times, each later by up to `spread` seconds: a trace of a larger service of the same shape.

    Copies of a prompt with a prefix keep its ids: they are the same users, not new ones.
    """
    if copies < 1 or spread < 0:
        raise SetupError(f"copies: {copies} must be at least 1, their spread {spread} at least 0 seconds")
    if copies == 1 and spread == 0:
        return list(arrivals)
    source = random.Random(f"copies/{seed}")
    moved = [
        Arrival(arrival.at + source.uniform(0, spread), arrival.prompt, arrival.output, arrival.prefix)
        for arrival in arrivals
        for _ in range(copies)
    ]
    return sorted(moved, key=lambda arrival: arrival.at)


def cut(arrivals: Sequence[Arrival], speed: float, seconds: float | None) -> list[Arrival]:
    """Times divided by `speed`, then only the first `seconds`. Starts at the first arrival."""
    _positive(speed=speed)
    if not arrivals:
        return []
    start = arrivals[0].at
    moved = [Arrival((a.at - start) / speed, a.prompt, a.output, a.prefix) for a in arrivals]
    return moved if seconds is None else [a for a in moved if a.at <= seconds]


def prompt_tokens(arrival: Arrival, request_id: int) -> list[int]:
    """Token ids with equal leading blocks for equal prefix ids; without ids equal to no other request's."""
    own = -1 - request_id
    tokens: list[int] = []
    for block in arrival.prefix:
        tokens += [block] * min(PREFIX_TOKENS, arrival.prompt - len(tokens))
    return tokens + [own] * (arrival.prompt - len(tokens))


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not (math.isfinite(value) and value > 0):
            raise SetupError(f"{name}: {value} must be a number above 0")
