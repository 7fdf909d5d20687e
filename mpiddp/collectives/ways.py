"""Which way an operation takes: in memory, in lanes, in a block, or by messages."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from mpiddp.collectives import in_block, in_lanes, in_memory

if TYPE_CHECKING:
    from mpiddp.collectives.operation import Group, Operation

__all__ = ["way_of"]


def way_of(group: Group, function: Callable[..., Operation]) -> Callable[..., Operation]:
    """Return what to do in the place of an operation by messages: the same, or another way to it.

    Not collective, but the same on all ranks.
    """
    if group.state.memory is not None:
        return in_memory.WAYS.get(function, function)
    other = in_block.WAYS.get(function, function) if group.has_blocks else function
    if group.state.lanes is not None and function in in_lanes.WAYS:
        return partial(in_lanes.WAYS[function], other)
    return other
