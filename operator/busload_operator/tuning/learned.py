"""What outlives the operator's process: learned of one model at one precision on one size of pod, and of no other.

Pure: JSON in, JSON out. What is kept is little and slow: the step law's sums, the mean output length, the time a pod
takes to start, the KV fraction under which the service last ran without trouble, a sequence length that was lowered,
and what was learned of planning (how full a replica may be, how wrong forecasts are). Windows, streaks and changes on
trial belong to the clock of one process and are lost with it.
"""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median

from busload_operator.tuning.codec import CodecError, decode, dumps, encode
from busload_operator.tuning.fit import Fit
from busload_operator.tuning.headroom import PRIOR_SIZE, Errors, Kappa
from busload_operator.tuning.sizing import Sizing
from busload_operator.tuning.state import State, Usage

VERSION = 1
MAX_ENTRIES = 4
"""Models and sizes of pod that are remembered of a service: the newest."""
SAFE_SECONDS = 240.0
"""How long a KV fraction must have been in force, seen without a gap, to be called safe."""
_ONE_MISSED = 1.6
"""Gaps of more than so many usual ones hold a round that a pod did not answer."""


class UnusableMemoryError(ValueError):
    """A memory that cannot be used; the message names the field, its value and what is allowed."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What learned values are true of."""

    model: str
    precision: str
    hardware: str


@dataclass(frozen=True, slots=True)
class Learned:
    """None: not known."""

    fit: Fit = field(default_factory=Fit)
    output_length: float | None = None
    startup_seconds: float | None = None
    kv_cache_percent: int | None = None
    """The last that was safe."""
    max_sequence_length: int | None = None
    """What a decision has made it; None: none did, or it is what bounds and memory allow."""
    kappa: float | None = None
    """The learned share of a replica's capacity that may be planned, and the lowest that was too much."""
    kappa_bad: float | None = None
    quantile: float | None = None
    """Which of the errors of forecasts is planned for."""
    errors: tuple[float, ...] = ()
    """Quantiles of these errors (what arrived over what was expected), evenly spaced; empty: too few were seen."""


@dataclass(frozen=True, slots=True)
class Entry:
    identity: Identity
    learned: Learned


@dataclass(frozen=True, slots=True)
class Memory:
    """Entries with the newest first, one for each identity."""

    entries: tuple[Entry, ...] = ()

    def of(self, identity: Identity) -> Learned | None:
        return next((entry.learned for entry in self.entries if entry.identity == identity), None)

    def with_(self, identity: Identity, learned: Learned) -> "Memory":
        others = tuple(entry for entry in self.entries if entry.identity != identity)
        return Memory((Entry(identity, learned), *others)[:MAX_ENTRIES])

    def to_json(self) -> str:
        """The same text for the same memory."""
        return dumps({"version": VERSION, **encode(self)})

    @classmethod
    def from_json(cls, text: str) -> "Memory":
        """Raises `UnusableMemoryError` for anything that `to_json` does not write."""
        try:
            body = json.loads(text)
            if not isinstance(body, dict) or body.get("version") != VERSION:
                raise CodecError(f"it is {text!r:.80}; must be an object of version {VERSION}")
            memory = decode(cls, {name: value for name, value in body.items() if name != "version"}, "memory")
        except (ValueError, RecursionError) as error:  # CodecError is one
            raise UnusableMemoryError(str(error)) from None
        if len({entry.identity for entry in memory.entries}) < len(memory.entries) or len(memory.entries) > MAX_ENTRIES:
            raise UnusableMemoryError(f"memory.entries must be at most {MAX_ENTRIES}, each of another identity")
        for index, entry in enumerate(memory.entries):
            _check(entry.learned, f"memory.entries[{index}].learned")
        return memory


def learn(state: State, kv_cache_percent: int, known: Learned) -> Learned:
    """What `state` adds to what was known before; `kv_cache_percent` is the one in force."""
    safe = kv_cache_percent if _has_been_calm(state.usage) and state.pending is None else known.kv_cache_percent
    kappa, errors = state.sizing.kappa, state.sizing.errors
    return replace(
        known,
        fit=state.fit,
        output_length=state.output_length,
        startup_seconds=state.startup_seconds,
        kv_cache_percent=safe,
        kappa=kappa.value if kappa.changed_at > -math.inf else known.kappa,
        kappa_bad=kappa.bad if kappa.changed_at > -math.inf else known.kappa_bad,
        quantile=errors.quantile if errors.quantile_at > -math.inf else known.quantile,
        errors=errors.sketch() if errors.seen else known.errors,
    )


def recall(learned: Learned, next_id: int) -> State:
    """The state of a process that has seen nothing itself yet but remembers."""
    kappa, errors = Kappa(), Errors()
    if learned.kappa is not None and learned.kappa_bad is not None:
        kappa = replace(kappa, value=learned.kappa, bad=learned.kappa_bad)
    if learned.quantile is not None:
        errors = replace(errors, quantile=learned.quantile)
    if learned.errors:
        errors = replace(errors, prior=learned.errors)
    return replace(
        State.initial(next_id),
        fit=learned.fit,
        output_length=learned.output_length,
        startup_seconds=learned.startup_seconds,
        sizing=Sizing(errors=errors, kappa=kappa),
    )


def _has_been_calm(usage: tuple[Usage, ...]) -> bool:
    """Whether every ready pod answered in every round of the last minutes, under the same settings: `usage` begins
    anew with each change. A pod that was killed for its memory misses a round at least."""
    if len(usage) < 3 or usage[-1].at - usage[0].at < SAFE_SECONDS:
        return False
    gaps = [later.at - earlier.at for earlier, later in pairwise(usage)]
    return max(gaps) <= _ONE_MISSED * median(gaps)


def _check(learned: Learned, where: str) -> None:
    fit = learned.fit
    sums: Iterable[float] = (*(value for row in fit.gram for value in row), *fit.moment, fit.weight)
    bins = [value for item in fit.bins for value in (item.low, item.high)]
    times = [value for value in (learned.output_length, learned.startup_seconds) if value is not None]
    if not all(math.isfinite(value) and value >= 0 for value in (*sums, *bins, *times)):
        raise UnusableMemoryError(f"{where}: every number must be finite and not negative")
    if len(fit.gram) != 4 or any(len(row) != 4 for row in fit.gram) or len(fit.moment) != 4:
        raise UnusableMemoryError(f"{where}.fit: gram must be 4 x 4 and moment 4 numbers")
    if any(fit.gram[i][j] != fit.gram[j][i] for i in range(4) for j in range(i)):
        raise UnusableMemoryError(f"{where}.fit.gram must be symmetric")
    if (fit.samples > 0) != bool(fit.bins) or fit.samples < 0 or any(not 0 < b.low <= b.high for b in fit.bins):
        raise UnusableMemoryError(f"{where}.fit: samples {fit.samples} do not agree with its {len(fit.bins)} bins")
    shares = [share for share in (learned.kappa, learned.kappa_bad, learned.quantile) if share is not None]
    if not all(0 < share <= 2 for share in shares):
        raise UnusableMemoryError(f"{where}: kappa, kappa_bad and quantile must be above 0 and at most 2")
    if learned.errors and (len(learned.errors) != PRIOR_SIZE or not all(0 <= e < math.inf for e in learned.errors)):
        raise UnusableMemoryError(f"{where}.errors must be {PRIOR_SIZE} finite numbers of 0 or more, or none")
    if learned.max_sequence_length is not None and learned.max_sequence_length < 1:
        raise UnusableMemoryError(f"{where}.max_sequence_length is {learned.max_sequence_length}; must be at least 1")
    if learned.kv_cache_percent is not None and not 1 <= learned.kv_cache_percent <= 100:
        raise UnusableMemoryError(f"{where}.kv_cache_percent is {learned.kv_cache_percent}; must be from 1 to 100")
