"""The step law that the pods of a service are told, which follows the fitted one from a distance."""

from collections.abc import Callable
from dataclasses import astuple

from busload_operator.tuning.types import Law
from busload_runtime.contract import StepLaw

CHANGE_SECONDS = 60.0
"""Least time between two changes. Each is a write of the ConfigMap, which every pod then reads again."""
TOLERANCE = 0.10
"""What a coefficient may be off before it is worth a change; a fit moves by a few percent in every round."""


class ToldLaw:
    """`law` changes at most once in `CHANGE_SECONDS`, and only for more than `TOLERANCE`. It stays when the fit becomes
    unusable: pods plan better by an old law than by none."""

    def __init__(self, law: StepLaw | None, clock: Callable[[], float]):
        self.law = law
        self._clock, self._changed_at = clock, clock()

    def follow(self, fitted: Law | None) -> None:
        """Takes in the law of one round of observation."""
        if fitted is None or not fitted.usable:
            return
        law = StepLaw(*(float(f"{value:.2g}") for value in (fitted.a, fitted.b, fitted.c, fitted.d)))
        early = self._clock() - self._changed_at < CHANGE_SECONDS
        if self.law is not None and (early or not _differs(self.law, law)):
            return
        self.law, self._changed_at = law, self._clock()


def _differs(old: StepLaw, new: StepLaw) -> bool:
    return any(abs(a - b) > TOLERANCE * max(a, b) for a, b in zip(astuple(old), astuple(new), strict=True))
