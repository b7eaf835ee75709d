"""Candidates that change the number of replicas: computed from work offered and capacity measured."""

import math

from busload_operator.tuning import words
from busload_operator.tuning.demand import cost
from busload_operator.tuning.fit import MAX_ERROR, TRUSTED_BEYOND, batch_within, step_error, tokens_per_second
from busload_operator.tuning.need import ASSUMED_STARTUP
from busload_operator.tuning.settings import ITL_MARGIN, KV_MARGIN, Candidate, Situation
from busload_operator.tuning.sizing import HOLD_LEAST, Plan
from busload_operator.tuning.state import Usage
from busload_operator.tuning.types import Knob, Prediction, Reason, Scaling
from busload_operator.tuning.window import View, view

UTILISATION = 0.85
"""Share of capacity that offered work may use: the rest is for variance (policy's starting kappa)."""
TRUSTED_WITH_ONE_LESS = 2.0
"""Factor past the batches seen up to which the law is asked about one replica less."""
DRAIN_SECONDS = 60.0
"""In which a backlog should be gone."""


def add_replicas(s: Situation, reason: Reason, why: str) -> Candidate | str:
    """More replicas, by the computed number, or why not. `why` says why no setting is changed instead."""
    n, most = s.inputs.replicas, s.inputs.bounds.replicas.max
    if s.inputs.scaling is Scaling.EXTERNAL:
        return f"{why}; replicas are scaled externally"
    if n >= most:
        return f"{why}; bounds.replicas.max is {most}"
    wanted = _for_inter_token(s) if reason is Reason.INTER_TOKEN_OBJECTIVE_MISSED else _for_wait(s)
    if isinstance(wanted, str):
        return f"{why}; {wanted}"
    after = min(most, wanted)
    each = s.seen.tokens_per_second / s.seen.pods
    wait = _wait_with(s, after)
    prediction = Prediction(after * each, wait, None, f"{words.number(each)} tokens/s were measured per replica")
    gain = f"{words.number(after * each)} tokens/s"
    queue = ""
    if s.wait:
        gain += f", a wait of {words.seconds(wait)}"
        queue = f" {words.number(s.seen.queue)} requests wait {s.wait_text};"
    message = f"replicas {n} -> {after}: {why};{queue} expected at best {gain} ({prediction.basis})."
    return Candidate(Knob.REPLICAS, n, after, reason, message, prediction, s.inputs.limits, after)


def _for_wait(s: Situation) -> int | str:
    """Offered work plus backlog over capacity, in replicas."""
    if s.plan is not None:
        return _by_plan(s, s.plan)
    n, length = s.inputs.replicas, s.state.output_length
    each = s.seen.busy_tokens_per_second / s.seen.pods
    if length is None or each <= 0:
        # Nothing finished yet: what a request costs is unknown, so the smallest step.
        return n + 1 if s.ready >= n else "replicas are still starting"
    startup = s.state.startup_seconds or ASSUMED_STARTUP
    offered = _arrivals(s) * length
    backlog = s.seen.queue * length
    left = backlog + (offered - n * each) * startup
    if left <= 0:
        gone = backlog / (n * each - offered)
        return f"the queue is predicted to be gone in {gone:.0f} s, a replica takes {startup:.0f} s to start"
    wanted = math.ceil((offered / UTILISATION + left / DRAIN_SECONDS) / each - 0.1)
    if s.ready >= n:
        return max(wanted, n + 1)
    return wanted if wanted > n else "the replicas that are starting are predicted to suffice"


def _by_plan(s: Situation, plan: Plan) -> int | str:
    """The computed number. When the wait stays over its objective for longer than a replica takes to come, the number
    is too small, whatever it is computed from."""
    n = s.inputs.replicas
    if plan.up > n:
        return plan.up
    since = max(s.state.missed_since or s.inputs.now, s.state.sizing.bought_at)
    if s.ready >= n and s.inputs.now - since > plan.lead + DRAIN_SECONDS:
        return n + 1
    return f"{words.count(n, 'replica')} are predicted to suffice: {_work(plan)}"


def _work(plan: Plan) -> str:
    given = f"and each may be given {plan.capacity:.2f} (a batch of up to {plan.batch:.0f})"
    if plan.rises > 0:
        rise = f"from work for {plan.offered:.2f} busy replicas to {plan.rises:.2f} in {plan.lead:.0f} s"
        return f"load rises, {rise}, {given}"
    return (
        f"work for {plan.expected:.2f} busy replicas is expected in {plan.lead:.0f} s, times {plan.error:.2f} for the "
        f"error of forecasts, {given}"
    )


def buy_ahead(s: Situation) -> Candidate | None:
    """The replicas that the load expected one lead time from now needs, before requests wait."""
    n, most, plan = s.inputs.replicas, s.inputs.bounds.replicas.max, s.plan
    if plan is None or not plan.buy or n >= most or s.inputs.scaling is Scaling.EXTERNAL:
        return None
    after = min(most, plan.up)
    message = f"replicas {n} -> {after}: {_work(plan)}."
    if plan.backlog > 0:
        message = f"{message[:-1]}; {words.seconds(plan.wait)} of work wait already."
    basis = f"offered work by the step law (a share of {plan.kappa:.2f} of a replica is planned for)"
    prediction = Prediction(s.seen.tokens_per_second, 0.0, s.seen.itl, basis)
    return Candidate(Knob.REPLICAS, n, after, Reason.OFFERED_WORK, message, prediction, s.inputs.limits, after)


def sell(s: Situation) -> Candidate | str | None:
    """Fewer replicas, when the computed number has been smaller for long enough; or why not; None: nothing to sell."""
    n, plan = s.inputs.replicas, s.plan
    least = s.inputs.bounds.replicas.min
    if plan is None or s.inputs.scaling is Scaling.EXTERNAL or max(least, plan.sell_to) >= n:
        return None
    if not s.complete:
        return f"replicas stay at {n}: not every ready one speaks"
    if (refused := max(s.refused(Knob.REPLICAS), default=0)) >= n - 1:
        return f"replicas stay at {n}: {refused} were too few a while ago"
    after = max(least, plan.sell_to, refused + 1)
    while after < n and not _batch_is_known(s, plan, after):
        after += 1
    if after >= n:
        return f"replicas stay at {n}: with fewer the batch would be larger than the law is known for"
    load = plan.load_after * plan.sell_to / after
    sizing = s.state.sizing
    held = sizing.hold_one if after == n - 1 else max(sizing.hold, HOLD_LEAST)
    message = (
        f"replicas {n} -> {after}: for {held:.0f} s no more was needed; each is expected to be {load:.2f} busy with "
        f"pure work, of {plan.capacity:.2f} that it may be given."
    )
    prediction = Prediction(s.seen.tokens_per_second, 0.0, None, "offered work by the step law")
    return Candidate(Knob.REPLICAS, n, after, Reason.LOW_USE, message, prediction, s.inputs.limits, after)


def _batch_is_known(s: Situation, plan: Plan, replicas: int) -> bool:
    """Whether the law is trusted at the batch that the rest would run: t = a / (1 - load), so B = a*load/(1-load)/g.
    With one replica less it is trusted further: the sale is undone when it was a mistake, and until then it teaches the
    law what no prediction can."""
    law, load = s.usable_law, plan.load_after * plan.sell_to / replicas
    if law is None or load >= 1:
        return False
    slope = cost(law, s.state.lengths).slope
    batch = law.a * load / ((1 - load) * slope)
    beyond = TRUSTED_WITH_ONE_LESS if replicas == s.inputs.replicas - 1 else TRUSTED_BEYOND
    return batch <= beyond * law.batch_max and step_error(law, s.work, batch) <= MAX_ERROR


def _arrivals(s: Situation) -> float:
    """Requests per second of all pods since the queue stands. The window in which it began is left out: a burst is
    backlog, not a rate that goes on."""
    later = view(w for w in s.state.windows if w.end > s.state.streak.first_end)
    return later.arrived_per_second if later is not None else s.seen.arrived_per_second


def _for_inter_token(s: Situation) -> int | str:
    """So many that the batch of each fits the inter-token objective."""
    objective, n = s.inputs.objectives.inter_token_latency, s.inputs.replicas
    if s.ready < n:
        return "replicas are still starting"
    if s.seen.batch <= 1.2:
        return (
            f"a token takes {words.seconds(s.seen.itl)} even at a batch of {s.seen.batch:.1f}, so no number of "
            f"replicas meets the inter-token objective of {words.seconds(objective)}"
        )
    law = s.usable_law
    if law is None:
        return n + 1
    if s.plan is not None and s.plan.up <= n and s.seen.batch <= s.plan.batch:
        return f"the batch of {s.seen.batch:.1f} fits the objective, and {_work(s.plan)}"
    fits = batch_within(law, s.work, ITL_MARGIN * objective)
    if fits < 1:
        return f"by the step law no batch meets the inter-token objective of {words.seconds(objective)}"
    return max(n + 1, math.ceil(s.seen.batch * s.seen.pods / fits))


def _wait_with(s: Situation, replicas: int) -> float | None:
    if s.wait is None:
        return None
    return s.wait * s.seen.pods / replicas


def fewer_replicas_hold(s: Situation, usage: tuple[Usage, ...]) -> str | None:
    """None when the highest load of `usage` is predicted to fit one replica less; else why not."""
    left = s.inputs.replicas - 1
    running = max(u.running for u in usage)
    load = max(u.tokens_per_second for u in usage) / left
    if running <= left:
        return None
    law = s.usable_law
    if law is None:
        return f"up to {running:.0f} requests ran at once and the step law is not known yet"
    capacity = tokens_per_second(law, s.work, _best_batch(s))
    if load > UTILISATION * capacity:
        return f"{left} replicas would carry {words.number(load)} of {words.number(capacity)} tokens/s each"
    return None


def _best_batch(s: Situation) -> float:
    law = s.usable_law
    assert law is not None
    within = batch_within(law, s.work, ITL_MARGIN * s.inputs.objectives.inter_token_latency)
    held = s.seen.kv_per_request
    fits = KV_MARGIN * s.seen.kv_tokens / held if held > 0 else math.inf
    return min(float(s.inputs.limits.batch_size), within, fits, TRUSTED_BEYOND * law.batch_max)


def remove_replica(s: Situation, seen: View, usage: tuple[Usage, ...]) -> Candidate | str | None:
    """One replica less, why not, or None when there is nothing to remove."""
    n = s.inputs.replicas
    if s.inputs.scaling is Scaling.EXTERNAL or n <= s.inputs.bounds.replicas.min:
        return None
    if s.ready < n or not s.complete:
        return f"replicas stay at {n}: not every one of them is ready and speaks"
    if (refused := max(s.refused(Knob.REPLICAS), default=0)) >= n - 1:
        return f"replicas stay at {n}: {refused} were too few a while ago"
    if (why := fewer_replicas_hold(s, usage)) is not None:
        return f"replicas stay at {n}: {why}"
    peak = max(u.running for u in usage)
    message = (
        f"replicas {n} -> {n - 1}: for {usage[-1].at - usage[0].at:.0f} s at most {peak:.0f} requests ran at once and "
        f"none waited; {words.count(n - 1, 'replica')} can hold that."
    )
    prediction = Prediction(seen.tokens_per_second, 0.0, None, "the load of the last five minutes")
    return Candidate(Knob.REPLICAS, n, n - 1, Reason.LOW_USE, message, prediction, s.inputs.limits, n - 1)
