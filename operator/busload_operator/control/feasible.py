"""Whether a service can be had as its spec asks: the figures that are known, put to the planner. Pure."""

from busload_operator.control.service import Service
from busload_operator.resources.initial_limits import budget, known_facts, shortest_plan
from busload_operator.tuning.feasible import Bandwidth, Feasibility, Reported, judge

_GPU_MEMORY_UNKNOWN = (
    "how much memory the GPU has is not known before the first pod is ready; to have it planned before, give "
    "spec.resources.gpuMemory what a replica may use of it."
)


def feasibility(service: Service, reported: Reported | None, nodes_bandwidth: float | None) -> Feasibility:
    """`reported` is what pods of the service have said so far; `nodes_bandwidth` what the operator was told of its
    nodes, in bytes per second. A bundled model's figures are known before there are pods."""
    spec = service.parsed.spec
    facts = known_facts(spec) or (reported and reported.facts)
    bandwidth = None
    if reported is not None:
        bandwidth = Bandwidth(reported.copy_bandwidth, "measured by its pods")
    elif nodes_bandwidth is not None:
        bandwidth = Bandwidth(nodes_bandwidth, "BUSLOAD_MEMORY_BANDWIDTH")
    available = budget(spec) or (reported and reported.budget)
    if facts is not None and available is None:
        return Feasibility(None, "GpuMemoryUnknown", _GPU_MEMORY_UNKNOWN)
    plan = shortest_plan(spec, facts, available) if facts and available else None
    return judge(
        plan, service.parsed.spec.bounds.max_sequence_length.max, service.objectives.inter_token_latency, bandwidth
    )
