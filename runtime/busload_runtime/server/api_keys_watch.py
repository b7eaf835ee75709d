"""Keeps the API keys as the mounted file has them. One that cannot be used changes nothing: the last good one holds."""

import asyncio
from pathlib import Path

from busload_runtime.server.api_keys import MAX_BYTES, KeysError, parse_keys
from busload_runtime.server.log import write_line
from busload_runtime.server.service import Service
from busload_runtime.server.small_file import read_small_file

_POLL_SECONDS = 1.0


class ApiKeysWatch:
    """Reads the file each second and compares its content: a mounted Secret changes by a swap of links."""

    def __init__(self, path: Path, service: Service) -> None:
        self._path = path
        self._service = service
        self._seen: bytes | str | None = None
        """What was found last: content, or why there was none."""

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self.poll()
            await asyncio.sleep(_POLL_SECONDS)

    def poll(self) -> None:
        """One look at the file."""
        found: bytes | str
        try:
            found = read_small_file(self._path, MAX_BYTES)
        except OSError as error:
            found = f"{self._path} cannot be read: {error.strerror}"
        if found == self._seen:
            return
        self._seen = found
        try:
            if isinstance(found, str):
                raise KeysError(found)
            keys = parse_keys(found)
        except KeysError as error:
            self._service.metrics.api_keys_errors.inc()
            _log(f"refused, the keys that were in force stay: {error}")
            return
        if keys != self._service.keys:
            self._service.on_keys(keys)
            _log(f"{len(keys.entries)} keys of {keys.tenants} tenants in force")


def _log(text: str) -> None:
    write_line(f"busload serve: API keys: {text}")
