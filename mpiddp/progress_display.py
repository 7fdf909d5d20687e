"""Draw how far something has come: a bar on a terminal if there is tqdm, else lines. A leaf.

Nothing is drawn in the first seconds, and nothing of it is imported: most of it is quick. The lines
come at doubling intervals.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from mpiddp import settings

__all__ = ["Display", "in_words"]

# The first bar comes after this part of the time after which the first line does.
_BAR_PART = 0.1
# Seconds between two times that a bar is drawn.
_BAR_SECONDS = 0.1
# Of a terminal that does not say how many of both it has.
_COLUMNS, _ROWS = 80, 24


class Display:
    """Draws on stderr. Not collective; in the main thread.

    Args:
        seconds: after which the first line comes; a bar after a tenth of that.

    Attributes:
        next: when `draw` is worth a call, of `time.monotonic`.
    """

    def __init__(self, seconds: float) -> None:
        self._began = time.monotonic()
        self._seconds = seconds
        self.next = self._began + _BAR_PART * seconds
        self._bar: Any = None
        self._lines = False

    def draw(self, what: str, done: int, total: Callable[[], int]) -> None:
        """Draw it if it is time. A stream that takes nothing is left alone."""
        passed = time.monotonic() - self._began
        if self._bar is None and not self._lines:
            self._bar = _bar(what, done, total, passed)
            self._lines = self._bar is None
            if self._lines:
                self.next = self._began + self._seconds
        with contextlib.suppress(Exception):
            if self._bar is not None:
                self.next = time.monotonic() + _BAR_SECONDS
                # More than was thought is as much as is known.
                self._bar.total, self._bar.n = max(total(), done), done
                self._bar.set_description_str(_end_of(what))  # draws
            elif passed >= self._seconds:
                while self._seconds <= passed:
                    self._seconds *= 2
                self.next = self._began + self._seconds
                told = in_words(what, done, total(), passed)
                print(told, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Take the bar away, also after an error: what is printed next begins a line."""
        bar, self._bar = self._bar, None
        if bar is not None:
            with contextlib.suppress(Exception):
                bar.close()


def in_words(what: str, done: int, total: int, seconds: float) -> str:
    """Return the line that says how far it has come."""
    most = max(done, total)
    return (
        f"mpiddp: rank 0: {what}: {_size(done)} of {_size(most)} in {seconds:.3g} s, "
        f"{_size(done / seconds)}/s ({settings.PROGRESS.name}=0: say nothing)"
    )


def _bar(what: str, done: int, total: Callable[[], int], passed: float) -> Any:
    """Return a bar that began some seconds ago, None where there is to be none."""
    with contextlib.suppress(Exception):  # whatever stderr and tqdm are
        if sys.stderr.isatty():
            from tqdm import tqdm

            class Bar(tqdm):  # type: ignore[misc]  # it has no types
                monitor_interval = 0  # no thread of its own

            # Not tqdm's own, which is of multiprocessing. Only the main thread draws.
            Bar.set_lock(threading.RLock())
            sized = _columns() > 0
            bar = Bar(
                desc=_end_of(what),
                initial=done,
                total=max(total(), done),
                unit="B",
                unit_scale=True,
                # Of a terminal that does not say its size tqdm draws nothing.
                dynamic_ncols=sized,
                ncols=None if sized else _COLUMNS,
                nrows=None if sized else _ROWS,
                leave=False,
                file=sys.stderr,
            )
            # It began when this did, with nothing.
            bar.initial, bar.start_t = 0, bar.start_t - passed
            return bar
    return None


def _columns() -> int:
    return os.get_terminal_size(sys.stderr.fileno()).columns


def _end_of(what: str) -> str:
    """Return the end of a title that would leave a bar no room: that of a path says most."""
    most = (_columns() or _COLUMNS) // 2
    return what if len(what) <= most else f"…{what[1 - most :]}"


def _size(number: float) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6)):
        if number >= factor:
            return f"{number / factor:.3g} {unit}"
    return f"{number / 1e3:.3g} kB"
