"""What the watch needs to know of a process group."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from mpiddp.flight_recorder.call_text import Call
    from mpiddp.flight_recorder.sources import Source
    from mpiddp.watch.wrapped_modules import WrappedModules


class CountedGroup(Protocol):
    """A group that counts its collectives, so that others may ask how far it has come."""

    def rank(self) -> int:
        """Return this rank's number in the group."""

    @property
    def timeout(self) -> timedelta:
        """How long an operation may wait for other ranks."""

    @property
    def group_name(self) -> str:
        """The name that torch.distributed gave to this group."""

    @property
    def world_ranks(self) -> Sequence[int]:
        """The world rank of each of this group's ranks."""

    @property
    def source(self) -> Source:
        """What the flight recorder knows of the group."""

    @property
    def entered(self) -> int:
        """How many collectives this rank has called."""

    @property
    def last(self) -> Call | None:
        """The last of them."""

    def hear(self, reason: str) -> None:
        """Take from another rank that the group is broken. In any thread."""

    @property
    def modules(self) -> WrappedModules:
        """The modules that average their gradients over this group."""

    @property
    def without_limit(self) -> set[int]:
        """The records of what waits in MPI without a time limit."""
