"""Structured logs: one JSON object per line on stderr, with namespace, name and generation where they are known."""

import json
import logging
import sys
from datetime import UTC, datetime

_FIELDS = ("namespace", "name", "generation")


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {
            field: record.__dict__[f"service_{field}"] for field in _FIELDS if f"service_{field}" in record.__dict__
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def about(namespace: str, name: str, generation: int | None = None) -> dict[str, object]:
    """The `extra` of a log call that concerns one service. (`name` alone is taken by the logging module.)"""
    fields: dict[str, object] = {"service_namespace": namespace, "service_name": name}
    return fields | ({"service_generation": generation} if generation is not None else {})


def configure(level: str) -> None:
    """Sends everything to stderr as JSON. kopf's line per handled event is left out."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    # kopf warns that it handles no signals, which is how it is meant here.
    quieter = {"kopf._core.reactor.running": logging.ERROR, "kopf.objects": logging.WARNING, "kopf": logging.INFO}
    for name, least in {**quieter, "asyncio": logging.WARNING, "aiohttp.access": logging.WARNING}.items():
        logging.getLogger(name).setLevel(max(least, root.level))
