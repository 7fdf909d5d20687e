"""Copy a module's buffers from rank 0: over MPI between nodes, in shared memory inside them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from mpi4py import MPI

from mpiddp import datatypes, transport
from mpiddp.shared_broadcast import SharedBroadcast, bytes_needed

if TYPE_CHECKING:
    from mpiddp.process_group import ProcessGroup


class BufferBroadcast:
    """The way of rank 0's buffers to all ranks of a process group.

    Collective.

    Args:
        group: the process group, which owns this object.
        communicator: the group's.
    """

    def __init__(self, group: ProcessGroup, communicator: MPI.Comm) -> None:
        self._group = group
        self._node = transport.ranks_of_node(communicator)
        leads = self._node.Get_rank() == 0
        self._leaders = communicator.Split(0 if leads else MPI.UNDEFINED, communicator.Get_rank())
        self._nodes = communicator.allreduce(int(leads))
        self._shared: SharedBroadcast | None = None
        self._possible = self._nodes < communicator.Get_size()

    def __call__(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Make `tensors` equal to rank 0's; return False if another way must be taken.

        Collective. Any dtypes and strides; a tensor that is equal already is not written.

        Raises:
            RuntimeError: a rank did not come within the group's timeout.
        """
        size = bytes_needed(tensors)
        if self._possible and (self._shared is None or self._shared.capacity < size):
            self._allocate(size)
        shared = self._shared
        if not self._possible or shared is None:
            return False
        seconds = self._group.timeout.total_seconds()
        if self._node.Get_rank() > 0:
            if not shared.wait(seconds):
                raise self._group.timed_out("broadcast", seconds)
            shared.get(tensors)
            shared.consume()
            return True
        if not shared.begin(seconds):
            raise self._group.timed_out("broadcast", seconds)
        if self._group.rank() == 0:
            shared.put(tensors)
        if self._nodes > 1:
            flat = shared.memory(size)
            request = self._leaders.Ibcast(datatypes.buffer_of(flat), root=0)
            self._group.wait_for(request, "broadcast", None, flat)
        shared.publish()
        if self._group.rank() > 0:
            shared.get(tensors)
        return True

    def free(self) -> None:
        """Free the communicators. Collective."""
        if self._leaders != MPI.COMM_NULL:
            self._leaders.Free()
        self._node.Free()

    def _allocate(self, size: int) -> None:
        cores = set().union(*self._node.allgather(os.sched_getaffinity(0)))
        problem = ""
        try:
            self._shared = SharedBroadcast(
                self._node, size, crowded=len(cores) < self._node.Get_size()
            )
        except OSError as error:
            problem = str(error)
        self._possible = not any(self._group.allgather_objects(problem))
