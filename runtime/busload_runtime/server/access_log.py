"""One line per request, as JSON for machines or as text for people; prompts only where asked for, output never."""

import json
import time
from typing import Any, Literal, get_args

from busload_runtime.server.log import write_line
from busload_runtime.server.tenants import ANYBODY
from busload_runtime.server.trace import Trace

Format = Literal["json", "text"]
FORMATS: tuple[str, ...] = get_args(Format)
MAX_PROMPT_CHARACTERS = 10_000
_MAX_PATH = 200

# Field and unit of what the line of text shows, in its order.
_TEXT = (
    ("prompt_tokens", "prompt", ""),
    ("cached_tokens", "cached", ""),
    ("output_tokens", "output", ""),
    ("queue_seconds", "queue", " s"),
    ("ttft_seconds", "first token", " s"),
    ("seconds", "whole", " s"),
)


def log_request(method: str, path: str, status: int, trace: Trace, form: str) -> None:
    """Writes the line; `form` is one of `FORMATS`. `status` 0: the client left before there was one."""
    known: dict[str, Any] = {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "id": trace.id,
        "method": method,
        "path": path[:_MAX_PATH],
        "tenant": None if trace.tenant is ANYBODY else trace.tenant.label,
        "status": status,
        "prompt_tokens": trace.prompt_tokens,
        "cached_tokens": trace.cached_tokens,
        "output_tokens": trace.output_tokens,
        "queue_seconds": _rounded(trace.queue_seconds),
        "ttft_seconds": _rounded(trace.first_token_seconds),
        "seconds": _rounded(time.monotonic() - trace.arrival),
        "reason": trace.reason,
        "prompts": trace.prompts,
    }
    line = {key: value for key, value in known.items() if value is not None}
    write_line(json.dumps(line) if form == "json" else _text(line))


def _text(line: dict[str, Any]) -> str:
    # Paths and prompts are written as JSON strings: a line break that a client chose must not begin another entry.
    parts = [line["time"], line["method"], json.dumps(line["path"])[1:-1], str(line["status"]), line.get("reason", "")]
    parts += [f"{name} {line[field]}{unit}" for field, name, unit in _TEXT if field in line]
    parts += [f"{name} {line[name]}" for name in ("tenant", "id") if name in line]
    parts += [f"prompts {json.dumps(line['prompts'])}"] if "prompts" in line else []
    return "  ".join(part for part in parts if part)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)
