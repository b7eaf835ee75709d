"""Kills for memory, as a pod's status tells them."""

from typing import Any

import pytest
from control_helpers import pod

from busload_operator.control.pods import memory_kills

OOM = {"terminated": {"reason": "OOMKilled", "exitCode": 137}}
ERROR = {"terminated": {"reason": "Error", "exitCode": 1}}


@pytest.mark.parametrize(
    ("statuses", "kills"),
    [
        ([], 0),
        ([{"restartCount": 0, "state": {"running": {}}}], 0),
        ([{"restartCount": 0, "state": OOM}], 1),
        ([{"restartCount": 1, "state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": OOM}], 1),
        ([{"restartCount": 4, "state": {"running": {}}, "lastState": OOM}], 4),
        ([{"restartCount": 4, "state": OOM, "lastState": OOM}], 5),
        ([{"restartCount": 4, "state": ERROR, "lastState": OOM}], 0),
        ([{"restartCount": 2, "state": {"running": {}}, "lastState": ERROR}], 0),
    ],
)
def test_kills_for_memory_are_counted_once(statuses: list[dict[str, Any]], kills: int) -> None:
    """The count does not change while the kubelet starts the container again."""
    assert memory_kills(pod("chat-0", containerStatuses=statuses)) == kills


def test_a_kill_of_a_pod_on_a_gpu_says_nothing_of_its_cache() -> None:
    killed = pod("chat-0", containerStatuses=[{"restartCount": 0, "state": OOM}])
    on_gpu = {**killed, "spec": {"containers": [{"resources": {"limits": {"nvidia.com/gpu": "1"}}}]}}
    assert (memory_kills(killed), memory_kills(on_gpu)) == (1, 0)
