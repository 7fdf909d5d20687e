"""The rows of a trace: threads, and what runs beside them.

Events of one row must lie within each other or apart, as those of a thread do. What overlaps
otherwise, such as two buckets that are under way, gets a row more.
"""

from __future__ import annotations

import threading
from typing import Any

__all__ = ["Rows"]

# The numbers of rows that are no threads, from here on, and from one kind to the next.
_FIRST, _BETWEEN = 1000, 100


class Rows:
    """Gives rows their numbers. Not collective."""

    def __init__(self) -> None:
        self._main = threading.main_thread().ident
        self._names = {thread.ident: thread.name for thread in threading.enumerate()}
        self._threads: dict[int, int] = {}
        self._lanes: dict[str, list[float]] = {}

    def of_thread(self, ident: int) -> int:
        """Return the number of a thread's row; 1 is the main thread's."""
        if ident == self._main:
            return 1
        return self._threads.setdefault(ident, len(self._threads) + 2)

    def beside(self, kind: str, began: float, ended: float) -> int:
        """Return the number of a row of that kind that is free then.

        Args:
            kind: also the row's name.
            began: not before that of earlier calls with the same kind.
            ended: when it is free again.
        """
        lanes = self._lanes.setdefault(kind, [])
        base = _FIRST + _BETWEEN * list(self._lanes).index(kind)
        for lane, free in enumerate(lanes):
            if free <= began:
                lanes[lane] = ended
                return base + lane
        lanes.append(ended)
        return base + len(lanes) - 1

    def names(self) -> dict[int, str]:
        """Return the name of each row."""
        named: dict[int, str] = {1: "main thread"}
        for ident, number in self._threads.items():
            named[number] = self._names.get(ident, f"thread {number}")
        for place, (kind, lanes) in enumerate(self._lanes.items()):
            for lane in range(len(lanes)):
                more = f" ({lane + 1})" if lane else ""
                named[_FIRST + _BETWEEN * place + lane] = f"{kind}{more}"
        return named

    def metadata(self, rank: int, host: str) -> list[dict[str, Any]]:
        """Return the events that name the process and its rows, and put them in order."""
        told: list[dict[str, Any]] = [
            _meta("process_name", rank, 0, name=f"rank {rank}"),
            _meta("process_labels", rank, 0, labels=host),
            _meta("process_sort_index", rank, 0, sort_index=rank),
        ]
        for number, name in sorted(self.names().items()):
            told.append(_meta("thread_name", rank, number, name=name))
            told.append(_meta("thread_sort_index", rank, number, sort_index=number))
        return told


def _meta(kind: str, rank: int, row: int, **arguments: object) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": row, "ts": 0, "args": arguments}
