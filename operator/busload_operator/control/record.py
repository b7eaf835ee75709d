"""Recordings of what the tuning core saw: a file for each service in one directory, bounded in size.

A recording is never a reason to stop: what cannot be written is logged once, and tried again with the next step.
"""

import logging
import os
from datetime import UTC, datetime
from pathlib import Path

from busload_operator.control.kinds import Key
from busload_operator.control.logs import about
from busload_operator.tuning.recording import header, line
from busload_operator.tuning.state import State
from busload_operator.tuning.types import Inputs, Result

log = logging.getLogger(__name__)


class Recording:
    """The recording of one service: NAMESPACE.NAME.jsonl and, before it, NAMESPACE.NAME.1.jsonl.

    Both together hold at most `max_bytes`, but a single step more. One process writes at a time: the leader.
    """

    def __init__(self, directory: Path, key: Key, max_bytes: int):
        self._key, self._max_bytes = key, max_bytes
        self._path = directory / f"{key.namespace}.{key.name}.jsonl"
        self._before = directory / f"{key.namespace}.{key.name}.1.jsonl"
        self._state: State | None = None
        """After the last step that was written; the next one belongs to it only if it starts from there."""
        self._inputs: Inputs | None = None
        self._size = -1
        self._failed = False

    def add(self, state: State, inputs: Inputs, result: Result, after: State) -> None:
        """One step: `state` before and `after` it."""
        try:
            self._add(state, inputs, result)
            self._state, self._inputs, self._failed = after, inputs, False
        except OSError as error:
            self._state = None
            if not self._failed:
                log.warning("recording is interrupted: %s", error, extra=about(*self._key))
            self._failed = True

    def _add(self, state: State, inputs: Inputs, result: Result) -> None:
        if self._size < 0:
            self._size = _whole_lines(self._path)
        if self._size > self._max_bytes // 2:
            os.replace(self._path, self._before)
            self._size, self._state = 0, None
        goes_on = self._state is state
        text = line(inputs, self._inputs if goes_on else None, result) + "\n"
        if not goes_on:
            started = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            text = header(f"{self._key.namespace}/{self._key.name}", started, state) + "\n" + text
        self._write(text.encode())

    def _write(self, data: bytes) -> None:
        """Appends all of it, or leaves the file as it was."""
        with open(self._path, "ab") as file:
            try:
                file.write(data)
                file.flush()
            except OSError:
                os.truncate(self._path, self._size)
                raise
        self._size += len(data)


def _whole_lines(path: Path) -> int:
    """Bytes of the file after what a killed process left of its last line is cut off; 0 when there is none."""
    try:
        with open(path, "rb+") as file:
            end = file.seek(0, os.SEEK_END)
            while end > 0:
                start = max(0, end - 65536)
                file.seek(start)
                found = file.read(end - start).rfind(b"\n")
                if found >= 0:
                    end = start + found + 1
                    break
                end = start
            file.truncate(end)
            return end
    except FileNotFoundError:
        return 0
