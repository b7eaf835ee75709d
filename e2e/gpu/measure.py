"""Times on the device: of captured graphs, since serving replays them and launches cost more than small steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

OUT_OF_CACHE = 256 * 2**20
"""Bytes after which the second-level cache (50 MiB on H100 and H200) holds nothing of what was read first."""


def copy_bandwidth(device: torch.device, num_bytes: int = 2**30, copies: int = 8) -> float:
    """Bytes per second, read plus write, of the best of a few copies: what all byte floors here are made with."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / min(_events(lambda: target.copy_(source)) for _ in range(copies))


def replayed(calls: Sequence[Callable[[], object]], replays: int = 5) -> float:
    """Seconds of one of `calls`, which are captured one after another into one graph; the best of the replays.

    Give calls that read different memory, `OUT_OF_CACHE` in all, to time what a model finds: weights that are not in
    the cache. Each is run once before, so that nothing is compiled while capturing.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    return min(_events(graph.replay) for _ in range(replays)) / len(calls)


def copies_for(num_bytes: int) -> int:
    """How many different operands make the cache useless."""
    return max(2, min(64, -(-OUT_OF_CACHE // max(1, num_bytes))))


def _events(call: Callable[[], object]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3
