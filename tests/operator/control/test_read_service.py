"""What the tuner is told of a spec."""

from typing import Any

import pytest
from control_helpers import service

from busload_operator.control.service import read_service
from busload_operator.tuning import Objectives


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ({}, Objectives(2.0, 0.1, 0.99)),
        ({"timeToFirstToken": "500ms", "interTokenLatency": "45ms", "percentile": 95}, Objectives(0.5, 0.045, 0.95)),
    ],
)
def test_objectives_are_seconds_and_a_share_of_requests(spec: dict[str, Any], told: Objectives) -> None:
    obj = service(objectives=spec)
    obj["metadata"] |= {"uid": "u1", "generation": 1, "resourceVersion": "1"}
    assert read_service(obj).objectives == told
