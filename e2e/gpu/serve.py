"""Tokens per second of whole models through the executor that serves: prompts in pieces, then decoding."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from busload_runtime.engine.plan import PENDING, Chunk, Plan, SamplingParams
from busload_runtime.executors.contract import Pending
from busload_runtime.executors.cuda import CudaExecutor, CudaOptions

from .model import RandomCheckpoint
from .shapes import Shape

PROMPT = 512
PIECE = 2048
"""Prompt tokens of a step."""
SAMPLING = SamplingParams(temperature=1.0, top_p=0.95)


@dataclass
class _Request:
    number: int
    prompt: tuple[int, ...]
    blocks: tuple[int, ...]
    length: int = 0
    """Tokens in the cache."""
    last: int = 0
    drawn: int = 0


class Server:
    """An executor with random weights, and room for a batch."""

    def __init__(self, shape: Shape, precision: str, batch: int, steps: int, device: str) -> None:
        self.shape, self.precision = shape, precision
        context = PROMPT + steps + 1
        options = CudaOptions(device=device, weight_precision=precision, kv_precision="int8")
        self.executor = CudaExecutor(RandomCheckpoint(shape, context, torch.device(device)), options)
        self._blocks_each = -(-context // self.executor.block_size)
        self.executor.reserve(batch * self._blocks_each)
        self.executor.resize(batch * self._blocks_each)

    def measure(self, batch: int, steps: int, bandwidth: float) -> dict[str, Any]:
        """One row of the table: `batch` requests, `steps` timed ones after three to warm up and five one by one."""
        requests = [self._request(number) for number in range(batch)]
        seconds, tokens = self._prefill(requests)
        self._steps(requests, 3, 0)
        one_by_one = _median(self._steps(requests, 5, 0))
        step = _median(self._steps(requests, steps, 1))
        length = requests[0].length - steps // 2
        cached = batch * length * self.executor.bytes_per_block / self.executor.block_size
        floor = (self._step_weight_bytes() + cached) / bandwidth
        return {
            "model": self.shape.name,
            "weights": self.precision,
            "batch": batch,
            "tokens_per_second": batch / step,
            "step_ms": step * 1e3,
            "one_by_one_ms": one_by_one * 1e3,
            "floor_ms": floor * 1e3,
            "share_of_floor": floor / step,
            "prefill_tokens_per_second": tokens / seconds,
        }

    def busy_share(self, batch: int, ahead: int, steps: int = 10) -> float:
        """Share of a decode step in which the device computes, as its profiler counts; the rest is the host's gap."""
        requests = [self._request(number) for number in range(batch)]
        self._prefill(requests)
        self._steps(requests, 1, 0)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            begin = time.perf_counter()
            self._steps(requests, steps, ahead)
            torch.cuda.synchronize()
            wall = time.perf_counter() - begin
        busy = sum(event.self_device_time_total for event in profile.key_averages()) / 1e6
        return float(busy / wall)

    def _request(self, number: int) -> _Request:
        first = number * self._blocks_each
        prompt = tuple((number * 7919 + place * 104729) % self.shape.vocab for place in range(PROMPT))
        return _Request(number, prompt, tuple(range(first, first + self._blocks_each)))

    def _prefill(self, requests: list[_Request]) -> tuple[float, int]:
        """Seconds and tokens. The first piece is run twice: what it compiles is not of interest."""
        pieces = list(_pieces(requests))
        self.executor.run(Plan(pieces[0]))
        begin = time.perf_counter()
        for chunks in pieces:
            for answer in self.executor.run(Plan(chunks)):
                requests[answer.request_id].last = answer.token
        seconds = time.perf_counter() - begin
        for request in requests:
            request.length, request.drawn = PROMPT, 1
        return seconds, PROMPT * len(requests)

    def _steps(self, requests: list[_Request], count: int, ahead: int) -> list[float]:
        """Seconds between the results of decode steps, each launched while `ahead` others run: 1 as the engine does, 0
        one by one."""
        times = []
        running: deque[Pending] = deque()
        begin = time.perf_counter()
        for left in reversed(range(count)):
            running.append(self._launch(requests, pending=bool(running)))
            while len(running) > (ahead if left else 0):
                self._take(requests, running.popleft())
                times.append(time.perf_counter() - begin)
                begin += times[-1]
        return times

    def _launch(self, requests: list[_Request], pending: bool) -> Pending:
        chunks = tuple(
            Chunk(one.number, (PENDING if pending else one.last,), one.length,
                  one.blocks[: one.length // self.executor.block_size + 1], SAMPLING, one.drawn)
            for one in requests
        )  # fmt: skip
        for one in requests:
            one.length += 1
            one.drawn += 1
        return self.executor.launch(Plan(chunks))

    def _take(self, requests: list[_Request], step: Pending) -> None:
        for answer in step.result():
            if not 0 <= answer.token < self.shape.vocab:
                raise ValueError(f"request {answer.request_id} drew token {answer.token} of {self.shape.vocab}")
            requests[answer.request_id].last = answer.token

    def _step_weight_bytes(self) -> int:
        """Weights that a step reads: all but the table that is only looked up in."""
        table = self.shape.vocab * self.shape.hidden * 2
        looked_up = self.precision in ("int8", "fp8") or not self.shape.tied
        return self.executor.weight_bytes - (table if looked_up else 0)


def _median(seconds: list[float]) -> float:
    return sorted(seconds)[len(seconds) // 2]


def _pieces(requests: list[_Request]) -> Iterator[tuple[Chunk, ...]]:
    at_once = max(1, PIECE // PROMPT)
    for first in range(0, len(requests), at_once):
        yield tuple(
            Chunk(one.number, one.prompt, 0, one.blocks[: -(-PROMPT // 64)], SAMPLING)
            for one in requests[first : first + at_once]
        )
