"""Errors as the OpenAI API words them: {"error": {"message", "type", "param", "code"}}."""

from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from starlette.responses import JSONResponse

ErrorCode = Literal[
    "invalid_http",
    "invalid_json",
    "invalid_value",
    "missing_required_parameter",
    "unsupported_parameter",
    "invalid_grammar",
    "context_length_exceeded",
    "invalid_api_key",
    "not_found",
    "model_not_found",
    "unsupported_endpoint",
    "method_not_allowed",
    "body_timeout",
    "deadline_exceeded",
    "stalled",
    "request_too_large",
    "unsupported_content_encoding",
    "queue_full",
    "tenant_limit",
    "grammar_queue_full",
    "request_head_too_large",
    "engine_error",
    "internal_error",
    "loading",
    "draining",
    "engine_busy",
]
"""What programs tell errors apart by; `openapi.CODES` says what each means."""
RefusalReason = Literal["invalid", "too_long", "queue_full", "tenant_limit", "unauthorized", "draining"]


class StartupError(Exception):
    """`busload serve` cannot start: one line that says what is wrong and what to do; exit code 2."""


class ApiError(Exception):
    """An answer other than 2xx. `reason` is the label under which the refusal is counted, if it is one; without `retry`
    clients are told that another try is pointless."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: ErrorCode,
        param: str | None = None,
        reason: RefusalReason | None = None,
        retry_after: int | None = None,
        retry: bool = True,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.reason = reason
        self.retry_after = retry_after
        self.retry = retry

    @property
    def type(self) -> str:
        if self.status == 429:
            return "rate_limit_error"
        if self.status == 408:
            return "timeout_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        headers = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        if self.status == 415:
            headers["accept-encoding"] = "identity"
        return headers if self.retry else headers | {"x-should-retry": "false"}

    def response(self) -> "JSONResponse":
        from starlette.responses import JSONResponse  # here: the start needs the errors, and must not wait for it

        return JSONResponse(self.body(), status_code=self.status, headers=self.headers())


def invalid(message: str, param: str | None = None, code: ErrorCode = "invalid_value") -> ApiError:
    """A 400 for a request that can never work as it is."""
    return ApiError(400, message, param=param, code=code, reason="invalid")


def too_long(message: str, param: str) -> ApiError:
    """A 400 for a prompt that does not fit the sequence limit."""
    return ApiError(400, message, param=param, code="context_length_exceeded", reason="too_long")
