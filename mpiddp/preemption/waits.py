"""What watchdog, flight recorder and roll call know of the waits of an agreement."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import timedelta

from mpiddp.flight_recorder import ring, sources
from mpiddp.flight_recorder.call_text import call_of
from mpiddp.process_group.watchdog import limited
from mpiddp.process_group.wrapped_modules import WrappedModules

__all__ = ["FREED", "HELD", "Waits"]

# How far a rank has come, as roll call counts: it has told its last check and holds; and it waits
# for all to free the agreement.
HELD, FREED = 1, 2

_WORDS = {
    HELD: "preemption.requested() after a signal",
    FREED: "preemption.uninstall()",
}


class Waits:
    """Stands for a process group of all ranks. Not collective.

    Args:
        world_ranks: the ranks of the world.
        rank: this one.
        timeout: how long one wait may take; then the watchdog ends the job.
    """

    group_name = "preemption"

    def __init__(self, world_ranks: Sequence[int], rank: int, timeout: timedelta) -> None:
        self.world_ranks = world_ranks
        self.timeout = timeout
        self.source = sources.add(sources.Source(self.group_name, world_ranks))
        self.entered = 0
        self.last = call_of("preemption.install()", None, ())
        self.modules = WrappedModules(self.source)
        self.without_limit: set[int] = set()
        self._rank = rank

    def rank(self) -> int:
        """Return this rank's number. Not collective."""
        return self._rank

    def came_to(self, point: int) -> None:
        """Note that this rank is at HELD or FREED. Not collective."""
        if point > self.entered:
            self.entered, self.last = point, call_of(_WORDS[point], None, ())

    def recorded(self, point: int) -> AbstractContextManager[None]:
        """Record what runs within as the wait at HELD or FREED. Not collective."""
        self.came_to(point)
        call = call_of(_WORDS[point], None, ())
        return limited(self, ring.begin(self.source.number, point, call, False, True))
