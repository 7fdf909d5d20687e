"""Where a rank stands among the nodes, and which ranks share its memory."""

from __future__ import annotations

import os
import socket
from collections.abc import Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mpiddp.mpi.communicators import note

if TYPE_CHECKING:
    from mpi4py import MPI


@dataclass(frozen=True)
class Topology:
    """Where this process stands among the ranks and the nodes.

    Attributes:
        rank: rank in the world, from 0.
        world_size: number of ranks.
        local_rank: rank among the ranks that share this node's memory.
        local_world_size: number of those.
        node_rank: number of this node, in order of the nodes' lowest ranks.
        node_count: number of nodes.
        local_core_count: number of cores that the ranks of this node were given, together.
        crowded: whether this node has fewer cores for threads that wait than ranks.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    node_count: int
    local_core_count: int = field(default=1, compare=False)
    crowded: bool = field(default=False, compare=False)

    def as_environment(self) -> dict[str, str]:
        """Return torchrun's environment variables for this process. Not collective."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "GROUP_RANK": str(self.node_rank),
            "GROUP_WORLD_SIZE": str(self.node_count),
        }


def find_topology(communicator: MPI.Intracomm, cores: Set[int] | None = None) -> Topology:
    """Return where this process stands among ranks and nodes. Collective over `communicator`.

    Args:
        communicator: its ranks are counted.
        cores: numbers of those that this process was given; None: those of the calling thread.
    """
    from mpi4py import MPI

    rank = communicator.Get_rank()
    node = ranks_of_node(communicator)
    try:
        lowest_rank_here = node.allreduce(rank, op=MPI.MIN)
        lowest_ranks = sorted(set(communicator.allgather(lowest_rank_here)))
        return Topology(
            rank=rank,
            world_size=communicator.Get_size(),
            local_rank=node.Get_rank(),
            local_world_size=node.Get_size(),
            node_rank=lowest_ranks.index(lowest_rank_here),
            node_count=len(lowest_ranks),
            local_core_count=count_cores(node, cores or os.sched_getaffinity(0)),
            crowded=is_crowded(node),
        )
    finally:
        node.Free()


def count_cores(node: MPI.Comm, cores: Set[int]) -> int:
    """Return how many cores the ranks of a node have together.

    Collective.

    Args:
        node: its ranks share a node.
        cores: numbers of this rank's.
    """
    return len(set().union(*node.allgather(set(cores))))


def is_crowded(node: MPI.Comm) -> bool:
    """Return whether the ranks of a node have fewer cores to wait on than they are. Collective.

    The cores are those of the calling thread, which is who waits: OpenMP may have tied it to one,
    and the same one on each rank, however many the ranks were given.
    """
    return count_cores(node, os.sched_getaffinity(0)) < node.Get_size()


def ranks_of_node(communicator: MPI.Comm) -> MPI.Comm:
    """Return a communicator of the ranks that share memory with this one. Collective."""
    from mpi4py import MPI  # initialises MPI, which importing this file must not

    rank = communicator.Get_rank()
    node = note(communicator.Split_type(MPI.COMM_TYPE_SHARED, key=rank))
    hosts = node.allgather(socket.gethostname())
    if len(set(hosts)) == 1:
        return node
    # MPICH 5.0 takes ranks of jobs that have connected for ranks of one node.
    host = note(node.Split(hosts.index(hosts[node.Get_rank()]), rank))
    node.Free()
    return host
