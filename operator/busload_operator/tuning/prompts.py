"""The token budget: how many prompt tokens a step may compute beside the tokens of running requests.

A larger one computes prompts faster, as more of them share what every step costs anyway, and makes single steps longer.
While prompts are what requests wait for, each of their tokens brings its share of decodes along (D/P, by the lengths
seen), so a step with C prompt tokens takes `t(C) = a + C*e` with `e = d + (b + c*h)*D/P` by the law, and at most
`C / t(C)` prompt tokens are computed a second.
"""

from dataclasses import dataclass, replace

from busload_operator.tuning import words
from busload_operator.tuning.settings import (
    ITL_MARGIN,
    MAX_FACTOR,
    MIN_GAIN,
    PREPARE_SECONDS,
    PREPARE_WINDOWS,
    Candidate,
    Situation,
    expected,
)
from busload_operator.tuning.state import Phase
from busload_operator.tuning.types import Bottleneck, Knob, Law, Mode, Prediction, Reason

PRESSED = 0.5
"""Share of what the token budget lets through, in prompt tokens, from which prompts are taken to wait for it."""
WINDOWS = 3
"""In which they must."""


@dataclass(frozen=True, slots=True)
class _Steps:
    """Of a pod that prompts keep busy."""

    fixed: float
    """Seconds of every step: a."""
    each: float
    """Seconds that a prompt token adds with its decodes: e."""
    decodes: float
    """D/P, tokens that the budget counts, too."""

    def rate(self, budget: float) -> float:
        """Prompt tokens a second when every step uses up the budget."""
        tokens = budget / (1 + self.decodes)
        return tokens / (self.fixed + tokens * self.each)

    def budget_within(self, seconds: float) -> float:
        """The budget of which a step takes so long."""
        return (1 + self.decodes) * max(0.0, seconds - self.fixed) / self.each


def raise_token_budget(s: Situation) -> Candidate | str:
    """A larger token budget for prompts that wait for it, or why not."""
    if s.diagnosis.bottleneck is not Bottleneck.PREFILL_BOUND:
        return "the token budget is not what requests wait for"
    found = _larger(s)
    if isinstance(found, str):
        return found
    after, prediction, used = found
    now = s.inputs.limits.token_budget
    message = (
        f"tokenBudget {now} -> {after}: {words.number(s.seen.queue)} requests wait {s.wait_text} while places and KV "
        f"cache are free, and prompts take {words.percent(used)} of what a budget of {now} lets through; expected "
        f"{expected(prediction)}."
    )
    return _candidate(s, after, Reason.WAIT_FROM_TOKEN_BUDGET, message, prediction)


def prepare_token_budget(s: Situation) -> Candidate | None:
    """The same before an objective is missed."""
    changed = s.state.changed_at
    if changed is not None and s.inputs.now - changed < PREPARE_SECONDS:
        return None
    if s.state.streak.phase is Phase.QUEUE and s.state.streak.count < PREPARE_WINDOWS:
        return None
    found = _larger(s)
    if isinstance(found, str):
        return None
    after, prediction, used = found
    now = s.inputs.limits.token_budget
    text = f"prompts take up to {words.percent(used)} of what a budget of {now} lets through, and the law allows more"
    return _candidate(s, after, Reason.NEARLY_FULL, f"tokenBudget {now} -> {after}: {text}.", prediction)


def _larger(s: Situation) -> tuple[int, Prediction, float] | str:
    """The budget, what it brings, and the share of the present one that prompts take; or why none."""
    law, now = s.usable_law, s.inputs.limits.token_budget
    if s.inputs.mode is Mode.RECOMMEND:
        return "tokenBudget is not among spec.bounds, so nobody could follow a recommendation"
    if law is None:
        return f"tokenBudget stays at {now}: the step law is not known yet"
    if not law.d > 0:
        return f"tokenBudget stays at {now}: by the step law prompts take no time"
    steps = _steps(s, law)
    if steps is None:
        return f"tokenBudget stays at {now}: no prompts were computed lately"
    used = _used(s, steps)
    if used < PRESSED:
        return f"tokenBudget stays at {now}: prompts take {words.percent(used)} of what it lets through"
    objective = s.inputs.objectives.inter_token_latency
    within = steps.budget_within(ITL_MARGIN * objective)
    longest = s.inputs.limits.batch_size + s.inputs.limits.max_sequence_length
    after = int(min(MAX_FACTOR * now, within, longest, *(r - 1 for r in s.refused(Knob.TOKEN_BUDGET))))
    gain = steps.rate(after) / steps.rate(now)
    if after <= now:
        because = f"a step of {within:.0f} tokens takes the inter-token objective of {words.seconds(objective)}"
        return f"tokenBudget stays at {now}: {because}"
    if gain <= 1 + MIN_GAIN:
        return f"tokenBudget {after} is predicted to compute prompts only {gain - 1:.0%} faster"
    return after, _prediction(s, law, gain), used


def _steps(s: Situation, law: Law) -> _Steps | None:
    per_token = s.work.prefill_per_token
    if per_token <= 0:
        return None
    decode = law.b + law.c * s.work.kv_per_request
    return _Steps(law.a, law.d + decode / per_token, 1 / per_token)


def _used(s: Situation, steps: _Steps) -> float:
    """Prompt tokens over those that the budget lets through, of the pod that has most to do. Of its windows of the last
    minute the third fullest counts: one or two are a burst."""
    rates: dict[str, list[float]] = {}
    for w in s.state.windows:
        rates.setdefault(w.pod, []).append(w.prefill_tokens / w.seconds)
    lasting = (sorted(of_pod, reverse=True)[WINDOWS - 1] for of_pod in rates.values() if len(of_pod) >= WINDOWS)
    return max(lasting, default=0.0) / steps.rate(s.inputs.limits.token_budget)


def _prediction(s: Situation, law: Law, gain: float) -> Prediction:
    """Where prompts are what requests wait for, each token comes with its share of prompt tokens."""
    basis = f"prompts {gain - 1:.0%} faster by the step law, error {words.percent(law.error)}"
    if s.state.streak.phase is not Phase.QUEUE:
        return Prediction(s.seen.tokens_per_second, 0.0, s.seen.itl, basis)
    return Prediction(s.seen.tokens_per_second * gain, None if s.wait is None else s.wait / gain, None, basis)


def _candidate(s: Situation, after: int, reason: Reason, message: str, prediction: Prediction) -> Candidate:
    limits = replace(s.inputs.limits, token_budget=after)
    now = s.inputs.limits.token_budget
    return Candidate(Knob.TOKEN_BUDGET, now, after, reason, message, prediction, limits, s.inputs.replicas)
