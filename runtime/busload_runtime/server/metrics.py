"""`/metrics`: exactly the families of `contract.METRICS`, all present from the first scrape, no label from a client."""

import time
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, ProcessCollector, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from busload_runtime.contract import (
    COEFFICIENTS,
    FINISH_REASONS,
    METRICS,
    OBJECTIVES,
    REFUSAL_REASONS,
    Limits,
    Metric,
    Pace,
)
from busload_runtime.engine.messages import Ready, Stats
from busload_runtime.server.bandwidth import BandwidthUse
from busload_runtime.server.histogram import Histogram

CONTENT_TYPE = CONTENT_TYPE_LATEST

# Where a family's value comes from when the engine counts it: a field of its newest snapshot.
_FROM_STATS: dict[str, str] = {
    "busload_engine_steps_total": "steps",
    "busload_engine_busy_seconds_total": "busy_seconds",
    "busload_step_batch_total": "step_batch",
    "busload_step_kv_tokens_total": "step_kv_tokens",
    "busload_step_prefill_tokens_total": "step_prefill_tokens",
    "busload_generated_tokens_total": "generated_tokens",
    "busload_preemptions_total": "preemptions",
    "busload_prefix_cache_queried_tokens_total": "prefix_queried_tokens",
    "busload_prefix_cache_hit_tokens_total": "prefix_hit_tokens",
    "busload_bytes_moved_total": "bytes_moved",
    "busload_engine_clock_seconds": "clock",
    "busload_batch_seconds_total": "batch_seconds",
    "busload_queue_seconds_total": "queue_seconds",
    "busload_kv_token_seconds_total": "kv_token_seconds",
    "busload_queued_prompt_tokens": "queued_prompt_tokens",
    "busload_kv_blocks": "kv_blocks",
    "busload_kv_blocks_free": "kv_blocks_free",
}
_FROM_LIMITS: dict[str, str] = {
    "busload_limit_max_sequence_length": "max_sequence_length",
    "busload_limit_batch_size": "batch_size",
    "busload_limit_kv_cache_percent": "kv_cache_percent",
    "busload_limit_token_budget": "token_budget",
    "busload_limit_queued_requests": "max_queued_requests",
    "busload_limit_queued_tokens": "max_queued_tokens",
}
_OTHER_TENANTS = "other"
_MAX_TENANTS = 100
_BY_NAME = {metric.name: metric for metric in METRICS}


class Metrics(Collector):
    """Own counters and histograms, and a view of the engine's newest numbers. Used from the event loop's thread."""

    def __init__(self, model_name: str) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.limits: Limits | None = None
        self.pace = Pace()
        self.generation = 0
        self.stats: Stats | None = None
        self.ready: Ready | None = None
        self.engine_pid: int | None = None
        self._bandwidth = BandwidthUse()
        self._model_name = model_name
        self._registry = CollectorRegistry()
        self.arrived = self._counter("busload_requests_arrived_total")
        self.prompt_tokens_arrived = self._counter("busload_prompt_tokens_arrived_total")
        self.finished_prompt_tokens = self._counter("busload_finished_prompt_tokens_total")
        self.finished_kv_token_steps = self._counter("busload_finished_kv_token_steps_total")
        judged, missed = (self._counter(f"busload_objective_{what}_total") for what in ("requests", "misses"))
        self._judged = {objective: judged.labels(objective) for objective in OBJECTIVES}
        self._missed = {objective: missed.labels(objective) for objective in OBJECTIVES}
        self.api_keys = 0
        """Keys in force."""
        self.api_keys_errors = self._counter("busload_api_keys_errors_total")
        self.limits_errors = self._counter("busload_limits_errors_total")
        self._refused = self._counter("busload_requests_refused_total")
        self._finished = self._counter("busload_requests_finished_total")
        self._tenant_tokens = self._counter("busload_tenant_tokens_total")
        self._tenants = {_OTHER_TENANTS}
        self._tenant_tokens.labels(_OTHER_TENANTS)
        for reason in REFUSAL_REASONS:
            self._refused.labels(reason)
        for reason in FINISH_REASONS:
            self._finished.labels(reason)
        self.time_to_first_token = self._histogram("busload_time_to_first_token_seconds")
        self.inter_token_latency = self._histogram("busload_inter_token_latency_seconds")
        self.queue_wait = self._histogram("busload_queue_wait_seconds")
        self.prompt_length = self._histogram("busload_prompt_length_tokens")
        self.output_length = self._histogram("busload_output_length_tokens")
        self.sequence_length = self._histogram("busload_sequence_length_tokens")
        self.answers_cut = self._counter("busload_answers_cut_total")
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        ProcessCollector(namespace="busload_engine", pid=self._engine_pid, registry=self._registry)

    def observe(self, stats: Stats) -> None:
        """Takes the engine's newest snapshot in."""
        self.stats = stats
        self._bandwidth.add(stats)

    def refused(self, reason: str) -> None:
        """Counts a refusal; `reason` is one of `REFUSAL_REASONS`."""
        self._refused.labels(reason).inc()

    def finished(self, reason: str) -> None:
        """Counts an ended request; `reason` is one of `FINISH_REASONS`."""
        self._finished.labels(reason).inc()

    def name_tenants(self, names: Iterable[str]) -> None:
        """Gives these tenants a series of their own, as far as there is room. Never names that a client chose."""
        for name in sorted(names):
            if len(self._tenants) <= _MAX_TENANTS and name not in self._tenants:
                self._tenants.add(name)
                self._tenant_tokens.labels(name)

    def served(self, tenant: str, tokens: int) -> None:
        """Counts the tokens of an ended request."""
        self._tenant_tokens.labels(tenant if tenant in self._tenants else _OTHER_TENANTS).inc(tokens)

    def judge(self, objective: str, seconds: float) -> None:
        """Counts a request by one of `OBJECTIVES`; without effect while that one is not known."""
        limit = getattr(self.pace, objective)
        if limit is not None:
            self._judged[objective].inc()
            if seconds > limit:
                self._missed[objective].inc()

    def render(self) -> bytes:
        """The text exposition."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Family]:
        """The families that are levels or that the engine counts."""
        for name, field in _FROM_STATS.items():
            yield _family(_BY_NAME[name], [((), _field(self.stats, field))])
        for name, field in _FROM_LIMITS.items():
            yield _family(_BY_NAME[name], [((), _field(self.limits, field))])
        pace, law = self.pace, self.pace.law
        yield _family(_BY_NAME["busload_objective_seconds"], [((o,), getattr(pace, o) or 0.0) for o in OBJECTIVES])
        yield _family(_BY_NAME["busload_step_law_seconds"], [((c,), _field(law, c)) for c in COEFFICIENTS])
        probed = (self.ready and self.ready.step_law) or (0.0,) * len(COEFFICIENTS)
        name = "busload_probed_step_law_seconds"
        yield _family(_BY_NAME[name], [((c,), value) for c, value in zip(COEFFICIENTS, probed, strict=True)])
        for name, (labels, value) in self._levels().items():
            yield _family(_BY_NAME[name], [(labels, value)])

    def _levels(self) -> dict[str, tuple[tuple[str, ...], float]]:
        model = (self._model_name,)
        stats, ready = self.stats, self.ready
        blocks = stats.kv_blocks if stats else 0
        used = blocks - stats.kv_blocks_free if stats else 0
        block_size = ready.block_size if ready else 0
        return {
            "vllm:num_requests_waiting": (model, _field(stats, "waiting")),
            "vllm:num_requests_running": (model, _field(stats, "running")),
            "vllm:kv_cache_usage_perc": (model, used / blocks if blocks else 0.0),
            "vllm:cache_config_info": ((self._model_name, str(block_size), str(blocks)), 1.0),
            "vllm:lora_requests_info": (("0", "", ""), time.time()),
            "busload_kv_block_size_tokens": ((), block_size),
            "busload_kv_bytes_per_token": ((), ready.bytes_per_block / block_size if ready else 0.0),
            "busload_memory_budget_bytes": ((), _field(ready, "memory_budget_bytes")),
            "busload_weight_bytes": ((), _field(ready, "weight_bytes")),
            "busload_copy_bandwidth_bytes_per_second": ((), _field(ready, "copy_bandwidth")),
            "busload_model_bandwidth_utilization": (
                (),
                self._bandwidth.share(stats, _field(ready, "copy_bandwidth")),
            ),
            "busload_limits_generation": ((), self.generation),
            "busload_api_keys": ((), self.api_keys),
            "busload_probed_batch": ((), _field(ready, "probed_batch")),
        }

    def _engine_pid(self) -> int:
        # An unreadable pid makes the library leave the engine's process metrics out.
        return self.engine_pid if self.engine_pid is not None else -1

    def _counter(self, name: str) -> Counter:
        metric = _BY_NAME[name]
        return Counter(metric.name, metric.help, metric.labels, registry=self._registry)

    def _histogram(self, name: str) -> Histogram:
        histogram = Histogram(_BY_NAME[name])
        self._registry.register(histogram)
        return histogram


def _field(source: object, name: str) -> float:
    return float(getattr(source, name)) if source is not None else 0.0


def _family(metric: Metric, samples: Iterable[tuple[tuple[str, ...], float]]) -> Family:
    make: Callable[..., CounterMetricFamily | GaugeMetricFamily]
    make = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = make(metric.name, metric.help, labels=metric.labels)
    for labels, value in samples:
        family.add_metric(labels, value)
    return family
