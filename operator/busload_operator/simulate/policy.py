"""What decides during a simulation: sees what an operator would see, says which limits and replicas should be in force.

The tuner is the operator's own core; the rules it is compared with are in `baselines.py` and `clairvoyant.py`.
"""

from dataclasses import dataclass, replace
from typing import Protocol

from busload_operator.tuning import Decision, Inputs, Mode, Result, Scaling, State, Trial, step
from busload_runtime.contract import Limits


@dataclass(frozen=True, slots=True)
class Action:
    """What should be in force from now on."""

    limits: Limits
    replicas: int
    trial: Trial | None = None


class Policy(Protocol):
    def __call__(self, look: Inputs) -> Action: ...


class Static:
    """A fixed number of replicas, settings as they are."""

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas

    def __call__(self, look: Inputs) -> Action:
        return Action(look.limits, self._replicas)


class Tuner:
    """The operator's tuning core, called as the operator calls it. Keeps its decisions with their outcomes."""

    def __init__(self, mode: Mode = Mode.AUTO, scaling: Scaling = Scaling.OBSERVED) -> None:
        self._mode, self._scaling = mode, scaling
        self._state = State.initial()
        self._decisions: dict[int, Decision] = {}
        self.result: Result | None = None
        """Of the last step."""

    @property
    def decisions(self) -> list[Decision]:
        """As they stand now."""
        return [self._decisions[key] for key in sorted(self._decisions)]

    def __call__(self, look: Inputs) -> Action:
        inputs = replace(look, mode=self._mode, scaling=self._scaling)
        self._state, result = step(self._state, inputs)
        self.result = result
        if result.decision is not None:
            self._decisions[result.decision.id] = result.decision
        for closed in result.closed:
            self._decisions[closed.id] = closed
        replicas = result.replicas if self._scaling is Scaling.OBSERVED else look.replicas
        return Action(result.limits, replicas, result.trial)
