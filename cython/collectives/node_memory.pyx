"""The memory that the ranks of a node share for the collectives of all their process groups."""

import os

from mpiddp.collectives.direct_jobs cimport read_memory
from mpiddp.collectives.group_memory cimport make_group
from mpiddp.collectives.memory_jobs cimport MOST_RANKS, REGION_BYTES
from mpiddp.transports.shared_memory import allocate_common

# How many groups there may be at a time; more do without.
GROUPS = 1024


def can_read_each_other(node, bint tries=True):
    """Return whether the ranks of a node can read each other's memory; the same on all.

    Collective over `node`.

    Args:
        node: an mpi4py communicator of ranks that share memory.
        tries: whether this rank is to try; if one is not, none can.
    """
    cdef unsigned long long own = int.from_bytes(os.urandom(8), "little")
    cdef unsigned long long seen
    cdef bint result = tries
    told = node.allgather((os.getpid(), <size_t>&own, own))
    for process, address, number in told:
        seen = 0
        if read_memory(process, <char *><size_t>address, <char *>&seen, sizeof(seen)):
            result = False
        elif seen != number:
            result = False      # another process, of a namespace of this rank's own
    return all(node.allgather(result))


cdef class NodeMemory:
    """Room for the groups of a node.

    Collective over `node`.

    Args:
        node: an mpi4py communicator whose ranks share memory; it is not needed afterwards.
        tries: see `can_read_each_other`.

    Attributes:
        ranks: how many share it.
        is_readable: whether they can.
        direct_from: from how many bytes on they do, for `GroupMemory.read_directly`; None: never.

    Raises:
        OSError: the ranks cannot share memory; raised on all ranks.
    """

    def __init__(self, node, bint tries=True):
        self.ranks = node.Get_size()
        if self.ranks > MOST_RANKS:
            raise OSError(f"there is room for {MOST_RANKS} ranks of a node, not {self.ranks}")
        self.mapping = allocate_common(node, GROUPS * self.ranks * REGION_BYTES, ())
        # No tensor lies there: forked children need none of it.
        self.mapping.segment.given_out = False
        self.is_readable = can_read_each_other(node, tries)

    def of_group(self, Py_ssize_t index, Py_ssize_t ranks, Py_ssize_t rank, requests):
        """Return what a group has of it. Not collective.

        Args:
            index: of the group, the same on all its ranks and on no other group's; below `GROUPS`.
            ranks: how many the group has, all of this node.
            rank: this one, in the group.
            requests: those of the process, and its engine.
        """
        assert 0 <= index < GROUPS and 0 <= rank < ranks <= self.ranks
        return make_group(
            self.mapping, self.mapping.address + <size_t>(index * self.ranks) * REGION_BYTES,
            ranks, rank, requests,
        )
