"""The account of `busload plan` as a table that explains itself, and as JSON."""

from typing import TYPE_CHECKING, Any

from busload_operator.tuning import words
from busload_operator.tuning.feasible import gigabytes, latency
from busload_operator.tuning.planner import MemoryPlan, step_floor, whole_mib

if TYPE_CHECKING:
    from busload_operator.plan.command import Account

_BATCHES = (1, 8, 32, 128)


def table(account: "Account") -> str:
    """The memory line by line, what fits, the floor of a step, and the verdict."""
    sections = [_memory(account), _what_fits(account), _speed(account), _verdict(account)]
    return "\n\n".join("\n".join(lines) for lines in sections)


def _memory(account: "Account") -> list[str]:
    plan, limits = account.plan, account.plan.limits
    step = f"a step of {limits.token_budget} tokens for {words.count(limits.batch_size, 'request')}"
    if account.device == "cpu":
        step += f", {words.count(account.threads, 'thread')}"
    overhead = "processes, vocabulary, room to grow"
    if account.device == "gpu":
        overhead = "CUDA, workspaces, captured graphs (an estimate; pods measure)"
    per_token = words.size(plan.facts.kv_bytes_per_token)
    rows = [
        ("", "memory of one replica", words.size(plan.budget), f"{plan.budget:,} bytes"),
        ("-", "weights", words.size(plan.facts.weight_bytes), "in memory, as the engine holds them"),
        ("-", "activations", words.size(plan.activations), step),
        ("-", "overhead", words.size(plan.facts.overhead_bytes), overhead),
        ("=", "left", _signed(plan.left), "for the KV cache: keys and values of all tokens in flight"),
        (
            "",
            f"{limits.kv_cache_percent}% of it (kvCachePercent)",
            words.size(plan.kv_cache_bytes),
            _pool(plan, per_token),
        ),
    ]
    lines = [f"  {sign:1} {name:<28}{size:>10}   {note}" for sign, name, size, note in rows]
    return [f"Memory: {plan.facts.name} on {'a GPU' if account.device == 'gpu' else 'CPUs'}", *lines]


def _pool(plan: MemoryPlan, per_token: str) -> str:
    return f"{plan.kv_cache_tokens:,} tokens of {per_token}, in {plan.blocks:,} blocks of {plan.facts.block_tokens}"


def _signed(amount: int) -> str:
    return words.size(amount) if amount >= 0 else f"-{words.size(-amount)}"


def _what_fits(account: "Account") -> list[str]:
    plan, length = account.plan, account.longest
    if plan.blocks == 0:
        return ["What fits: nothing"]
    lines = []
    for batch in sorted({*_BATCHES, plan.limits.batch_size}):
        longest = plan.longest_of(batch)
        if longest:
            context = " (the model's context)" if longest == plan.facts.context_length else ""
            many = words.count(batch, "request")
            lines.append(f"    {many + ' at once':<28}{longest:>10,}   tokens each{context}")
    for tokens in sorted({account.shortest, length}):
        lines.append(f"    {f'requests of {tokens:,} tokens':<28}{plan.requests_of(tokens):>10,}   at once")
    note = (
        "    Requests rarely all reach full length at once: the cache is paged, so batchSize may be larger than that."
    )
    return ["What fits, at full length", *lines, note]


def _speed(account: "Account") -> list[str]:
    plan, bandwidth = account.plan, account.bandwidth
    if bandwidth is None:
        return ["Speed: the memory bandwidth is not known; give --bandwidth GB/s for the least time between two tokens"]
    least = step_floor(plan.facts, bandwidth.bytes_per_second)
    batch, length = plan.limits.batch_size, min(account.longest, plan.longest_of(plan.limits.batch_size))
    full = step_floor(plan.facts, bandwidth.bytes_per_second, batch, length)
    objective = f"objective {latency(account.objective)}"
    many = words.count(batch, "request")
    rows = [
        ("memory bandwidth", f"{gigabytes(bandwidth.bytes_per_second)} GB/s", bandwidth.source),
        ("a step reads", words.size(plan.facts.step_weight_bytes), "all weights, however many requests share it"),
        ("so it takes at least", latency(least), f"which is the least time between two tokens; {objective}"),
    ]
    if length:
        rows.append((f"with {many}", latency(full), f"of {length:,} tokens each, whose KV cache is read as well"))
    return ["Speed", *(f"    {name:<28}{value:>10}   {note}" for name, value, note in rows)]


def _verdict(account: "Account") -> list[str]:
    verdict = account.verdict
    if verdict.possible is False:
        return [f"Cannot work ({verdict.reason}): {verdict.message}"]
    lead = "It fits." if verdict.possible else "The memory fits."
    longest = account.plan.longest_of(1)
    if longest < account.longest:
        more = whole_mib(account.plan.budget_for(account.longest))
        lead = f"It fits up to a maxSequenceLength of {longest:,}; {account.longest:,} needs {more}."
    if account.start is not None:
        lead += (
            f" The operator starts it with maxSequenceLength {account.start.max_sequence_length:,} (what fits at the "
            f"largest batchSize of the bounds), batchSize {account.start.batch_size} and kvCachePercent "
            f"{account.start.kv_cache_percent}."
        )
    return [f"{lead} {verdict.message}"]


def as_json(account: "Account") -> dict[str, Any]:
    """The same in numbers: bytes, tokens, seconds."""
    plan, bandwidth, limits = account.plan, account.bandwidth, account.plan.limits
    per_second = None if bandwidth is None else bandwidth.bytes_per_second
    return {
        "model": plan.facts.name,
        "device": account.device,
        "fits": account.verdict.possible,
        "reason": account.verdict.reason,
        "message": account.verdict.message,
        "memory": {
            "budgetBytes": plan.budget,
            "weightBytes": plan.facts.weight_bytes,
            "activationBytes": plan.activations,
            "overheadBytes": plan.facts.overhead_bytes,
            "leftBytes": plan.left,
            "kvCacheBytes": plan.kv_cache_bytes,
            "kvCacheTokens": plan.kv_cache_tokens,
            "kvBytesPerToken": plan.facts.kv_bytes_per_token,
            "blockTokens": plan.facts.block_tokens,
            "bytesNeeded": plan.budget_for(account.longest) if account.longest <= plan.facts.context_length else None,
        },
        "limits": {
            "maxSequenceLength": limits.max_sequence_length,
            "batchSize": limits.batch_size,
            "kvCachePercent": limits.kv_cache_percent,
            "tokenBudget": limits.token_budget,
        },
        "whatFits": {
            "longestSequence": plan.longest_of(1),
            "longestSequenceAtBatchSize": plan.longest_of(limits.batch_size),
            "requestsOfFullLength": plan.requests_of(account.longest),
            "contextLength": plan.facts.context_length,
        },
        "speed": {
            "bandwidthBytesPerSecond": per_second,
            "bandwidthSource": None if bandwidth is None else bandwidth.source,
            "stepWeightBytes": plan.facts.step_weight_bytes,
            "leastInterTokenSeconds": None if per_second is None else step_floor(plan.facts, per_second),
            "objectiveInterTokenSeconds": account.objective,
        },
    }
