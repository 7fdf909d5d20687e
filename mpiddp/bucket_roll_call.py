"""Find out, when a bucket of gradients has waited in vain, which ranks have not filled theirs.

What Note [Roll call] in roll_call.py says of collectives holds for buckets too: who has waited in
vain asks, and a thread of each process answers, also while its program is in backward or waits for
another bucket. The wrapped modules of a group are numbered as they are made, the same on all ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

from mpiddp.calls import describe

if TYPE_CHECKING:
    from mpiddp.bucket import Bucket
    from mpiddp.operating_group import OperatingGroup
    from mpiddp.wrapper_reducer import WrapperReducer

__all__ = ["Modules", "explain_missing"]

# A module's buckets filled so far, as one number: reductions above, buckets of the next one below.
_MOST_BUCKETS = 1 << 24

_ELSEWHERE = "it waits for "


class Modules:
    """The wrapped modules of one process group, as this rank can tell of them. Not collective."""

    def __init__(self) -> None:
        self._made = 0
        self._reducers: weakref.WeakValueDictionary[int, WrapperReducer] = (
            weakref.WeakValueDictionary()
        )

    def add(self, reducer: WrapperReducer, name: str) -> None:
        """Give a module its number. On all ranks in the same order."""
        self._made += 1
        self._reducers[self._made] = reducer
        reducer.number, reducer.module_name = self._made, name

    def waiting(self) -> list[WrapperReducer]:
        """Return those that wait for a bucket just now."""
        return [reducer for reducer in list(self._reducers.values()) if reducer.waiting_for >= 0]

    def get(self, number: int) -> WrapperReducer | None:
        """Return the reducer of a module; None if it is gone."""
        return self._reducers.get(number)


def state(
    group: OperatingGroup, number: int, groups: Iterable[OperatingGroup]
) -> tuple[int, str] | None:
    """Return how many buckets of a module this rank has filled, and what it does now in words.

    Not collective; called on the thread that answers. None: there is no such module.

    Args:
        group: the module's process group.
        number: the module's.
        groups: all groups of this process.
    """
    reducer = group.modules.get(number)
    if reducer is None:
        return None
    return _filled(reducer), _doing(reducer, groups)


def explain_missing(reducer: WrapperReducer, bucket: Bucket) -> str:
    """Return which ranks keep a bucket waiting, and what they do now; it may take seconds.

    Not collective.
    """
    group = reducer.process_group
    if group.roll_call is None:
        return ""
    wanted = reducer.reductions * _MOST_BUCKETS + bucket.index + 1
    told = group.roll_call.explain_bucket(group, reducer.number, wanted)
    if _ELSEWHERE in told:
        told += (
            ". Where several wrapped modules are trained, all ranks run their backward passes in "
            "the same order"
        )
    return f"{told}."


def _filled(reducer: WrapperReducer) -> int:
    launched = len(reducer.buckets) if reducer.shadowing else reducer.next_bucket
    return reducer.reductions * _MOST_BUCKETS + launched


def _doing(reducer: WrapperReducer, groups: Iterable[OperatingGroup]) -> str:
    group = reducer.process_group
    backwards = f"{reducer.reductions} of its backward passes are reduced"
    if reducer.expecting and reducer.ready:
        backwards += (
            f", in the next one {reducer.ready} of {len(reducer.parameters)} gradients are there"
        )
    elif reducer.passes is not None:
        backwards += f", {reducer.passes.begun} forward passes begun"
    for waiting in (each for known in groups for each in known.modules.waiting()):
        bucket = waiting.buckets[waiting.waiting_for]
        if waiting is not reducer:
            return f"{backwards}; {_ELSEWHERE}{waiting.describe_bucket(bucket)}"
    if group.last is None:
        return backwards
    return f"{backwards}; last collective called: {describe(group.last)}, #{group.entered}"
