"""Tell how far something has come that may take long: how many bytes of how many. A leaf.

    with shown("broadcast of the model's state", bytes_of_all, shows=rank == 0):
        ...
        advance(piece.nbytes)  # by what does it, however deep

Only the main thread draws. What another thread does is counted, and `waiting_for` draws it while
the main thread waits for that one.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from mpiddp import settings
from mpiddp.progress_display import Display

__all__ = ["advance", "is_shown", "retitle", "shown", "waiting_for", "while_drawing"]

Value = TypeVar("Value")

# Seconds between two looks of a thread that only waits.
_NAP = 0.2
# Bytes that are worth a thread.
_LARGE = 1 << 24


class _Count:
    """How far something has come; it draws itself where it has a display."""

    def __init__(self, what: str, total: Callable[[], int], display: Display | None) -> None:
        self.what, self.done = what, 0
        self._total = total
        self._display = display

    @property
    def draws(self) -> bool:
        return self._display is not None

    def add(self, number: int) -> None:
        self.done += number
        self.draw()

    def draw(self) -> None:
        display = self._display
        if display is not None and time.monotonic() >= display.next:
            display.draw(self.what, self.done, self._total)

    def draw_on(self, display: Display) -> None:
        display.draw(self.what, self.done, self._total)


# What each thread does, by its number: the innermost last.
_counts: dict[int, list[_Count]] = {}


@contextlib.contextmanager
def shown(what: str, total: Callable[[], int], *, shows: bool) -> Iterator[None]:
    """Within, show how far this thread has come, if that takes long. Not collective.

    Args:
        what: it is, such as "checkpoint /data/000003-step-7: writing".
        total: returns how many bytes there are; called when it is shown first.
        shows: whether this process does, such as rank 0.
    """
    seconds = settings.PROGRESS.read_before_init() if shows else 0
    if not seconds:
        yield
        return
    thread = threading.get_ident()
    display = _new_display(seconds)
    stack = _counts.setdefault(thread, [])
    stack.append(_Count(what, total, display))
    try:
        yield
    finally:
        stack.pop()
        if not stack:
            del _counts[thread]
        if display is not None:
            display.close()


def advance(number: int) -> None:
    """Count bytes that are done, if this thread shows how far it has come. Not collective."""
    stack = _counts.get(threading.get_ident())
    if stack is not None:
        stack[-1].add(number)


def is_shown() -> bool:
    """Return whether this thread shows how far it has come, for where counting is not free."""
    return threading.get_ident() in _counts


def retitle(what: str) -> None:
    """Give what this thread shows another name from now on. Not collective."""
    stack = _counts.get(threading.get_ident())
    if stack is not None:
        stack[-1].what = what


def while_drawing(function: Callable[[], Value], number: int) -> Value:
    """Return what a function returns that says nothing of how far it has come. Not collective.

    Where this thread draws, another one calls it, and the time that passes is seen.

    Args:
        function: what to call.
        number: of bytes that it is about.
    """
    stack = _counts.get(threading.get_ident())
    if stack is None or not stack[-1].draws or number < _LARGE:
        return function()
    results: list[Value] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call, name="mpiddp progress", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(_NAP)
        stack[-1].draw()
    if errors:
        raise errors[0]
    return results[0]


def waiting_for(ended: Callable[[float], bool], thread: int | None, *, shows: bool) -> None:
    """Show how far another thread has come until it has ended. Not collective.

    It returns at once where nothing is to be shown.

    Args:
        ended: waits for so many seconds, and returns whether that thread has done what it does.
        thread: its number, None where it is not known.
        shows: whether this process does.
    """
    seconds = settings.PROGRESS.read_before_init() if shows else 0
    display = _new_display(seconds) if seconds else None
    if display is None or thread is None:
        return
    try:
        while not ended(min(_NAP, seconds)):
            stack = _counts.get(thread)
            if stack and time.monotonic() >= display.next:
                stack[-1].draw_on(display)
    finally:
        display.close()


def _new_display(seconds: float) -> Display | None:
    """Return what draws in the main thread, None in another one."""
    in_main = threading.current_thread() is threading.main_thread()
    return Display(seconds) if in_main else None
