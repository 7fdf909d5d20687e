"""The timeline of Horovod: a file in Chrome's trace format (chrome://tracing, Perfetto)."""

from __future__ import annotations

import json
import logging
import os
import threading
import time

__all__ = ["Timeline"]

logger = logging.getLogger("mpiddp.horovod")

_END = b"\n]\n"


class Timeline:
    """What this rank submitted, how long it waited for others, and how long it took.

    Not collective. Each key is a row of the timeline: NEGOTIATE is the time from its submission to
    its start, the operation's own name the time from there to its end. Each event is written when
    it happens, with the end of the file after it: what a killed process leaves is whole, too.

    Args:
        path: of the file, which is replaced.
        mark_cycles: whether to note when operations were decided on.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: str, mark_cycles: bool = False) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        self._path = path
        self._at = 0
        self._marks = mark_cycles
        self._rows: dict[str, int] = {}
        self._began = time.monotonic()
        self._lock = threading.Lock()
        since = {"start_time_since_epoch_in_micros": time.time_ns() // 1000}
        try:
            self._write([{"ph": "M", "name": "process_name", "pid": 0, "args": since}])
        except OSError:
            os.close(self._file)
            raise

    def begin(self, key: str, name: str) -> None:
        """Write that `name` begins in the row of `key`."""
        self._event(key, {"ph": "B", "name": name.upper()})

    def end(self, key: str) -> None:
        """Write that the last that has begun in the row of `key` ends."""
        self._event(key, {"ph": "E"})

    def cycle(self) -> None:
        """Write, if that was asked for, that operations were decided on."""
        if self._marks:
            self._event("", {"ph": "i", "name": "CYCLE_START", "s": "g"})

    def close(self) -> None:
        """Write no more. Harmless when called twice."""
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1

    def _event(self, key: str, event: dict[str, object]) -> None:
        with self._lock:
            if self._file < 0:
                return
            events: list[dict[str, object]] = []
            row = self._rows.get(key, 0)
            if key and not row:
                row = self._rows[key] = len(self._rows) + 1
                named = {"name": key}
                events.append({"ph": "M", "name": "process_name", "pid": row, "args": named})
            micros = int((time.monotonic() - self._began) * 1e6)
            events.append({**event, "pid": row, "tid": 0, "ts": micros})
            try:
                self._write(events)
            except OSError as error:  # this may be a thread that others wait for
                logger.warning("the timeline %s ends here: %s", self._path, error)
                os.close(self._file)
                self._file = -1

    def _write(self, events: list[dict[str, object]]) -> None:
        """Put events where the end of the file was."""
        text = ",\n".join(json.dumps(event) for event in events)
        data = ((",\n" if self._at else "[\n") + text).encode()
        os.pwrite(self._file, data + _END, self._at)
        self._at += len(data)
