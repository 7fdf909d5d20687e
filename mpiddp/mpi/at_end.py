"""What is to be done before MPI is finalised, however the program ends.

Functions of atexit are not called by `os._exit`, after which the runner still leaves MPI in order,
and come too late where the program itself finalises MPI.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable

__all__ = ["register", "run", "unregister"]

_functions: list[Callable[[], None]] = []


def register(function: Callable[[], None]) -> None:
    """Call `function` at the end, before those that were registered earlier. Not collective."""
    _functions.append(function)
    atexit.register(_call_once, function)


def unregister(function: Callable[[], None]) -> None:
    """Take back `register`. Harmless if that was done, or never registered. Not collective."""
    if function in _functions:
        _functions.remove(function)


def run() -> None:
    """Do what atexit would do, once. Not collective."""
    while _functions:
        _call_once(_functions[-1])


def _call_once(function: Callable[[], None]) -> None:
    if function in _functions:
        _functions.remove(function)
        function()
