from typing import Any

from e2e.access import unwilling


def node(**conditions: str) -> dict[str, Any]:
    return {
        "metadata": {"name": "node-1"},
        "status": {
            "conditions": [{"type": kind, "status": status, "message": "why"} for kind, status in conditions.items()]
        },
    }


def test_a_node_that_takes_no_pods_is_named_with_the_reason() -> None:
    assert unwilling([node(Ready="True", DiskPressure="False", MemoryPressure="False")]) == []
    assert unwilling([node(Ready="True", DiskPressure="True")]) == ["node-1: DiskPressure is True: why"]
    assert unwilling([node(Ready="Unknown", PIDPressure="False")]) == ["node-1: Ready is Unknown: why"]
