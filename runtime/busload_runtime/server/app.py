"""The FastAPI app: routes, and errors in one shape whatever went wrong."""

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from busload_runtime.server import metrics
from busload_runtime.server.answer import answer
from busload_runtime.server.chat import CHAT
from busload_runtime.server.completions import COMPLETIONS
from busload_runtime.server.edge import Edge
from busload_runtime.server.errors import ApiError
from busload_runtime.server.health import health_routes
from busload_runtime.server.openapi import document
from busload_runtime.server.service import Service
from busload_runtime.server.tokens import TokenRoutes

# What else the OpenAI API has, and its relatives: people try them.
_OTHER_APIS = tuple(
    f"/v1/{name}"
    for name in (
        *("embeddings", "responses", "conversations", "realtime", "messages", "audio", "images", "videos"),
        *("moderations", "rerank", "score", "assistants", "threads", "vector_stores"),
        *("files", "uploads", "batches", "fine_tuning", "evals", "containers"),
    )
)


def build_app(service: Service) -> ASGIApp:
    """The ASGI app of `busload serve`."""
    return Edge(build_routes(service), service)


def build_routes(service: Service) -> FastAPI:
    """Its routes; `openapi.py` describes each."""
    app = FastAPI(title="busload", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.include_router(health_routes(service))
    _add_api(app, service)
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_crash)
    return app


def _add_api(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await answer(COMPLETIONS, service, request)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await answer(CHAT, service, request)

    @app.get("/openapi.json")
    async def openapi() -> Response:
        return Response(document(), media_type="application/json")

    tokens = TokenRoutes(service)
    app.post("/tokenize")(tokens.tokenize)
    app.post("/detokenize")(tokens.detokenize)

    @app.get("/v1/models")
    async def models() -> JSONResponse:
        return JSONResponse({"object": "list", "data": [_model(service)]})

    @app.get("/v1/models/{name:path}")
    async def model(request: Request) -> JSONResponse:
        # Not as a parameter: for the first one FastAPI imports pydantic's old version, which a start would wait for.
        service.check_model(request.path_params["name"])
        return JSONResponse(_model(service))

    @app.get("/metrics")
    async def scrape() -> Response:
        return Response(service.metrics.render(), media_type=metrics.CONTENT_TYPE)


def _model(service: Service) -> dict[str, object]:
    return {
        "id": service.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "busload",
        "max_model_len": service.limits.max_sequence_length,
    }


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path, method = request.url.path[:200], request.method
    if error.status_code == 404 and path.startswith(_OTHER_APIS):
        # Not 501: clients take that for a fault that passes, and try again.
        return ApiError(
            404,
            f"this server has no {path}: it generates text, with /v1/chat/completions and /v1/completions; "
            "/openapi.json describes all it has",
            code="unsupported_endpoint",
        ).response()
    if error.status_code == 404:
        return ApiError(
            404,
            f"there is no {method} {path}; /openapi.json describes all there is",
            code="not_found",
        ).response()
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        response = ApiError(405, f"{path} takes {allowed}, not {method}", code="method_not_allowed").response()
        response.headers["allow"] = allowed
        return response
    return ApiError(error.status_code, str(error.detail), code="invalid_http").response()


async def _on_crash(request: Request, error: Exception) -> Response:
    return ApiError(500, "the server failed on this request; its log says why", code="internal_error").response()
