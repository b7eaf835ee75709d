"""A `busload serve` whose engine tells, while it works, how fast its machine is: between its steps it runs one that is
always the same.

    BUSLOAD_REFERENCE_FILE=FILE python -m e2e.bench.reference_steps serve --executor=cpu ...

A shared machine is a quarter faster in one ten seconds than in the next. How long a load's own steps took cannot say so
where the law of steps is what is to be judged. FILE gets one line for each reference step: when it ended (seconds of
the monotonic clock) and what it took. It runs after every `EVERY` steps, in the engine's thread, on blocks of the KV
cache that the scheduler does not know of, and is part of the time of the step that it precedes.

`python -m e2e.bench.reference_steps engine ...` is its engine process.
"""

import os
import statistics
import sys
import time
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from busload_operator.cli import main as busload
from busload_runtime.contract import Limits, Pace
from busload_runtime.engine import process
from busload_runtime.engine.plan import Chunk, Plan, Sampled, SamplingParams
from busload_runtime.executors.contract import Executor
from busload_runtime.executors.cpu import CpuExecutor
from busload_runtime.model.load import load_weights
from busload_runtime.server import engine_process
from busload_runtime.server.options import ServeOptions

FILE = "BUSLOAD_REFERENCE_FILE"
MODULE = "e2e.bench.reference_steps"
EVERY = 15
"""Steps; the reference adds a fifteenth of a small step to each in the mean, which the law has in its `a`."""
_DECODES, _CONTEXT = 4, 128
"""Requests that decode, with so many tokens before: 5 to 8 ms on a core for a model of 135M."""
_GREEDY = SamplingParams(temperature=0.0)


class ReferenceExecutor(CpuExecutor):
    """The CPU executor with a step of its own in between."""

    def __init__(self, source: str, file: Path) -> None:
        super().__init__(load_weights(source))
        self._file = file.open("a", buffering=1)
        self._own_blocks = -(-_CONTEXT // self.block_size) + _DECODES
        self._until_next = EVERY
        self._first = 0

    def reserve(self, max_blocks: int) -> None:
        super().reserve(max_blocks + self._own_blocks)

    def resize(self, num_blocks: int) -> None:
        super().resize(num_blocks + self._own_blocks)
        self._first = num_blocks
        shared = range(num_blocks, num_blocks + -(-_CONTEXT // self.block_size))
        super().run(Plan((Chunk(0, (0,) * _CONTEXT, 0, tuple(shared), _GREEDY),)))

    def run(self, plan: Plan) -> Sequence[Sampled]:
        self._until_next -= 1
        if self._until_next < 0:
            self._until_next = EVERY - 1
            began = time.monotonic()
            super().run(self._reference())
            ended = time.monotonic()
            self._file.write(f"{ended:.6f} {ended - began:.6f}\n")
        return super().run(plan)

    def _reference(self) -> Plan:
        shared = -(-_CONTEXT // self.block_size)
        written = self._first + shared
        return Plan(
            tuple(
                Chunk(number, (0,), _CONTEXT, (*range(self._first, written), written + number), _GREEDY)
                for number in range(_DECODES)
            )
        )


@dataclass(frozen=True)
class Reference:
    """What reference steps took, in the order of time."""

    ended: Sequence[float]
    seconds: Sequence[float]

    @classmethod
    def read(cls, file: Path) -> "Reference":
        pairs = [tuple(map(float, line.split())) for line in file.read_text().splitlines()]
        return cls([end for end, _ in pairs], [seconds for _, seconds in pairs])

    @cached_property
    def typical(self) -> float:
        """Seconds of a reference step at the speed that is called 1."""
        return statistics.mean(self.seconds)

    def pace(self, start: float, end: float) -> float:
        """Seconds for each that the same step takes at speed 1, from `start` to `end`; where no step ended in there, by
        the one before it."""
        first, behind = bisect_left(self.ended, start), bisect_right(self.ended, end)
        found = self.seconds[first if first < behind else max(0, first - 1) : max(1, behind)]
        return statistics.mean(found) / self.typical


def _load(name: str, source: str) -> Executor:
    assert name == "cpu", f"reference steps are for the executor cpu, not {name}"
    return ReferenceExecutor(source, Path(os.environ[FILE]))


def main() -> int:
    what, *arguments = sys.argv[1:]
    if what == "engine":
        return process.main(arguments, _load)
    command = engine_process._command

    def with_reference(options: ServeOptions, limits: Limits, pace: Pace, descriptor: int) -> list[str]:
        words = command(options, limits, pace, descriptor)
        at = words.index(process.__name__)
        return [*words[:at], MODULE, "engine", *words[at + 1 :]]

    engine_process._command = with_reference
    sys.argv[1:] = [what, *arguments]
    busload()
    return 0


if __name__ == "__main__":
    sys.exit(main())
