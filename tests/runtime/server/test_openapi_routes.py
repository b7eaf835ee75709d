from typing import Any

from busload_runtime.contract import Limits
from busload_runtime.server.admission import Admission
from busload_runtime.server.app import build_routes
from busload_runtime.server.metrics import Metrics
from busload_runtime.server.openapi import OPERATIONS
from busload_runtime.server.service import Service


def test_each_route_is_in_the_document_and_nothing_else() -> None:
    engine: Any = None
    service = Service("m", Metrics("m"), Admission(Limits(2048, 4, 90, 512, 2, 100)), engine)
    known = build_routes(service).openapi()["paths"]  # FastAPI's own document of its routes
    routes = {(method, path) for path, methods in known.items() for method in methods}
    assert routes == {(operation.method, operation.path) for operation in OPERATIONS}
