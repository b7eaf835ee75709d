"""What a tenant was served, in tokens."""

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Account:
    """Tokens computed for a tenant, prompt and output alike: what the prefix cache held and what was computed again
    after a preemption cost it nothing."""

    tenant: str
    weight: float
    tokens: int = 0
    """Charged since `base` was set. An integer, so that many steps at once come out as single ones do."""
    base: float = 0.0
    live: int = 0
    """Requests that wait or run."""

    @property
    def served(self) -> float:
        """Tokens per weight: the tenant's virtual time."""
        return self.base + self.tokens / self.weight

    def lift(self, served: float) -> None:
        """Credit is not saved up: who comes back begins no lower than `served`."""
        if self.served < served:
            self.base, self.tokens = served, 0

    def reweigh(self, weight: float) -> None:
        """Counts by another weight from now on."""
        if weight != self.weight:
            self.base, self.tokens, self.weight = self.served, 0, weight
