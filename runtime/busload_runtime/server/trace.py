"""One HTTP request as the log and a span tell it."""

from dataclasses import dataclass

from busload_runtime.server.tenants import ANYBODY, Tenant


@dataclass(slots=True)
class Trace:
    """What routes know of a request, filled in on its way. Times in seconds, `arrival` on `time.monotonic`."""

    id: str
    arrival: float
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    queue_seconds: float | None = None
    """Arrival to the first step."""
    first_token_seconds: float | None = None
    """Arrival to the first token."""
    reason: str | None = None
    """Why it ended: finish reasons of its choices, or the code of a refusal or an error."""
    tenant: Tenant = ANYBODY
    promised: bool = False
    """It came on a connection that an earlier answer let the client keep."""
    prompts: list[str] | None = None
    """Only where the log is to show them."""
