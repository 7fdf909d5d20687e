"""Give the process groups of a node memory to compare their calls in, see call_table.pyx."""

from __future__ import annotations

import array
from typing import TYPE_CHECKING, Protocol

from mpi4py import MPI

from mpiddp import settings
from mpiddp.collectives.measured_ways import measure
from mpiddp.collectives.node_memory import NodeMemory
from mpiddp.collectives.way_table import tries_to_read
from mpiddp.mpi import communicators, losses, nodes
from mpiddp.process_group import direct_calls
from mpiddp.process_group.call_blocks import BlockGroup, CallBlocks
from mpiddp.process_group.call_table import BYTES, CallTable
from mpiddp.process_group.node_lanes import equal_nodes, make_lanes, may_have_lanes
from mpiddp.transports.shared_memory import allocate_common

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpiddp.engine.requests import Requests
    from mpiddp.process_group.group_state import GroupState

__all__ = ["make_call_table", "share_page"]


class NewGroup(BlockGroup, Protocol):
    """A group that is being made."""

    @property
    def state(self) -> GroupState:
        """Whether it can go on."""

    @property
    def requests(self) -> Requests:
        """Those of the process."""


def make_call_table(world: MPI.Intracomm, requests: Requests) -> CallTable | None:
    """Return a table that the ranks of this node share; None where there is no such memory.

    Collective over `world`.

    Args:
        world: of all ranks.
        requests: those of the process.
    """
    node = nodes.ranks_of_node(world)
    try:
        ranks = node.allgather(world.Get_rank())
        if len(ranks) == 1:
            return None
        memory = None
        if settings.COLLECTIVES.read() != "messages":
            memory = _node_memory(node, requests)
        return CallTable(allocate_common(node, BYTES, ()), ranks, memory)
    except OSError:
        return None  # on all ranks of the node
    finally:
        node.Free()


def _node_memory(node: MPI.Comm, requests: Requests) -> NodeMemory | None:
    """Return the memory for collectives, None where there is none. Collective over `node`."""
    try:
        memory = NodeMemory(node, tries_to_read())
    except OSError:
        return None  # on all its ranks
    if memory.is_readable:
        memory.direct_from = measure(memory, node, requests)
    return memory


def share_page(
    group: NewGroup,
    table: CallTable | None,
    communicator: MPI.Intracomm,
    ranks: Sequence[int],
) -> None:
    """Give a new group its page, the same one on all of its ranks of a node, or blocks, or both.

    Collective over `communicator`.

    Args:
        group: a new one.
        table: of this node.
        communicator: of the group; nothing else is under way in it.
        ranks: the world rank of each of its ranks.
    """
    if len(ranks) == 1:
        return
    here = [place for place, rank in enumerate(ranks) if table is not None and rank in table.ranks]
    index = -1
    # The first of a node takes the page for all of it.
    if table is not None and len(here) > 1 and here[0] == communicator.Get_rank():
        index = table.take(len(here))
    memory = table.memory if table is not None else None
    if settings.COLLECTIVES.read() == "messages":
        memory = None
    can_share = memory is not None and bool(here) and may_have_lanes()
    told = array.array("q", [index, here[0] if can_share else -1])
    heard = array.array("q", [0]) * (2 * len(ranks))
    communicator.Allgather([told, MPI.INT64_T], [heard, MPI.INT64_T])
    indices, firsts = heard[::2], heard[1::2]
    if table is not None and len(here) > 1 and indices[here[0]] >= 0:
        group.state.page = table.page(indices[here[0]])
        group.state.here = here
        group.state.all_here = len(here) == len(ranks)
        if group.state.all_here and memory is not None:
            own = communicator.Get_rank()
            own_memory = memory.of_group(indices[0], len(ranks), own, group.requests)
            if memory.direct_from is not None and settings.COLLECTIVES.read() == "memory":
                own_memory.read_directly(*memory.direct_from)
            group.state.memory = own_memory
            direct_calls.install(group)
    if not group.state.all_here:
        group.state.blocks = CallBlocks(group, communicators.note(communicator.Dup()))
        by_node = equal_nodes(firsts, indices)
        # Open MPI may end the job where a rank is lost while chunks of large collectives travel.
        if by_node is not None and memory is not None and not losses.can_go_on():
            index = indices[here[0]]
            group.state.lanes = make_lanes(communicator, by_node, memory, index, group.requests)
