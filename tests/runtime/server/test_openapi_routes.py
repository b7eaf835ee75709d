from typing import Any, get_args

from busload_runtime.contract import Limits
from busload_runtime.server.admission import Admission
from busload_runtime.server.app import build_routes
from busload_runtime.server.errors import ErrorCode
from busload_runtime.server.metrics import Metrics
from busload_runtime.server.openapi import CODES, OPERATIONS
from busload_runtime.server.service import Service


def test_each_code_and_status_has_a_meaning() -> None:
    assert set(CODES) == set(get_args(ErrorCode))
    declared = {status for operation in OPERATIONS for status in operation.errors} | {400, 405, 431}
    assert {status for statuses, _ in CODES.values() for status in statuses} == declared


def test_each_route_is_in_the_document_and_nothing_else() -> None:
    engine: Any = None
    service = Service("m", Metrics("m"), Admission(Limits(2048, 4, 90, 512, 2, 100)), engine)
    known = build_routes(service).openapi()["paths"]  # FastAPI's own document of its routes
    routes = {(method, path) for path, methods in known.items() for method in methods}
    assert routes == {(operation.method, operation.path) for operation in OPERATIONS}
