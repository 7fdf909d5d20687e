"""Waits for other ranks outside of a process group's operations, for roll call and watchdog.

Such as that for a process group whose communicator is being made.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import timedelta

from mpiddp.flight_recorder import ring, sources
from mpiddp.flight_recorder.call_text import call_of
from mpiddp.watch.watchdog import limited
from mpiddp.watch.wrapped_modules import WrappedModules

__all__ = ["FormingGroup", "NamedWait"]


class FormingGroup:
    """What roll call and watchdog need of it. Not collective.

    A rank that has not called new_group knows no such group. So having called it is its collective
    number 0, and none is counted.

    Args:
        name: that torch.distributed gives to the group.
        world_ranks: the world rank of each of its ranks.
        rank: this process's in the group.
        timeout: how long it may take.
    """

    entered = 0

    def __init__(
        self, name: str, world_ranks: Sequence[int], rank: int, timeout: timedelta
    ) -> None:
        self.group_name = name
        self.world_ranks = world_ranks
        self.timeout = timeout
        self.source = sources.add(sources.Source(f"{name}, being made", world_ranks))
        self.last = call_of("new_group", None, ())
        self.modules = WrappedModules(self.source)
        self.without_limit: set[int] = set()
        self._rank = rank

    def rank(self) -> int:
        """Return this rank's number in the group. Not collective."""
        return self._rank

    def hear(self, reason: str) -> None:
        """Do nothing: there is no such group so far."""

    def recorded(self) -> AbstractContextManager[None]:
        """Record what runs within. After the time limit the job ends. Not collective."""
        return limited(self, ring.begin(self.source.number, self.entered, self.last, False, True))


class NamedWait(FormingGroup):
    """What all ranks of the world wait for, maybe many times. Not collective.

    Made before a rank can come, so that one that has not come says that it knows the wait.

    Args:
        name: of what is waited for, the same on all ranks.
        size: how many ranks the world has; the others as for `FormingGroup`.
    """

    def __init__(self, name: str, size: int, rank: int, timeout: timedelta) -> None:
        super().__init__(name, range(size), rank, timeout)
        sources.rename(self.source, name)
        self.last = call_of(name, None, ())

    def enter(self) -> None:
        """Count that this rank has come; `recorded` is for one that then waits. Not collective."""
        self.entered += 1
