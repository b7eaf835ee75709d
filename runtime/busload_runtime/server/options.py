"""The flags of `busload serve`."""

import math
import re
from dataclasses import dataclass, fields
from pathlib import Path

from busload_runtime.contract import Limits, LimitsDocument, LimitsError, Pace, parse_limits
from busload_runtime.server.access_log import FORMATS
from busload_runtime.server.deadline import MAX_SECONDS, Timeouts
from busload_runtime.server.errors import StartupError
from busload_runtime.server.limits_file import parse_limits_file, read_limits

_LEAST_OBJECTIVE, _MOST_OBJECTIVE = 0.0001, 3600.0


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Everything `busload serve` was told. `limits` holds the limits flags, used when there is no limits file."""

    model: str
    served_model_name: str
    host: str
    port: int
    executor: str
    kv_precision: str | None
    weight_precision: str | None
    device: str | None
    allow_int4: bool
    memory: int | None
    limits_file: Path | None
    pod_name: str
    limits: Limits
    drain_seconds: float
    engine_timeout: float
    time_to_first_token: float | None
    inter_token_latency: float | None
    timeouts: Timeouts
    api_keys_file: Path | None
    tenant_header: str
    log_format: str
    log_prompts: bool
    otlp_endpoint: str

    def check(self) -> None:
        """Raises `StartupError` naming the flag, its value and what is allowed. The limits have their own check."""
        # It goes into every answer, metric label and log line: only what is Unicode and shows.
        if not self.served_model_name.isprintable() or not 0 < len(self.served_model_name) <= 256:
            raise StartupError(
                f"--served-model-name must have 1 to 256 printable characters, got {self.served_model_name!r:.300}"
            )
        if not 0 <= self.port <= 65535:
            raise StartupError(f"--port must be from 0 to 65535 (0 takes a free one), got {self.port}")
        if self.memory is not None and self.memory < 1:
            raise StartupError(f"--memory must be a positive number of bytes, got {self.memory}")
        if not 0 <= self.drain_seconds < math.inf:
            raise StartupError(f"--drain-seconds must be 0 or more, got {self.drain_seconds:g}")
        if not re.fullmatch(r"[A-Za-z0-9-]{0,64}", self.tenant_header):
            raise StartupError(
                "--tenant-header must be a header's name of letters, digits and hyphens (empty: no header counts), "
                f"got {self.tenant_header!r:.80}"
            )
        for flag, seconds in (
            ("--time-to-first-token", self.time_to_first_token),
            ("--inter-token-latency", self.inter_token_latency),
        ):
            if seconds is not None and not _LEAST_OBJECTIVE <= seconds <= _MOST_OBJECTIVE:
                raise StartupError(
                    f"{flag} must be from {_LEAST_OBJECTIVE:g} to {_MOST_OBJECTIVE:g} seconds, got {seconds:g}"
                )
        for name in ("queue", "request", "token"):
            if not 0 < getattr(self.timeouts, name) <= MAX_SECONDS:
                raise StartupError(
                    f"--{name}-timeout must be above 0 and at most {MAX_SECONDS:.0f} seconds, "
                    f"got {getattr(self.timeouts, name):g}"
                )
        if self.log_format not in FORMATS:
            raise StartupError(f"--log-format must be {' or '.join(FORMATS)}, got {self.log_format!r:.80}")
        if self.otlp_endpoint and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise StartupError(
                "--otlp-endpoint must be the URL of a collector such as http://127.0.0.1:4318/v1/traces, "
                f"got {self.otlp_endpoint!r:.200}"
            )
        if not 1 <= self.engine_timeout < math.inf:
            raise StartupError(f"--engine-timeout must be 1 or more seconds, got {self.engine_timeout:g}")

    def first_document(self) -> LimitsDocument:
        """The limits to start with: the file's when one is named, else generation 0 from the flags.

        Raises `StartupError` when the file is missing or cannot be used: there is no last good document to fall
        back on, and guessing limits would hide the mistake.
        """
        if self.limits_file is None:
            try:
                pace = Pace(self.time_to_first_token, self.inter_token_latency)
                return parse_limits(LimitsDocument(0, self.limits, pace=pace).to_json())
            except LimitsError as error:
                raise StartupError(_by_flag(str(error))) from None
        try:
            return parse_limits_file(read_limits(self.limits_file))
        except OSError as error:
            raise StartupError(
                f"--limits-file {self.limits_file} cannot be read: {error.strerror}; mount it or drop the flag"
            ) from None
        except LimitsError as error:
            raise StartupError(f"--limits-file {self.limits_file}: {error}") from None


def _by_flag(message: str) -> str:
    """The message of a limits document, with the fields called as the flags are."""
    for name in (field.name for field in fields(Limits)):
        head, *tail = name.split("_")
        camel = head + "".join(word.capitalize() for word in tail)
        message = re.sub(rf"(default\.)?\b{camel}\b", f"--{name.replace('_', '-')}", message)
    return message
