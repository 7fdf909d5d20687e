"""Copy a module's state from rank 0: over MPI between nodes, in shared memory inside them.

Parameters and buffers go this way at construction, buffers at each forward. What is larger
than a piece goes in pieces, so that writing, sending and reading overlap in warm caches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from mpi4py import MPI

from mpiddp import shown_progress
from mpiddp.mpi import communicators, datatypes, nodes
from mpiddp.process_group import gpu_tensors
from mpiddp.transports.shared_broadcast import SharedBroadcast, bytes_needed

if TYPE_CHECKING:
    from mpiddp.process_group.interface import StateGroup

PIECE_BYTES = 2 << 20


class StateBroadcast:
    """Copies rank 0's parameters and buffers to all ranks of a process group.

    Collective.

    Args:
        group: the process group, which owns this object.
        communicator: the group's.
    """

    def __init__(self, group: StateGroup, communicator: MPI.Comm) -> None:
        self._group = group
        self._node = nodes.ranks_of_node(communicator)
        leads = self._node.Get_rank() == 0
        self._leaders = communicators.note(
            communicator.Split(0 if leads else MPI.UNDEFINED, communicator.Get_rank())
        )
        self._nodes = communicator.allreduce(int(leads))
        self._shared: SharedBroadcast | None = None
        self._possible = self._nodes < communicator.Get_size()

    def __call__(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Make `tensors` equal to rank 0's; return False if another way must be taken.

        Collective. Any dtypes, strides and devices; a tensor that is equal already is not written.

        Raises:
            RuntimeError: a rank did not come within the group's timeout.
        """
        if self._possible and gpu_tensors.any_on_gpu(tensors):
            return gpu_tensors.through_host(self._group, "broadcast", tensors, self._on_host)
        return self._on_host(tensors)

    def _on_host(self, tensors: Sequence[torch.Tensor]) -> bool:
        size = min(bytes_needed(tensors), PIECE_BYTES)
        if self._possible and (self._shared is None or self._shared.capacity < size):
            self._allocate(size)
        if not self._possible or self._shared is None:
            return False
        counted = shown_progress.is_shown()
        for piece in _pieces(tensors):
            self._copy(self._shared, piece)
            if counted:
                shown_progress.advance(bytes_needed(piece))
        return True

    def _copy(self, shared: SharedBroadcast, tensors: Sequence[torch.Tensor]) -> None:
        """Make tensors that fit into a piece equal to rank 0's."""
        seconds = self._group.timeout.total_seconds()
        if self._node.Get_rank() > 0:
            if not shared.wait(seconds):
                raise self._group.timed_out("broadcast", seconds)
            shared.get(tensors)
            shared.consume()
            return
        if not shared.begin(seconds):
            raise self._group.timed_out("broadcast", seconds)
        if self._group.rank() == 0:
            shared.put(tensors)
        if self._nodes > 1:
            flat = shared.memory(bytes_needed(tensors))
            request = self._leaders.Ibcast(datatypes.buffer_of(flat), root=0)
            self._group.wait_for(request, "MPI_Ibcast", "broadcast", flat)
        shared.publish()
        if self._group.rank() > 0:
            shared.get(tensors)

    def free(self) -> None:
        """Free the communicators. Collective."""
        if self._leaders != MPI.COMM_NULL:
            communicators.free(self._leaders)
        communicators.free(self._node)

    def _allocate(self, size: int) -> None:
        crowded = nodes.is_crowded(self._node)
        problem = ""
        try:
            self._shared = SharedBroadcast(self._node, size, crowded=crowded)
        except OSError as error:
            problem = str(error)
        self._possible = not any(self._group.allgather_objects(problem))


def _pieces(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield all of `tensors` in lists of at most `PIECE_BYTES`."""
    piece: list[torch.Tensor] = []
    used = 0
    for tensor in tensors:
        for part in _parts(tensor):
            size = bytes_needed([part])
            if used + size > PIECE_BYTES:
                yield piece
                piece, used = [], 0
            piece.append(part)
            used += size
    yield piece


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield `tensor`, or views that make it up and are of at most `PIECE_BYTES` each."""
    if bytes_needed([tensor]) <= PIECE_BYTES:
        yield tensor
    elif tensor.is_contiguous():
        yield from torch.split(tensor.detach().view(-1), PIECE_BYTES // tensor.element_size())
    else:
        for part in tensor.detach().unbind():
            yield from _parts(part)
