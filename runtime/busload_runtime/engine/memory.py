"""How much memory the KV cache gets: budget - weights - activations - overhead, and which limits that rules out.

Everything that reads the machine is in the first half; `MemoryPlan` is arithmetic.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from busload_runtime.contract import Limits

GROWTH_RESERVE = 64 << 20
"""Bytes kept for what grows after the start: request queues, the prefix index, allocator slack, HTTP buffers."""

OVERHEAD_VARIES = 4 << 20
"""Bytes by which two measurements of the overhead of one service may differ."""

_HTTP_BYTES = 48 << 20
"""Of the HTTP process once it has its libraries, without a model's text: the engine starts to load before that."""

GRAMMAR_BYTES_PER_TOKEN = 256
"""Of the vocabulary: tables that the first grammar needs. 11 MB for 49,152 tokens, 65 MB for 262,144."""

_NO_LIMIT = 1 << 60  # cgroup v1 spells "no limit" as a huge number


class LimitsImpossible(ValueError):
    """Limits that are well formed but cannot be run here; the message gives the numbers and what would fit."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Memory the runtime may use in all, HTTP process included."""

    num_bytes: int
    source: str


def find_budget(flag: int | None, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> Budget:
    """The flag, else the tightest cgroup limit (v2 or v1), else what the machine has available now."""
    if flag is not None:
        return Budget(flag, "--memory")
    info = _read_table(proc / "meminfo")
    limit = _cgroup_limit(proc, cgroups)
    if limit is not None:
        return Budget(min(limit, info.get("MemTotal", limit)), "cgroup limit")
    if "MemAvailable" not in info:
        raise LimitsImpossible(
            "cannot tell how much memory there is (no cgroup limit, no /proc/meminfo): give --memory"
        )
    return Budget(info["MemAvailable"], "available memory")


def device_budget(flag: int | None, name: str, num_bytes: int) -> Budget:
    """Of a device with memory of its own: the flag, else all that it has."""
    return Budget(num_bytes, name) if flag is None else Budget(min(flag, num_bytes), "--memory")


def private_bytes(process: int | str = "self", proc: Path = Path("/proc")) -> int:
    """Resident memory of a process that is not backed by a file, 0 for a process that is gone."""
    status = _read_table(proc / str(process) / "status")
    return status.get("RssAnon", 0) + status.get("RssShmem", 0)


def measure_overhead(before_load: int, weight_bytes: int) -> int:
    """Bytes beside weights, activations and KV cache: both processes as measured now, and `GROWTH_RESERVE`.

    `before_load` is what this process held before the model. Weights may be private memory or mapped from the file;
    whatever else it holds after loading is overhead.
    """
    engine = max(before_load, private_bytes() - weight_bytes)
    return engine + private_bytes(os.getppid()) + GROWTH_RESERVE


def room_for_weights(budget: Budget) -> int:
    """Bytes that a budget has for weights at the very most, told before they are loaded: with more the kernel would end
    the process in the middle, before `MemoryPlan` can say what does not fit."""
    parent = max(private_bytes(os.getppid()), _HTTP_BYTES)
    return budget.num_bytes - private_bytes() - parent - GROWTH_RESERVE


def _cgroup_limit(proc: Path, cgroups: Path) -> int | None:
    """Smallest memory limit of this process's cgroup and its ancestors, None without one."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return None
    limits: list[int] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            limits += _limits_upward(cgroups, path, "memory.max")
        elif "memory" in controllers.split(","):
            limits += _limits_upward(cgroups / "memory", path, "memory.limit_in_bytes")
    return min(limits, default=None)


def _limits_upward(root: Path, path: str, name: str) -> list[int]:
    # In a container the path may be the host's and not exist below the mount; its root is then the container's own.
    folder = root / path.lstrip("/")
    found = []
    for directory in (folder, *folder.parents):
        try:
            text = (directory / name).read_text().strip()
        except OSError:
            text = "max"
        if text.isdigit() and int(text) < _NO_LIMIT:
            found.append(int(text))
        if directory == root:
            break
    return found


def _read_table(path: Path) -> dict[str, int]:
    """Lines of the form `Name:  123 kB` as bytes."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    table = {}
    for line in lines:
        name, _, value = line.partition(":")
        words = value.split()
        if len(words) == 2 and words[1] == "kB":
            table[name] = int(words[0]) * 1024
    return table


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What is known after loading. Sizes in bytes, lengths in tokens."""

    budget: Budget
    weights: int
    overhead: int
    block_size: int
    bytes_per_block: int
    context_length: int
    activations: Callable[[int, int], int]
    """(token budget, batch size) -> bytes a step needs beside weights and KV."""

    @property
    def max_blocks(self) -> int:
        """Blocks that no limits exceed: all that weights, overhead and the smallest step leave."""
        left = self.budget.num_bytes - self.weights - self.overhead - self.activations(1, 1)
        return max(1, left // self.bytes_per_block)

    def num_blocks(self, limits: Limits) -> int:
        """Pool size under these limits. Raises `LimitsImpossible` when one sequence of full length cannot run."""
        length = limits.max_sequence_length
        if length > self.context_length:
            raise LimitsImpossible(
                f"maxSequenceLength {length} is above the model's context length {self.context_length}: "
                f"set it to at most {self.context_length}"
            )
        activations = self.activations(limits.token_budget, limits.batch_size)
        left = self.budget.num_bytes - self.weights - self.overhead - activations
        needed = -(-length // self.block_size)
        # Smallest number of bytes b with b * percent // 100 // bytes_per_block >= needed, beside the rest.
        enough = -(-needed * self.bytes_per_block * 100 // limits.kv_cache_percent)
        raise_limit = f"raise the memory limit to at least {self._room(enough + self.budget.num_bytes - left)}"
        if left < self.bytes_per_block:
            raise LimitsImpossible(
                f"no memory is left for the KV cache: {self._account(activations)}; {raise_limit}, "
                "or lower tokenBudget or batchSize"
            )
        blocks = left * limits.kv_cache_percent // 100 // self.bytes_per_block
        if blocks < needed:
            # Smallest percent p with left * p // 100 // bytes_per_block >= needed.
            percent = -(-needed * self.bytes_per_block * 100 // left)
            raise LimitsImpossible(
                f"kvCachePercent {limits.kv_cache_percent} of {_mib(left)} holds {blocks * self.block_size} tokens, "
                f"less than one sequence of maxSequenceLength {length}: {self._account(activations)}; "
                + (f"raise kvCachePercent to at least {percent}" if percent <= 100 else raise_limit)
                + (f" or lower maxSequenceLength to at most {blocks * self.block_size}" if blocks else "")
            )
        return min(blocks, self.max_blocks)

    def describe(self, limits: Limits) -> str:
        """One line: where the memory goes under these limits."""
        blocks = self.num_blocks(limits)
        account = self._account(self.activations(limits.token_budget, limits.batch_size))
        return (
            f"memory: {account}; {limits.kv_cache_percent}% of the rest is KV cache: "
            f"{_mib(blocks * self.bytes_per_block)}, {blocks} blocks, {blocks * self.block_size} tokens"
        )

    def _room(self, num_bytes: int) -> str:
        """In whole MiB; the overhead is measured and differs a little from one start to the next."""
        mib = -(-(num_bytes + OVERHEAD_VARIES) >> 20)
        return f"{mib} MiB (--memory {mib << 20})" if self.budget.source == "--memory" else f"{mib} MiB"

    def _account(self, activations: int) -> str:
        return (
            f"{_mib(self.budget.num_bytes)} budget ({self.budget.source}) - {_mib(self.weights)} weights - "
            f"{_mib(activations)} activations - {_mib(self.overhead)} overhead"
        )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.0f} MiB"
