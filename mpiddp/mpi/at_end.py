"""What is to be done before MPI is finalised, however the program ends.

Functions of atexit are not called by `os._exit`, after which the runner still leaves MPI in order.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable

__all__ = ["register", "run", "unregister"]

_functions: list[Callable[[], None]] = []


def register(function: Callable[[], None]) -> None:
    """Call `function` at the end, before those that were registered earlier. Not collective."""
    _functions.append(function)
    atexit.register(function)


def unregister(function: Callable[[], None]) -> None:
    """Take back `register`. Harmless if that was done, or never registered. Not collective."""
    if function in _functions:
        _functions.remove(function)
    atexit.unregister(function)


def run() -> None:
    """Do what atexit would do, once. Not collective."""
    while _functions:
        function = _functions[-1]
        unregister(function)
        function()
