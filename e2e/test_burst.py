"""The point of it all: a burst meets a batch limit of 4, and the operator raises the limit before it buys a replica."""

from datetime import datetime
from typing import Any

from e2e import services
from e2e.access import Cluster, wait_for


def test_a_burst_raises_the_batch_limit_first(operator: Cluster, namespace: str) -> None:
    services.apply(operator, namespace, services.manifest("chat"))
    services.wait_ready(operator, namespace, "chat")
    load = services.Load(operator, namespace, "chat", requests=100000, concurrency=32, output_tokens=128)

    def settled() -> dict[str, Any] | None:
        decisions = services.get(operator, namespace, "chat")["status"].get("decisions", [])
        first = next((d for d in reversed(decisions)), None)
        return first if first and first["outcome"]["verdict"] != "Pending" else None

    try:
        first = wait_for(settled, 180, "the first decision's outcome", every=1)
    finally:
        load.process.terminate()
    report = load.report()
    assert report.errors == []
    assert first["knob"] == "batchSize", first
    assert int(first["from"]) == 4
    assert int(first["to"]) > 4
    assert {"batch", "queueDepth", "wait"} <= {i["name"] for i in first["inputs"]}
    assert first["prediction"].get("tokensPerSecond")
    assert first["outcome"]["verdict"] == "Confirmed", str(first)

    for when in ("before", "after"):
        window = first["outcome"][f"{when}Window"]
        start, end = (datetime.fromisoformat(t).timestamp() for t in (window["from"], window["to"]))
        told = float(first["outcome"][f"tokensPerSecond{when.capitalize()}"])
        seen = report.rate_between(start, end)
        assert abs(told - seen) <= 0.15 * seen, f"{when}: status says {told}, the client saw {seen:.1f} tokens/s"
