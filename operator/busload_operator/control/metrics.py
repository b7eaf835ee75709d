"""The operator's own metrics, named as controller-runtime names them where it has a name for the thing."""

import re

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

REGISTRY = CollectorRegistry()
CONTROLLER = "inferenceservice"
_LONG = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

RECONCILES = Counter(
    "controller_runtime_reconcile", "Reconciles by result.", ("controller", "result"), registry=REGISTRY
)
RECONCILE_ERRORS = Counter(
    "controller_runtime_reconcile_errors", "Reconciles that failed.", ("controller",), registry=REGISTRY
)
RECONCILE_SECONDS = Histogram(
    "controller_runtime_reconcile_time_seconds",
    "Length of a reconcile.",
    ("controller",),
    buckets=_LONG,
    registry=REGISTRY,
)
WORKERS = Gauge("controller_runtime_max_concurrent_reconciles", "Workers.", ("controller",), registry=REGISTRY)
ACTIVE_WORKERS = Gauge(
    "controller_runtime_active_workers", "Workers that work now.", ("controller",), registry=REGISTRY
)
DEPTH = Gauge("workqueue_depth", "Keys that are ready and wait for a worker.", ("name",), registry=REGISTRY)
OLDEST = Gauge("workqueue_oldest_seconds", "How long the oldest ready key has waited.", ("name",), registry=REGISTRY)
REQUESTS = Counter("rest_client_requests", "API requests.", ("verb", "resource", "code"), registry=REGISTRY)
REQUEST_SECONDS = Histogram(
    "rest_client_request_duration_seconds", "API request latency.", ("verb",), buckets=_LONG, registry=REGISTRY
)
LEADER = Gauge("leader_election_master_status", "1 while this process is the leader.", ("name",), registry=REGISTRY)
BUILD = Gauge("busload_operator_build_info", "Version of the operator; always 1.", ("version",), registry=REGISTRY)
SERVICES = Gauge("busload_operator_services", "InferenceServices known.", registry=REGISTRY)
SCRAPES = Counter("busload_operator_scrapes", "Scrapes of runtime pods.", ("result",), registry=REGISTRY)
DECISIONS = Counter("busload_operator_decisions", "Tuning decisions made.", ("knob",), registry=REGISTRY)
LAST_RESYNC = Gauge(
    "busload_operator_last_resync_timestamp_seconds", "When all objects were last listed.", registry=REGISTRY
)
WATCH_EVENTS = Counter("busload_operator_watch_events", "Watch events received.", ("resource",), registry=REGISTRY)

for _result in ("success", "requeue_after", "error"):
    RECONCILES.labels(CONTROLLER, _result)
for _result in ("success", "failure"):
    SCRAPES.labels(_result)
RECONCILE_ERRORS.labels(CONTROLLER)

_PATH = re.compile(r"^/(?:api|apis/[^/]+)/[^/]+(?:/namespaces/[^/]+)?/([a-z]+)(?:/[^/]+(?:/([a-z]+))?)?$")


def observe_request(verb: str, path: str, status: int, seconds: float) -> None:
    """Counts one API request. The resource comes from the path, without names; status 0 means no answer."""
    match = _PATH.match(path)
    resource = "/".join(part for part in match.groups() if part) if match else "discovery"
    REQUESTS.labels(verb, resource, str(status) if status else "<error>").inc()
    REQUEST_SECONDS.labels(verb).observe(seconds)
