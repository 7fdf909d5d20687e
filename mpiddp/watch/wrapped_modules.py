"""The wrapped modules of a process group: a roll call asks about their buckets.

They are numbered as they are made, in the same order on all ranks.
"""

from __future__ import annotations

import weakref
from typing import Protocol

from mpiddp.flight_recorder.sources import Source, add_module

__all__ = ["WrappedModule", "WrappedModules"]


class WrappedModule(Protocol):
    """What the reducer of a wrapped module tells about it."""

    number: int
    module_name: str
    record_source: int  # of its buckets in the flight recorder

    def buckets_filled(self) -> int:
        """Return a number that grows with each bucket filled, see bucket_progress.py."""

    def describe_progress(self) -> str:
        """Return in words how far its backward passes have come."""

    def describe_wait(self) -> str:
        """Return in words which bucket it waits for just now; "" if none."""


class WrappedModules:
    """The wrapped modules of one process group. Not collective.

    Args:
        group: the process group's source in the flight recorder.
    """

    def __init__(self, group: Source) -> None:
        self._group = group
        self._made = 0
        self._by_number: weakref.WeakValueDictionary[int, WrappedModule] = (
            weakref.WeakValueDictionary()
        )

    def add(self, module: WrappedModule, name: str) -> None:
        """Give a module its number. Called on all ranks in the same order."""
        self._made += 1
        self._by_number[self._made] = module
        module.number, module.module_name = self._made, name
        module.record_source = add_module(self._group, self._made, name).number

    def get(self, number: int) -> WrappedModule | None:
        """Return a module by its number; None if it is gone."""
        return self._by_number.get(number)

    def all(self) -> list[WrappedModule]:
        """Return those that still exist. In any thread: it runs no Python while it copies."""
        references = self._by_number.valuerefs()
        return [module for each in references if (module := each()) is not None]
