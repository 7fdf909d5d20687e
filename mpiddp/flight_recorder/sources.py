"""What records belong to: process groups, wrapped modules, and messages between two ranks.

A record keeps only a number; here is what it stands for. A source outlives its group, since its
records may.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from mpiddp.flight_recorder import page

__all__ = ["BUCKETS", "Messages", "Source", "add", "add_module", "begin", "known"]

# A bucket's number: backward passes that were reduced above, its index below.
BUCKETS = 1 << 24


@dataclass
class Source:
    """What a record belongs to.

    Attributes:
        name: the same on all its ranks, and no other source's.
        description: what torch calls the description of a group.
        ranks: its world ranks.
        module: the class of the wrapped module, "" for operations.
        messages: whether its operations are messages.
        number: what records say of it, -1 before `add`.
    """

    name: str
    ranks: Sequence[int]
    description: str = "undefined"
    module: str = ""
    messages: bool = False
    number: int = -1


_sources: dict[int, Source] = {}
_numbers = itertools.count()


def add(source: Source) -> Source:
    """Give a source its number, and return it. Not collective."""
    source.number = next(_numbers)
    _sources[source.number] = source
    if not source.messages:  # there are many of these, and few places
        page.name(source.number, source.module or source.name)
    return source


def rename(source: Source, name: str) -> None:
    """Give a source the name that torch has found. Not collective."""
    source.name = name
    page.name(source.number, name)


def add_module(group: Source, number: int, name: str) -> Source:
    """Return the source of a wrapped module's buckets. Not collective.

    Args:
        group: of its process group.
        number: the module's in the group.
        name: of its class.
    """
    description = f"gradients of {name}"
    return add(Source(f"{group.name}, module {number}", group.ranks, description, name))


def known() -> dict[int, Source]:
    """Return all sources by number. Not collective."""
    return dict(_sources)


def begin() -> None:
    """Forget all sources, as no records of them are left. Not collective."""
    _sources.clear()


class Messages:
    """Counts the messages of a group, by the two ranks and the direction. Not collective.

    Args:
        group: the process group's source.
        rank: this rank in the group.
    """

    def __init__(self, group: Source, rank: int) -> None:
        self._group = group
        self._rank = rank
        self._counts: dict[tuple[int, int], tuple[int, int]] = {}

    def next(self, sends: bool, other: int) -> tuple[int, int]:
        """Return the number of the source, and of the next message there.

        Args:
            sends: whether this rank sends it.
            other: the other rank in the group; negative: any.
        """
        if other >= len(self._group.ranks) or (sends and other < 0):
            return -1, 0  # there is no such rank, as the operation will say
        pair = (self._rank, other) if sends else (other, self._rank)
        source, count = self._counts.get(pair, (-1, 0))
        if source < 0:
            source = self._make(*pair).number
        self._counts[pair] = source, count + 1
        return source, count + 1

    def _make(self, sender: int, receiver: int) -> Source:
        of = self._group
        if sender < 0:
            world = of.ranks[receiver]
            name = f"{of.name}, messages from any rank to {world}"
            return add(Source(name, [world], "messages", messages=True))
        ends = [of.ranks[sender], of.ranks[receiver]]
        name = f"{of.name}, messages from {ends[0]} to {ends[1]}"
        return add(Source(name, ends, "messages", messages=True))
