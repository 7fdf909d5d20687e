"""The timeline of Horovod: a file in Chrome's trace format (chrome://tracing, Perfetto)."""

from __future__ import annotations

import json
import threading
import time
from typing import TextIO

__all__ = ["Timeline"]


class Timeline:
    """What this rank submitted, how long it waited for others, and how long it took.

    Not collective. Each key is a row of the timeline: NEGOTIATE is the time from its submission to
    its start, the operation's own name the time from there to its end.

    Args:
        path: of the file, which is replaced.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: str) -> None:
        self._file: TextIO | None = open(path, "w", encoding="utf-8")  # noqa: SIM115
        self._file.write("[")
        self._rows: dict[str, int] = {}
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._first = True

    def begin(self, key: str, name: str) -> None:
        """Write that `name` begins in the row of `key`."""
        self._event(key, {"ph": "B", "name": name.upper()})

    def end(self, key: str) -> None:
        """Write that the last that has begun in the row of `key` ends."""
        self._event(key, {"ph": "E"})

    def close(self) -> None:
        """Complete the file. Harmless when called twice."""
        with self._lock:
            if self._file is not None:
                self._file.write("\n]\n")
                self._file.close()
                self._file = None

    def _event(self, key: str, event: dict[str, object]) -> None:
        with self._lock:
            if self._file is None:
                return
            row = self._rows.get(key)
            if row is None:
                row = self._rows[key] = len(self._rows) + 1
                self._write({"ph": "M", "name": "process_name", "pid": row, "args": {"name": key}})
            micros = int((time.monotonic() - self._began) * 1e6)
            self._write({**event, "pid": row, "tid": 0, "ts": micros})

    def _write(self, event: dict[str, object]) -> None:
        assert self._file is not None
        self._file.write(("\n" if self._first else ",\n") + json.dumps(event))
        self._first = False
