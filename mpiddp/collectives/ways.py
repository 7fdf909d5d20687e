"""Which way an operation takes: in memory, in a block, or by messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mpiddp.collectives import in_block, in_memory

if TYPE_CHECKING:
    from mpiddp.collectives.operation import Group, Operation

__all__ = ["way_of"]


def way_of(group: Group, function: Callable[..., Operation]) -> Callable[..., Operation]:
    """Return what to do in the place of an operation by messages: the same, or another way to it.

    Not collective, but the same on all ranks.
    """
    if group.state.memory is not None:
        return in_memory.WAYS.get(function, function)
    return in_block.WAYS.get(function, function) if group.has_blocks else function
