"""Watches the limits file and has the engine apply what it says."""

import asyncio
from pathlib import Path

from busload_runtime.contract import LimitsDocument, LimitsError
from busload_runtime.engine.messages import LimitsRefused
from busload_runtime.server.limits_file import parse_limits_file, read_limits
from busload_runtime.server.log import write_line
from busload_runtime.server.service import Service

# The kubelet swaps a symlink when a mounted ConfigMap changes, and inotify does not follow symlinks: so poll.
_POLL_SECONDS = 0.5


class LimitsWatch:
    """Keeps the engine at the newest usable document. One that is malformed or impossible changes nothing."""

    def __init__(self, path: Path, pod_name: str, service: Service, applied: LimitsDocument) -> None:
        self._path = path
        self._pod_name = pod_name
        self._service = service
        self._applied = applied
        self._seen: bytes | None = None
        self._missing = False

    async def run(self) -> None:
        """Polls until cancelled, or until the engine is gone."""
        while self._service.engine.alive:
            await self.poll()
            await asyncio.sleep(_POLL_SECONDS)

    async def poll(self) -> None:
        """One look at the file. It is small, so its content is compared: no change is missed, whatever its mtime."""
        try:
            content = read_limits(self._path)
        except OSError as error:
            if not self._missing:
                _log(f"{self._path} cannot be read ({error.strerror}); generation {self._applied.generation} stays")
            self._missing = True
            return
        if self._missing:
            _log(f"{self._path} can be read again")
            self._missing = False
        if content == self._seen:
            return
        self._seen = content
        try:
            document = parse_limits_file(content)
        except LimitsError as error:
            self._refuse(str(error))
            return
        await self._apply(document)

    async def _apply(self, document: LimitsDocument) -> None:
        limits, pace = document.for_pod(self._pod_name), document.pace
        known = document.generation == self._applied.generation and limits == self._service.limits
        if known and pace == self._service.pace:
            self._applied = document
            return
        try:
            answer = await self._service.engine.apply(document.generation, limits, pace)
        except ConnectionError:
            return  # the engine is gone, and so is soon this process
        if isinstance(answer, LimitsRefused):
            self._refuse(f"generation {document.generation}: {answer.reason}")
            return
        self._applied = document
        repaced = pace != self._service.pace
        self._service.on_limits(document.generation, limits, pace)
        if repaced:
            _log(f"objectives and step law applied: {pace.to_json() or 'none'}")
        if known:
            return
        trial = " (on trial in this pod)" if document.trial is not None and limits is document.trial else ""
        _log(f"generation {document.generation} applied{trial}: {limits.to_json()}")

    def _refuse(self, reason: str) -> None:
        self._service.metrics.limits_errors.inc()
        _log(f"refused, generation {self._applied.generation} stays: {reason}")


def _log(text: str) -> None:
    write_line(f"busload serve: limits: {text}")
