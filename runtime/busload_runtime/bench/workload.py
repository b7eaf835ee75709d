"""From options to requests: which prompts, how long, and when."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from busload_runtime.bench.client import Request
from busload_runtime.bench.loops import poisson
from busload_runtime.bench.options import BenchOptions
from busload_runtime.bench.prompts import PromptMaker
from busload_runtime.bench.trace import Trace, read_trace

_DEFAULT_CONCURRENCY = (1, 8, 32)
_DEFAULT_SECONDS = 60.0


@dataclass(frozen=True)
class Plan:
    """One level before it ran: exactly one of `concurrency`, `rate` and `replay` says when requests are sent."""

    name: str
    concurrency: int | None = None
    rate: float | None = None
    replay: bool = False
    requests: int | None = None
    seconds: float | None = None


class Workload:
    """Draws the requests of all levels from one seeded stream, so no level repeats the prompts of another."""

    def __init__(self, options: BenchOptions) -> None:
        """Reads the trace if there is one. Raises ValueError."""
        self._options = options
        self._rng = random.Random(options.seed)
        self._prompts = PromptMaker(
            seed=options.seed,
            words=options.words,
            first_id=options.first_id,
            last_id=options.last_id,
            prefix_tokens=options.prefix_tokens,
            prefixes=options.prefixes,
        )
        self.trace: Trace | None = None
        if options.trace is not None:
            self.trace = read_trace(options.trace, options.limit, options.longest, options.seed)
        paced = bool(options.concurrencies or options.rates)
        if self.trace is None or self.trace.timed:
            return
        if not paced:
            raise ValueError(f"--trace {options.trace} has lengths but no times; give --concurrency or --rate too")
        if options.speed != 1:
            raise ValueError(f"--speed has no meaning: --trace {options.trace} has no times")

    def notes(self) -> list[str]:
        """What a reader of the figures has to know about the trace."""
        if self.trace is None:
            return []
        notes = [f"{self.trace.left_out} rows of the trace left out: no tokens, or more than --longest"]
        return (
            notes * bool(self.trace.left_out)
            + ["the trace's times are coarse: arrivals are spread at random until the next time"] * self.trace.spread
        )

    def plans(self) -> list[Plan]:
        """The levels in order. How many requests each has is `--requests`, else what its kind of load needs."""
        options = self._options
        if options.rates:
            seconds = options.seconds or (None if options.requests else _DEFAULT_SECONDS)
            return [
                Plan(f"rate {rate:g}/s", rate=rate, requests=options.requests, seconds=seconds)
                for rate in options.rates
            ]
        if self.trace is not None and not options.concurrencies:
            rows = min(len(self.trace.rows), options.requests or len(self.trace.rows))
            return [Plan(f"trace x{options.speed:g}", replay=True, requests=rows, seconds=options.seconds)]
        plans = []
        for concurrency in options.concurrencies or _DEFAULT_CONCURRENCY:
            count = options.requests or (None if options.seconds else max(8, 4 * concurrency))
            plans.append(Plan(f"concurrency {concurrency}", concurrency, requests=count, seconds=options.seconds))
        return plans

    def requests(self, count: int | None) -> Iterator[Request]:
        """`count` requests (None: endless). With a trace, lengths are those of its rows, over and over."""
        return islice(self._endless(), count)

    def arrivals(self, plan: Plan) -> Iterator[tuple[float, Request]]:
        """(seconds since the start, request) of an open loop."""
        if plan.rate is not None:
            return zip(poisson(plan.rate, plan.seconds, plan.requests, self._rng), self._endless(), strict=False)
        assert self.trace is not None
        times = (row.at / self._options.speed for row in self.trace.rows[: plan.requests])
        pairs = zip(times, self._endless(), strict=False)
        return (pair for pair in pairs if plan.seconds is None or pair[0] < plan.seconds)

    def _endless(self) -> Iterator[Request]:
        while True:
            if self.trace is None:
                wanted = self._options.input_lengths.draw(self._rng), self._options.output_lengths.draw(self._rng)
                yield self._request(*wanted)
                continue
            for row in self.trace.rows:
                yield self._request(row.input_tokens, row.output_tokens, row.hash_ids)

    def _request(self, tokens: int, output: int, hash_ids: tuple[int, ...] = ()) -> Request:
        prompt, length = self._prompts.make(self._rng, tokens, hash_ids)
        return Request(prompt, length, output)
