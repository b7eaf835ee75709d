"""What a service's tuner remembers over restarts: when it is worth a write, and how it is read back."""

import logging
from collections.abc import Callable
from dataclasses import replace

from busload_operator.control.apply import wrote
from busload_operator.control.kinds import Object
from busload_operator.control.logs import about
from busload_operator.control.service import Service
from busload_operator.resources.learned_config_map import LEARNED_KEY
from busload_operator.tuning.learned import Identity, Learned, Memory, UnusableMemoryError, learn
from busload_operator.tuning.state import State

log = logging.getLogger(__name__)
WRITE_SECONDS = 300.0
"""Least time between two writes of mere progress of the law; what was decided or found safe is written at once."""


class Remembered:
    """`memory` is what should be stored; it changes only when that is worth a write."""

    def __init__(self, memory: Memory, identity: Identity, clock: Callable[[], float]):
        self.memory, self.identity = memory, identity
        self._clock, self._changed_at = clock, clock()

    @property
    def learned(self) -> Learned:
        """Of the service as its spec is now."""
        return self.memory.of(self.identity) or Learned()

    def keep_length(self, max_sequence_length: int | None) -> None:
        """What a decision has made the longest sequence, at once; None: the bound, whatever it becomes."""
        learned = replace(self.learned, max_sequence_length=max_sequence_length)
        self.memory, self._changed_at = self.memory.with_(self.identity, learned), self._clock()

    def update(self, state: State, kv_cache_percent: int, news: bool) -> None:
        """After a step. `news`: a decision's outcome became known in it."""
        known = self.learned
        learned = learn(state, kv_cache_percent, known)
        if learned == known:
            return
        urgent = news or learned.kv_cache_percent != known.kv_cache_percent
        if urgent or self._clock() - self._changed_at >= WRITE_SECONDS:
            self.memory, self._changed_at = self.memory.with_(self.identity, learned), self._clock()


def identity(service: Service) -> Identity:
    """Another model, precision or size of pod learns from the beginning."""
    spec = service.parsed.spec
    source, resources = spec.model.source, spec.resources
    claim = source.persistent_volume_claim
    model = f"claim:{claim.claim_name}/{claim.path}" if claim else f"bundled:{source.bundled}"
    cpu = f"{resources.requests.cpu} CPU" + (f" to {resources.limits.cpu}" if resources.limits.cpu else "")
    size = f"{cpu}, {resources.limits.memory}"
    if resources.limits.gpus is not None:
        size += f", {resources.limits.gpus} GPU" + (f" of {resources.gpu_memory}" if resources.gpu_memory else "")
    return Identity(model, spec.model.weight_precision, size)


def stored(service: Service, config_map: Object | None) -> Memory:
    """What the child holds; nothing, and a line in the log, when it is not as this operator writes it."""
    text = ((config_map or {}).get("data") or {}).get(LEARNED_KEY)
    if config_map is None or text is None:
        return Memory()
    try:
        if not wrote(config_map, {"data": {LEARNED_KEY: text}}):
            raise UnusableMemoryError("somebody else has changed it")
        return Memory.from_json(text)
    except UnusableMemoryError as error:
        log.warning("what was learned is not usable and is learned anew: %s", error, extra=about(*service.key))
        return Memory()
