"""What lives as long as a world and is looked after by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

__all__ = ["Companion", "at_start", "world_has_begun"]

# Called on all ranks when a world has begun.
at_start: list[Callable[[], None]] = []


def world_has_begun() -> None:
    """Call what waits for a world. Collective."""
    for function in at_start:
        function()


class Companion(Protocol):
    """What lives as long as a world; str() of it says in words that it is there."""

    def look(self) -> None:
        """Look for messages. Called twice a second, in a thread, if there are threads."""

    def requested(self) -> bool:
        """Return whether the job's end was announced. Every rank calls it equally often."""

    def end(self) -> None:
        """Free what it has. Collective; called by destroy_process_group."""

    def leave(self) -> None:
        """Stop. Not collective; called at the interpreter's exit without the former."""
