"""The point of it all: a burst meets a small batch limit, and the operator raises the limit before it buys a replica.

The limit is 1 and the objective short, so that on a fast machine too most requests wait too long, and on one where a
place costs much a second one still brings more tokens per second.
"""

from datetime import datetime
from typing import Any

from e2e import services
from e2e.access import Cluster, wait_for


def test_a_burst_raises_the_batch_limit_first(operator: Cluster, namespace: str) -> None:
    small = services.manifest("chat", objectives={"timeToFirstToken": "200ms", "interTokenLatency": "5s"})
    small["spec"]["bounds"]["batchSize"]["initial"] = 1
    services.apply(operator, namespace, small)
    services.wait_ready(operator, namespace, "chat")
    load = services.Load(operator, namespace, "chat", requests=100000, concurrency=32, output_tokens=128)

    def settled() -> dict[str, Any] | None:
        decisions = services.get(operator, namespace, "chat")["status"].get("decisions", [])
        first = next((d for d in reversed(decisions)), None)
        return first if first and first["outcome"]["verdict"] != "Pending" else None

    try:
        first = wait_for(settled, 400, "the first decision's outcome", every=1)
    finally:
        load.process.terminate()
    report = load.report()
    assert report.errors == []
    assert first["knob"] == "batchSize", first
    assert int(first["from"]) == 1
    assert int(first["to"]) > 1
    assert {"batch", "queueDepth", "wait"} <= {i["name"] for i in first["inputs"]}
    assert first["prediction"].get("tokensPerSecond")
    assert first["outcome"]["verdict"] == "Confirmed", str(first)

    for when in ("before", "after"):
        window = first["outcome"][f"{when}Window"]
        start, end = (datetime.fromisoformat(t).timestamp() for t in (window["from"], window["to"]))
        told = float(first["outcome"][f"tokensPerSecond{when.capitalize()}"])
        seen = report.rate_between(start, end)
        assert abs(told - seen) <= 0.15 * seen, f"{when}: status says {told}, the client saw {seen:.1f} tokens/s"
