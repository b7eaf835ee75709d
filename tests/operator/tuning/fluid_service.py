"""A small discrete model of a service that obeys the step law, for closed-loop tests of the tuning core.

Pods run steps of `a + b*batch + c*kv + d*prefill` seconds on their own clock and export the runtime's counters.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random

from busload_operator.tuning import (
    Bounds,
    Counters,
    Decision,
    Inputs,
    Mode,
    Objectives,
    PodSample,
    Range,
    Result,
    Scaling,
    State,
    Trial,
    step,
)
from busload_operator.tuning.counters import CUMULATIVE, Probed
from busload_runtime.contract import SEQUENCE_LENGTHS, Limits

BLOCK = 16
COUNTED = ("prompt_tokens_arrived", "finished_prompt_tokens", "too_long", "answers_cut")

LIMITS = Limits(
    max_sequence_length=2048,
    batch_size=4,
    kv_cache_percent=50,
    token_budget=512,
    max_queued_requests=256,
    max_queued_tokens=262_144,
)
BOUNDS = Bounds(
    max_sequence_length=Range(1024, 8192),
    kv_cache_percent=Range(20, 90),
    batch_size=Range(1, 64),
    batch_size_initial=4,
    replicas=Range(1, 2),
)
OBJECTIVES = Objectives(time_to_first_token=2.0, inter_token_latency=0.25)


@dataclass
class Request:
    prompt: int
    output: int
    arrived: float
    computed: int = 0
    made: int = 0
    started: bool = False
    cut: bool = False
    asked: int = 0
    """Prompt tokens as they came; what was computed before a preemption is added to `prompt`."""

    def __post_init__(self) -> None:
        self.asked = self.prompt


@dataclass(frozen=True)
class StepLaw:
    a: float = 0.040
    b: float = 0.004
    c: float = 0.0
    d: float = 0.001


@dataclass
class Pod:
    name: str
    law: StepLaw
    limits: Limits
    generation: int
    ready_at: float
    clock: float = 0.0
    blocks_at_100: int = 4096
    queue: list[Request] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)
    sums: dict[str, float] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=lambda: [0] * len(SEQUENCE_LENGTHS))
    step_left: float = 0.0
    finish: Callable[[], None] | None = None
    noise: float = 0.0
    """Step times scatter by this share."""
    prompts_queue: bool = False
    """Whether requests wait while the prompts of those that run use up the token budget, as the scheduler has it."""
    random: Random = field(default_factory=lambda: Random(7))

    def take(self, request: Request) -> None:
        """As a pod does: a prompt that is too long is refused, an answer that is, cut off."""
        room = self.limits.max_sequence_length - request.prompt
        if room < 1:
            self.add(too_long=1)
            return
        request.cut = request.output > room
        request.output = min(request.output, room)
        self.queue.append(request)
        self.add(arrived=1, prompt_tokens_arrived=request.prompt)

    def add(self, **values: float) -> None:
        for key, value in values.items():
            self.sums[key] = self.sums.get(key, 0.0) + value

    @property
    def blocks(self) -> int:
        return self.blocks_at_100 * self.limits.kv_cache_percent // 100

    @property
    def blocks_used(self) -> int:
        return sum(-(-(r.computed + r.made) // BLOCK) for r in self.running)

    def advance(self, until: float) -> None:
        """Runs until this time, cutting the last step in two (its counters appear when it ends)."""
        while self.clock < until - 1e-9:
            if self.finish is None and not self._begin():
                self._pass(until - self.clock)
                return
            part = min(self.step_left, until - self.clock)
            self._pass(part)
            self.step_left -= part
            if self.step_left <= 1e-9:
                assert self.finish is not None
                self.finish()
                self.finish = None

    def _pass(self, seconds: float) -> None:
        kv = sum(r.computed + r.made for r in self.running)
        self.add(
            batch_seconds=len(self.running) * seconds,
            queue_seconds=len(self.queue) * seconds,
            kv_token_seconds=kv * seconds,
        )
        self.clock += seconds

    def _begin(self) -> bool:
        while self.queue and len(self.running) < self.limits.batch_size:
            if self.prompts_queue and sum(r.prompt - r.computed for r in self.running) >= self.limits.token_budget:
                break
            need = -(-(self.queue[0].prompt + 1) // BLOCK)
            if self.blocks_used + need > self.blocks and self.running:
                break
            self.running.append(self.queue.pop(0))
        while len(self.running) > 1 and self.blocks_used + len(self.running) > self.blocks:
            victim = self.running.pop()
            victim.computed = 0
            victim.prompt += victim.made
            victim.output -= victim.made
            victim.made = 0
            self.queue.insert(0, victim)
            self.add(preemptions=1)
        if not self.running:
            return False
        decoding = [r for r in self.running if r.computed >= r.prompt]
        budget = self.limits.token_budget - len(decoding)
        chunks: list[tuple[Request, int]] = []
        for r in self.running:
            if r.computed < r.prompt and budget > 0:
                chunk = min(budget, r.prompt - r.computed)
                chunks.append((r, chunk))
                budget -= chunk
        kv = sum(r.computed + r.made for r in decoding)
        prefill = sum(chunk for _, chunk in chunks)
        seconds = self.law.a + self.law.b * len(decoding) + self.law.c * kv + self.law.d * prefill
        seconds *= self.random.uniform(1 - self.noise, 1 + self.noise)
        self.step_left = seconds
        self.finish = lambda: self._end(decoding, chunks, seconds, kv, prefill)
        return True

    def _end(
        self, decoding: list[Request], chunks: list[tuple[Request, int]], seconds: float, kv: int, prefill: int
    ) -> None:
        self.add(steps=1, busy_seconds=seconds, step_batch=len(decoding), step_kv_tokens=kv, prefill_tokens=prefill)
        for r, chunk in chunks:
            r.computed += chunk
        sampled = decoding + [r for r, _ in chunks if r.computed >= r.prompt]
        for r in sampled:
            r.made += 1
            self.add(generated_tokens=1)
            if r.started:
                self.add(itl_sum=seconds, itl_count=1)
            else:
                r.started = True
                self.add(ttft_sum=self.clock - r.arrived, ttft_count=1)
            if r.made >= r.output:
                self.running.remove(r)
                length = r.prompt + r.made
                self.add(finished=1, output_tokens_sum=length - r.asked, finished_prompt_tokens=r.asked)
                self.add(answers_cut=r.cut)
                self.lengths = [n + (length <= bound) for n, bound in zip(self.lengths, SEQUENCE_LENGTHS, strict=True)]

    def counters(self) -> Counters:
        names = [name for name in CUMULATIVE if name != "clock"]
        return Counters(
            clock=self.clock,
            running=len(self.running),
            waiting=len(self.queue),
            kv_blocks=self.blocks,
            kv_blocks_free=max(0, self.blocks - self.blocks_used),
            kv_block_size=BLOCK,
            generation=self.generation,
            max_sequence_length=self.limits.max_sequence_length,
            batch_size=self.limits.batch_size,
            kv_cache_percent=self.limits.kv_cache_percent,
            token_budget=self.limits.token_budget,
            sequence_lengths=tuple(map(float, self.lengths)),
            **{name: self.sums.get(name, 0.0) for name in (*names, *COUNTED)},
        )


Tamper = Callable[[float, PodSample], PodSample]


class Service:
    """Pods, a router, and the controller's loop around `step`: scrape, step, write what it says."""

    def __init__(
        self,
        law: StepLaw | None = None,
        limits: Limits = LIMITS,
        bounds: Bounds = BOUNDS,
        objectives: Objectives = OBJECTIVES,
        mode: Mode = Mode.AUTO,
        scaling: Scaling = Scaling.OBSERVED,
        replicas: int = 1,
        startup: float = 20.0,
        scrape: float = 2.0,
        blocks: int = 4096,
        noise: float = 0.0,
        tamper: Tamper = lambda now, sample: sample,
        probed: bool = False,
        prompts_queue: bool = False,
    ) -> None:
        self.law, self.bounds, self.objectives = law or StepLaw(), bounds, objectives
        self.mode, self.scaling, self.startup, self.scrape, self.blocks = mode, scaling, startup, scrape, blocks
        self.limits, self.generation, self.replicas, self.tamper = limits, 1, replicas, tamper
        self.noise, self.prompts_queue = noise, prompts_queue
        tried = Probed(self.law.a, self.law.b, self.law.c, self.law.d, bounds.batch_size.max)
        self.probed = tried if probed else None
        self.trial: Trial | None = None
        self.now, self.state, self.made = 1000.0, State.initial(), 0
        self.pods: list[Pod] = []
        self.results: list[tuple[float, Result]] = []
        self.clients = 0
        self.client_request = (32, 128)
        self.rate: Callable[[float], float] = lambda now: 0.0
        self.due = 0.0
        self.tokens_at: dict[float, float] = {}
        self._scale(startup=0.0)

    # What a client does.
    def send(self, count: int, prompt: int = 32, output: int = 128) -> None:
        for _ in range(count):
            ready = [p for p in self.pods if p.ready_at <= self.now]
            pod = min(ready, key=lambda p: len(p.queue) + len(p.running))
            pod.take(Request(prompt, output, pod.clock))

    @property
    def open_requests(self) -> int:
        return sum(len(p.queue) + len(p.running) for p in self.pods)

    def run(self, seconds: float) -> None:
        """Advances in quarter seconds; scrapes and steps every `scrape` seconds."""
        for _ in range(round(seconds * 4)):
            self.now += 0.25
            self.due += self.rate(self.now) * 0.25
            while self.due >= 1:
                self.send(1, *self.client_request)
                self.due -= 1
            if self.clients > self.open_requests:
                self.send(self.clients - self.open_requests, *self.client_request)
            for pod in self.pods:
                if pod.ready_at <= self.now:
                    pod.advance(pod.clock + 0.25)
            if round(self.now * 4) % round(self.scrape * 4) == 0:
                self._loop()

    def _loop(self) -> None:
        samples = []
        for pod in self.pods:
            ready = pod.ready_at <= self.now
            sample = PodSample(pod.name, self.now, pod.counters() if ready else None, ready, probed=self.probed)
            samples.append(self.tamper(self.now, sample))
        inputs = Inputs(
            now=self.now,
            pods=tuple(samples),
            limits=self.limits,
            generation=self.generation,
            replicas=self.replicas,
            bounds=self.bounds,
            objectives=self.objectives,
            mode=self.mode,
            scaling=self.scaling,
            trial=self.trial,
        )
        self.state, result = step(self.state, inputs)
        self.results.append((self.now, result))
        self.tokens_at[self.now] = sum(p.sums.get("generated_tokens", 0.0) for p in self.pods)
        if (result.limits, result.trial) != (self.limits, self.trial):
            self.limits, self.trial = result.limits, result.trial
            self.generation += 1
            for pod in self.pods:
                pod.limits, pod.generation = self.limits_of(pod.name), self.generation
        if result.replicas != self.replicas:
            self.replicas = result.replicas
            self._scale(self.startup)

    def limits_of(self, pod: str) -> Limits:
        return self.trial.limits if self.trial is not None and self.trial.pod == pod else self.limits

    def _scale(self, startup: float) -> None:
        while len(self.pods) < self.replicas:
            self.made += 1
            pod = Pod(f"chat-{self.made}", self.law, self.limits, self.generation, self.now + startup)
            own = {"blocks_at_100": self.blocks, "noise": self.noise, "prompts_queue": self.prompts_queue}
            self.pods.append(replace(pod, random=Random(self.made), **own))  # type: ignore[arg-type]
        gone, self.pods = self.pods[self.replicas :], self.pods[: self.replicas]
        for pod in gone:
            self.pods[0].queue += pod.queue + pod.running

    # What came out.
    def tokens_per_second(self, start: float, end: float) -> float:
        """As a client counts them, between two scrapes."""
        return (self.tokens_at[end] - self.tokens_at[start]) / (end - start)

    @property
    def decisions(self) -> list[Decision]:
        """As they stand now: with their outcome once known."""
        made = {r.decision.id: r.decision for _, r in self.results if r.decision is not None}
        made |= {d.id: d for _, r in self.results for d in r.closed}
        return [made[key] for key in sorted(made)]
