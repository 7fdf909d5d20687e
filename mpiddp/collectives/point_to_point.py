"""Messages from rank to rank: torch's send and recv, and what is too large for MPI's counts.

Counts and displacements are C ints before MPI-4 (Open MPI 5 still has no others), so
whatever has more elements goes in pieces. A reduction or a broadcast is cut into several of its
kind; where displacements would be too large, every rank sends to every rank.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from mpi4py import MPI

from mpiddp.collectives import packing
from mpiddp.engine.requests import Arrival
from mpiddp.mpi import datatypes

if TYPE_CHECKING:
    from mpiddp.collectives.operation import Group, Operation
    from mpiddp.engine.requests import Pending

# The largest count, and the largest displacement, that one MPI call takes.
LARGEST_COUNT = 2**62 if MPI.Get_version() >= (4, 0) else 2**31 - 1

ANY_SOURCE = -1

# Whether MPI may not end a receive from any source whose message comes from another node, see
# Note [Messages from anybody]. Arrivals count in C ints.
MAY_MISS = MPI.get_vendor()[0] == "MPICH"
_LARGEST_ARRIVAL = 2**31 - 1

# Kinds of messages with tags of their own.
EXCHANGE, BARRIER = 0, 1


def pieces(flat: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return views of a contiguous tensor that MPI can count; at least one. Not collective."""
    if flat.numel() <= LARGEST_COUNT:
        return (flat,)
    return torch.split(flat.detach().view(-1), LARGEST_COUNT)


def byte_pieces(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return a contiguous tensor, or views of its bytes if it has too many. Not collective."""
    if tensor.nbytes <= LARGEST_COUNT:
        return (tensor,)  # a view would take microseconds
    return pieces(packing.bytes_of(tensor))


def send(group: Group, tensors: list[torch.Tensor], to: int, tag: int) -> Operation:
    """Send tensors to one rank. Not collective."""
    tag = _checked(group, to, tag)
    sources = [packing.dense(tensor) for tensor in tensors]
    yield [pending for source in sources for pending in send_bytes(group, source, to, tag)]
    return tensors


def receive(group: Group, tensors: list[torch.Tensor], source: int, tag: int) -> Operation:
    """Receive tensors from one rank, or from any. Not collective.

    Raises:
        RuntimeError: a message and its tensor differ in size.
    """
    rank = MPI.ANY_SOURCE if source == ANY_SOURCE else source
    tag = _checked(group, rank, tag)
    targets = [packing.dense(tensor) for tensor in tensors]
    waited = [receive_bytes(group, target, rank, tag) for target in targets]
    yield [pending for several in waited for pending in several]
    for tensor, target, several in zip(tensors, targets, waited, strict=True):
        received, expected = (
            sum(pending.received for pending in several),
            target.numel() * target.element_size(),
        )
        if received != expected:
            raise RuntimeError(
                f"rank {group.me}: a message of {received} bytes from "
                f"{group.describe_ranks([several[0].source])} was received into a tensor of "
                f"{expected} bytes "
                f"({target.dtype}, shape {tuple(target.shape)})"
            )
        packing.write_back(target, tensor)
    return tensors


def send_bytes(group: Group, source: torch.Tensor, to: int, tag: int) -> list[Pending]:
    """Start sending a contiguous tensor in as many messages as it needs. Not collective."""
    return [
        group.pending(
            group.communicator.Isend(datatypes.buffer_of(piece), dest=to, tag=tag),
            "MPI_Isend",
            piece,
        )
        for piece in byte_pieces(source)
    ]


def receive_bytes(group: Group, target: torch.Tensor, source: int, tag: int) -> list[Pending]:
    """Start receiving what `send_bytes` sends. Not collective."""
    return [
        group.pending(_request(group, piece, source, tag), "MPI_Irecv", piece)
        for piece in byte_pieces(target)
    ]


def _request(group: Group, piece: torch.Tensor, source: int, tag: int) -> MPI.Request | Arrival:
    may_miss = MAY_MISS and source == MPI.ANY_SOURCE and not group.state.all_here
    if may_miss and piece.nbytes <= _LARGEST_ARRIVAL:
        return Arrival(piece.data_ptr(), piece.nbytes, tag)
    return group.communicator.Irecv(datatypes.buffer_of(piece), source=source, tag=tag)


def exchange(
    group: Group,
    outgoing: Sequence[torch.Tensor | None],
    incoming: Sequence[torch.Tensor | None],
    root: int = -1,
) -> list[Pending]:
    """Start sending each rank its bytes, and receiving from each. Collective.

    Args:
        group: the process group.
        outgoing: for each rank a contiguous tensor, or None for nothing.
        incoming: the same.
        root: the only rank that has something for others; -1: all may.

    Raises:
        ValueError: what this rank sends itself has another size than what it expects.
    """
    own = group.rank()
    source, target = outgoing[own], incoming[own]
    if source is not None and target is not None and source.nbytes != target.nbytes:
        raise ValueError(
            f"rank {own} sends {source.nbytes} bytes to itself, and expects {target.nbytes}"
        )
    if group.state.memory is not None:
        return [_traded(group, outgoing, incoming, root)]
    waited = _messages(group, outgoing, incoming)
    if source is not None and target is not None:
        if source.dtype == target.dtype and source.shape == target.shape:
            with torch.no_grad():
                target.copy_(source)
        else:
            packing.bytes_of(target).copy_(packing.bytes_of(source))
    return waited


def _messages(
    group: Group,
    outgoing: Sequence[torch.Tensor | None],
    incoming: Sequence[torch.Tensor | None],
) -> list[Pending]:
    own, tag = group.rank(), own_tag(EXCHANGE)
    waited = []
    for rank, target in enumerate(incoming):
        if target is not None and rank != own:
            received = receive_bytes(group, target, rank, tag)
            for pending, piece in zip(received, byte_pieces(target), strict=True):
                pending.expected = piece.nbytes
            waited += received
    for rank, source in enumerate(outgoing):
        if source is not None and rank != own:
            waited += send_bytes(group, source, rank, tag)
    return waited


def _traded(
    group: Group,
    outgoing: Sequence[torch.Tensor | None],
    incoming: Sequence[torch.Tensor | None],
    root: int,
) -> Pending:
    """Exchange in memory that the ranks share. Their sizes have been compared."""

    def addresses(tensors: Sequence[torch.Tensor | None]) -> list[int]:
        return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]

    sizes = [
        0 if tensor is None else tensor.nbytes
        for tensors in (outgoing, incoming)
        for tensor in tensors
    ]
    kept = (outgoing, incoming)
    pending = group.memory.trade(addresses(outgoing), addresses(incoming), sizes, kept, root)
    return cast("Pending", pending)  # it has all methods that are called


def check_sizes(group: Group, name: str, waited: Sequence[Pending]) -> None:
    """Raise if a message of an `exchange` was shorter than what it was received into.

    Not collective. One that is longer MPI refuses itself.

    Args:
        group: the process group.
        name: of the operation.
        waited: what `exchange` has returned; all have ended.

    Raises:
        RuntimeError: it names the ranks and the sizes.
    """
    for pending in waited:
        if pending.expected >= 0 and pending.received != pending.expected:
            words = f"{pending.received} bytes where {pending.expected} were expected"
            who = group.describe_ranks([pending.source])
            raise group.unlike(name, f"{who} has sent {words}")


@functools.cache
def own_tag(kind: int) -> int:
    """Return a tag that messages of the user never have: of `EXCHANGE` or `BARRIER`."""
    return int(MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767) - kind  # the least that MPI allows


def _checked(group: Group, rank: int, tag: int) -> int:
    """Return the tag if MPI can carry it.

    Raises:
        ValueError: it is negative or too large, or there is no such rank.
    """
    if rank != MPI.ANY_SOURCE and not 0 <= rank < group.size():
        raise ValueError(f"there is no rank {rank} in a group of {group.size()}")
    largest = own_tag(max(EXCHANGE, BARRIER)) - 1
    if not 0 <= tag <= largest:
        raise ValueError(f"tag must be 0 to {largest} with this MPI, not {tag}")
    return tag
