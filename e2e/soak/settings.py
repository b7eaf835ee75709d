"""The limits that the soak walks through: a KV cache too small for the batch, now larger, now smaller, and bad ones."""

import json
import os
import random
from pathlib import Path

MEMORY = 900_000_000
"""Bytes. One per cent of what is left of them beside the weights holds some 500 tokens."""
CLIENTS = 24

_LONGEST = 384
"""Tokens of a sequence. The prompts of all acts fit the shortest one."""
_FIRST = {
    "maxSequenceLength": _LONGEST,
    "batchSize": 8,
    "kvCachePercent": 2,
    "tokenBudget": 128,
    "maxQueuedRequests": 16,
    "maxQueuedTokens": 4000,
}
_BAD = ("{no json", '{"generation": -1}', "[" * 1000, "")


class LimitsFile:
    """A limits document that is replaced over and over, as the kubelet does it: by a rename."""

    def __init__(self, path: Path, draw: random.Random) -> None:
        self._path, self._draw = path, draw
        self._generation = 1
        self.refusals = 0
        """Documents written that the server must refuse."""
        self._replace(json.dumps({"generation": 1, "default": _FIRST}))

    def change(self) -> None:
        """Writes the next document: mostly one that can be run."""
        draw = self._draw
        if draw.random() < 0.15:
            self._replace(draw.choice(_BAD))
            self.refusals += 1
            return
        self._generation += 1
        limits = _FIRST | {
            "batchSize": draw.choice((1, 4, 8, 16)),
            "kvCachePercent": draw.choice((1, 1, 2, 3)),
            "tokenBudget": draw.choice((32, 128, 512)),
            "maxSequenceLength": draw.choice((300, _LONGEST)),
        }
        objectives = {"timeToFirstTokenMs": 2000, "interTokenLatencyMs": draw.choice((50, 200))}
        law = {"a": 0.01, "b": 0.002, "c": 1e-6, "d": 0.002}
        pace = draw.choice(({}, {"objectives": objectives, "stepLaw": law}))
        self._replace(json.dumps({"generation": self._generation, "default": limits, **pace}))

    def rest(self) -> int:
        """Writes the first limits again; returns their generation."""
        self._generation += 1
        self._replace(json.dumps({"generation": self._generation, "default": _FIRST}))
        return self._generation

    def _replace(self, text: str) -> None:
        new = self._path.with_suffix(".new")
        new.write_text(text)
        os.replace(new, self._path)
