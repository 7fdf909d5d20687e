"""The collectives of torch.distributed, and the mpi4py calls that do the same.

Each function makes the tensors of one collective, once for all candidates, and returns what each
of them calls. "Bare" is the nonblocking MPI call and its Wait, with all arguments prepared; it
moves flat memory where torch has a list. A size is what the larger side of a rank holds: the
tensor, or all pieces of a list together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from names import BARE, BLOCKING

Call = Callable[[], object]

# torch 2.13 renamed these and warns at the old names.
_all_gather_into: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_from: Any = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


@dataclass
class Case:
    """One collective at one size.

    Attributes:
        inputs: what a call reads; it may write them too.
        outputs: where a call through torch leaves its result, on this rank.
        bare_output: where MPI's calls leave the same, one piece behind the other.
        calls: what each candidate does, by name.
    """

    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    bare_output: torch.Tensor | None = None
    calls: dict[str, Call] = field(default_factory=dict)

    def through_torch(self, call: Callable[[Any], object], groups: dict[str, Any]) -> None:
        """Add the candidates that go through torch.distributed."""
        for name, group in groups.items():
            self.calls[name] = lambda group=group: call(group)  # type: ignore[misc]

    def through_mpi(self, start: Callable[[], MPI.Request], blocking: Call) -> None:
        """Add MPI's nonblocking call and its blocking one."""
        self.calls[BARE] = lambda: start().Wait()
        self.calls[BLOCKING] = blocking

    def check(self) -> None:
        """Call each once, on values of this rank; raise RuntimeError if results differ."""
        rank = dist.get_rank()
        results = {}
        for name, call in self.calls.items():
            for number, tensor in enumerate(self.inputs):
                # Small integers: their sums are exact, in whatever order.
                torch.arange(tensor.numel(), out=tensor).remainder_(97).add_(rank + 7 * number)
            if self.inputs and not any(out is own for out in self.outputs for own in self.inputs):
                for tensor in self.outputs:
                    tensor.zero_()
            call()
            outputs = self.outputs
            if name in (BARE, BLOCKING) and self.bare_output is not None:
                outputs = [self.bare_output]
            results[name] = torch.cat(outputs) if outputs else torch.empty(0)
        for name, result in results.items():
            if not torch.equal(result, results[BARE]):
                raise RuntimeError(f"rank {rank}: {name} gives another result than {BARE}")
        for tensor in (*self.inputs, *self.outputs):
            tensor.zero_()


@dataclass
class Sizes:
    """Elements (float32) and ranks of a case.

    Attributes:
        whole: elements of the larger side of a rank, a multiple of `ranks`.
        piece: elements of one rank's piece.
    """

    nbytes: int
    comm: MPI.Intracomm

    def __post_init__(self) -> None:
        self.ranks, self.rank = self.comm.size, self.comm.rank
        self.piece = max(1, self.nbytes // 4 // self.ranks)
        self.whole = self.piece * self.ranks

    def pieces(self) -> list[torch.Tensor]:
        """Return one piece a rank, each in memory of its own."""
        return [torch.zeros(self.piece) for _ in range(self.ranks)]

    def counted(self, flat: torch.Tensor) -> list[Any]:
        """Return flat memory of one piece a rank, as the calls ending in v take it."""
        return [flat.numpy(), [self.piece] * self.ranks, None, MPI.FLOAT]


def _all_reduce(size: Sizes, groups: dict[str, Any]) -> Case:
    tensor = torch.zeros(max(1, size.nbytes // 4))
    case = Case([tensor], [tensor])
    case.through_torch(lambda group: dist.all_reduce(tensor, group=group), groups)
    comm, memory = size.comm, tensor.numpy()
    case.through_mpi(
        lambda: comm.Iallreduce(MPI.IN_PLACE, memory), lambda: comm.Allreduce(MPI.IN_PLACE, memory)
    )
    return case


def _broadcast(size: Sizes, groups: dict[str, Any]) -> Case:
    tensor = torch.zeros(max(1, size.nbytes // 4))
    case = Case([tensor], [tensor])
    case.through_torch(lambda group: dist.broadcast(tensor, 0, group=group), groups)
    comm, memory = size.comm, tensor.numpy()
    case.through_mpi(lambda: comm.Ibcast(memory), lambda: comm.Bcast(memory))
    return case


def _reduce(size: Sizes, groups: dict[str, Any]) -> Case:
    tensor = torch.zeros(max(1, size.nbytes // 4))
    # What the others' tensors hold afterwards is left open by torch.
    case = Case([tensor], [tensor] if size.rank == 0 else [])
    case.through_torch(lambda group: dist.reduce(tensor, 0, group=group), groups)
    comm, memory = size.comm, tensor.numpy()
    sent: Any = MPI.IN_PLACE if size.rank == 0 else memory
    received = memory if size.rank == 0 else None
    case.through_mpi(lambda: comm.Ireduce(sent, received), lambda: comm.Reduce(sent, received))
    return case


def _all_gather_list(size: Sizes, groups: dict[str, Any]) -> Case:
    own, pieces, flat = torch.zeros(size.piece), size.pieces(), torch.zeros(size.whole)
    case = Case([own], pieces, flat)
    case.through_torch(lambda group: dist.all_gather(pieces, own, group=group), groups)
    comm, memory, target = size.comm, own.numpy(), size.counted(flat)
    case.through_mpi(
        lambda: comm.Iallgatherv(memory, target), lambda: comm.Allgatherv(memory, target)
    )
    return case


def _all_gather_tensor(size: Sizes, groups: dict[str, Any]) -> Case:
    own, flat = torch.zeros(size.piece), torch.zeros(size.whole)
    case = Case([own], [flat])
    case.through_torch(lambda group: _all_gather_into(flat, own, group=group), groups)
    comm, memory, target = size.comm, own.numpy(), flat.numpy()
    case.through_mpi(
        lambda: comm.Iallgather(memory, target), lambda: comm.Allgather(memory, target)
    )
    return case


def _gather(size: Sizes, groups: dict[str, Any]) -> Case:
    root = size.rank == 0
    own, pieces, flat = torch.zeros(size.piece), size.pieces(), torch.zeros(size.whole)
    case = Case([own], pieces if root else [], flat if root else None)
    given = pieces if root else None
    case.through_torch(lambda group: dist.gather(own, given, 0, group=group), groups)
    comm, memory, target = size.comm, own.numpy(), size.counted(flat) if root else None
    case.through_mpi(lambda: comm.Igatherv(memory, target), lambda: comm.Gatherv(memory, target))
    return case


def _scatter(size: Sizes, groups: dict[str, Any]) -> Case:
    root = size.rank == 0
    own, flat = torch.zeros(size.piece), torch.zeros(size.whole)
    # torch's pieces are parts of the flat memory: MPI sends the same values.
    pieces = list(flat.split(size.piece))
    case = Case([flat], [own])
    given = pieces if root else None
    case.through_torch(lambda group: dist.scatter(own, given, 0, group=group), groups)
    comm, memory, source = size.comm, own.numpy(), size.counted(flat) if root else None
    case.through_mpi(lambda: comm.Iscatterv(source, memory), lambda: comm.Scatterv(source, memory))
    return case


def _reduce_scatter_list(size: Sizes, groups: dict[str, Any]) -> Case:
    own, flat = torch.zeros(size.piece), torch.zeros(size.whole)
    pieces = list(flat.split(size.piece))
    case = Case([flat], [own])
    case.through_torch(lambda group: dist.reduce_scatter(own, pieces, group=group), groups)
    comm, memory, source = size.comm, own.numpy(), flat.numpy()
    counts = [size.piece] * size.ranks
    case.through_mpi(
        lambda: comm.Ireduce_scatter(source, memory, counts),
        lambda: comm.Reduce_scatter(source, memory, counts),
    )
    return case


def _reduce_scatter_tensor(size: Sizes, groups: dict[str, Any]) -> Case:
    own, flat = torch.zeros(size.piece), torch.zeros(size.whole)
    case = Case([flat], [own])
    case.through_torch(lambda group: _reduce_scatter_from(own, flat, group=group), groups)
    comm, memory, source = size.comm, own.numpy(), flat.numpy()
    case.through_mpi(
        lambda: comm.Ireduce_scatter_block(source, memory),
        lambda: comm.Reduce_scatter_block(source, memory),
    )
    return case


def _all_to_all_list(size: Sizes, groups: dict[str, Any]) -> Case:
    sent, flat = torch.zeros(size.whole), torch.zeros(size.whole)
    outgoing, incoming = list(sent.split(size.piece)), size.pieces()
    case = Case([sent], incoming, flat)
    case.through_torch(lambda group: dist.all_to_all(incoming, outgoing, group=group), groups)
    comm, source, target = size.comm, size.counted(sent), size.counted(flat)
    case.through_mpi(
        lambda: comm.Ialltoallv(source, target), lambda: comm.Alltoallv(source, target)
    )
    return case


def _all_to_all_single(size: Sizes, groups: dict[str, Any]) -> Case:
    sent, flat = torch.zeros(size.whole), torch.zeros(size.whole)
    case = Case([sent], [flat])
    case.through_torch(lambda group: dist.all_to_all_single(flat, sent, group=group), groups)
    comm, source, target = size.comm, sent.numpy(), flat.numpy()
    case.through_mpi(lambda: comm.Ialltoall(source, target), lambda: comm.Alltoall(source, target))
    return case


def _send_recv(size: Sizes, groups: dict[str, Any]) -> Case:
    tensor = torch.zeros(max(1, size.nbytes // 4))
    case = Case([tensor], [tensor])
    comm, memory, other = size.comm, tensor.numpy(), size.rank ^ 1
    if other >= size.ranks:
        case.calls = dict.fromkeys((*groups, BARE, BLOCKING), lambda: None)
        return case

    def back_and_forth(send: Call, receive: Call) -> Call:
        first, second = (send, receive) if size.rank < other else (receive, send)
        return lambda: (first(), second())

    for name, group in groups.items():
        case.calls[name] = back_and_forth(
            lambda group=group: dist.send(tensor, other, group=group),  # type: ignore[misc]
            lambda group=group: dist.recv(tensor, other, group=group),  # type: ignore[misc]
        )
    case.calls[BARE] = back_and_forth(
        lambda: comm.Isend(memory, other).Wait(), lambda: comm.Irecv(memory, other).Wait()
    )
    case.calls[BLOCKING] = back_and_forth(
        lambda: comm.Send(memory, other), lambda: comm.Recv(memory, other)
    )
    return case


def _barrier(size: Sizes, groups: dict[str, Any]) -> Case:
    case = Case([], [])
    case.through_torch(lambda group: dist.barrier(group=group), groups)
    case.through_mpi(size.comm.Ibarrier, size.comm.Barrier)
    return case


BARRIER = "barrier"

COLLECTIVES: dict[str, Callable[[Sizes, dict[str, Any]], Case]] = {
    "all_reduce": _all_reduce,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "all_gather, list": _all_gather_list,
    "all_gather, tensor": _all_gather_tensor,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter, list": _reduce_scatter_list,
    "reduce_scatter, tensor": _reduce_scatter_tensor,
    "all_to_all, list": _all_to_all_list,
    "all_to_all, single": _all_to_all_single,
    "send and recv, there and back": _send_recv,
    BARRIER: _barrier,
}
