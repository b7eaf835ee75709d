"""Health: answers from state alone, so that a busy engine or a long queue can never make a probe time out."""

from fastapi import APIRouter
from starlette.responses import JSONResponse

from busload_runtime.server.service import Service


def health_routes(service: Service) -> APIRouter:
    """`/health/startup`, `/health/ready`, `/health/live`; 200 or 503 with the reason.

    `/health` is another name of the second: clients of llama.cpp and vLLM ask it whether requests are answered now."""
    routes = APIRouter(prefix="/health")

    @routes.get("/startup")
    async def startup() -> JSONResponse:
        """200 once the model is loaded and a real token was produced."""
        return _answer(_not_started(service))

    @routes.get("")
    @routes.get("/ready")
    async def ready() -> JSONResponse:
        """200 while new requests are welcome."""
        return _answer(_not_started(service) or _not_welcoming(service))

    @routes.get("/live")
    async def live() -> JSONResponse:
        """503 when the engine is gone: it died, or made no step for --engine-timeout while work waits."""
        return _answer(_dead(service))

    return routes


def _dead(service: Service) -> str | None:
    return None if service.engine.alive else f"the engine is gone: {service.engine.failed.result()}"


def _not_started(service: Service) -> str | None:
    if service.text is None or service.ready is None:
        return _dead(service) or "the model is loading"
    return None


def _not_welcoming(service: Service) -> str | None:
    if service.admission.draining:
        return "draining: finishing what runs, then exit"
    if service.quiescing:
        return "quiescing: still serving, but about to shut down"
    return _dead(service)


def _answer(problem: str | None) -> JSONResponse:
    if problem is None:
        return JSONResponse({"status": "ok"})
    return JSONResponse({"status": "unavailable", "reason": problem}, status_code=503)
