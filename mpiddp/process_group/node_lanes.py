"""Give a process group over several nodes lanes, see Note [Lanes of a group] in lane_jobs.pyx."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mpiddp.collectives.group_lanes import (
    MOST_NODES,
    PIECE_BYTES,
    STREAMS_OF_LANES,
    GroupLanes,
    count_open,
)
from mpiddp.transports.choice import WirePlan, plan_wire

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpiddp.collectives.node_memory import NodeMemory
    from mpiddp.engine.requests import Requests

__all__ = ["equal_nodes", "make_lanes", "may_have_lanes"]

# Each has some communicators more, and some MPIs have no more than 2,000 in all.
_MOST_GROUPS = 64

# Slices are cut at a multiple of it.
_ALIGNMENT = 64


def may_have_lanes() -> bool:
    """Return whether another group of this process may have lanes. Not collective."""
    return count_open() < _MOST_GROUPS


def equal_nodes(firsts: Sequence[int], indices: Sequence[int]) -> list[list[int]] | None:
    """Return for each node its ranks, if there are several nodes with equally many. Not collective.

    Args:
        firsts: for each rank of the group the first one of its node, -1 where none share memory or
            it may have no lanes.
        indices: for each of these first ones, which place in that memory is the group's; -1: none.
    """
    nodes = [
        [rank for rank, other in enumerate(firsts) if other == first]
        for first in sorted(set(firsts))
    ]
    sizes = {len(ranks) for ranks in nodes}
    if -1 in firsts or len(sizes) > 1 or 1 in sizes or not 2 <= len(nodes) <= MOST_NODES:
        return None
    return nodes if all(indices[ranks[0]] >= 0 for ranks in nodes) else None


def make_lanes(
    communicator: MPI.Intracomm,
    nodes: Sequence[Sequence[int]],
    node_memory: NodeMemory,
    index: int,
    requests: Requests,
) -> GroupLanes:
    """Return the lanes of a group, see `GroupLanes` for the arguments. Collective."""
    ranks = len(nodes[0])
    plan = plan_wire(len(nodes), lanes=ranks)
    longest = (PIECE_BYTES // ranks // _ALIGNMENT + 1) * _ALIGNMENT
    plan = WirePlan(longest, STREAMS_OF_LANES, plan.ways, plan.group)
    return GroupLanes(communicator, nodes, node_memory, index, plan, requests)
