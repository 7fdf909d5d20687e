"""The process group's reductions: all_reduce, reduce and reduce_scatter.

16-bit floats are reduced in float32 and rounded once; `mpiddp.mpi.datatypes` says which
dtype each is reduced in. All are operations as Note [An operation is a generator] describes.

Note [Averages in range]
~~~~~~~~~~~~~~~~~~~~~~~~
A sum may overflow where the average does not. For AVG, floats are first multiplied by a power of
two that keeps the sum finite, and the sum is divided by the rest of the divisor. This changes bits
only of averages so small that their sum would be subnormal. Gradients of DistributedDataParallel
keep even those bits: see Note [Sums that overflow in MPI].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from mpi4py import MPI

from mpiddp.collectives import packing, point_to_point
from mpiddp.mpi import datatypes
from mpiddp.mpi.datatypes import ReductionRule
from mpiddp.system.scaling import scale_of

if TYPE_CHECKING:
    from mpiddp.collectives.operation import Group, Operation
    from mpiddp.engine.requests import Pending


# From this many bytes on, a reduction to one rank is done as an all-reduce: there MPI_Ireduce of
# Open MPI and of MPICH was up to three times as slow.
_REDUCED_BY_ALL = 2 << 20

# From this many bytes on, in the dtype of the sum, each rank adds up what the others send it: Open
# MPI's nonblocking reduce_scatter takes three to four times as long, MPICH's somewhat longer.
_SUMMED_HERE = 512 << 10
# Dtypes whose sums torch rounds, or wraps around, as MPI does.
_SUMMED_DTYPES = (torch.float32, torch.float64, torch.int32, torch.int64, torch.complex64)


def all_reduce(group: Group, tensors: Sequence[torch.Tensor], op: dist.ReduceOp) -> Operation:
    """Reduce each tensor over all ranks in place. Collective."""
    if len(tensors) > 1:
        # Refuse before anything is under way.
        packing.check_on_host(tensors)
    pending: list[Pending] = []
    started = []
    for tensor in tensors:
        how = datatypes.reduction(tensor.dtype, op)
        # In place on every rank, as MPI requires, whatever the layouts of their tensors are.
        total = contribution_of(group, tensor, how, op, in_place=len(tensors) == 1)
        started.append((total, tensor, how))
        pending += _iallreduce(group, total, total, how)
    yield pending
    for total, tensor, how in started:
        finish(group, total, tensor, how)
    return list(tensors)


def all_reduce_together(
    group: Group, tensors: Sequence[torch.Tensor], op: dist.ReduceOp
) -> Operation:
    """Reduce tensors of one dtype as one. Collective."""
    how = datatypes.reduction(tensors[0].dtype, op)
    total = torch.cat([contribution_of(group, tensor, how, op).view(-1) for tensor in tensors])
    yield _iallreduce(group, total, total, how)
    parts = torch.split(total, [tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        finish(group, part.view(tensor.shape), tensor, how)
    return list(tensors)


def flattened(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the elements of all tensors behind each other. Not collective."""
    return torch.cat([packing.dense(tensor).detach().view(-1) for tensor in tensors])


def unflatten(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Write to tensors what `flattened` has made of them. Not collective."""
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        packing.write_back(part.view(tensor.shape), tensor)


def reduce(
    group: Group, tensors: Sequence[torch.Tensor], op: dist.ReduceOp, root: int
) -> Operation:
    """Reduce each tensor to one rank; the others' stay as they are. Collective."""
    pending: list[Pending] = []
    started = []
    here = group.rank() == root
    for tensor in tensors:
        how = datatypes.reduction(tensor.dtype, op)
        contribution = contribution_of(group, tensor, how, op)
        by_all = contribution.numel() * contribution.element_size() >= _REDUCED_BY_ALL
        total = torch.empty_like(contribution) if by_all or here else None
        if by_all and total is not None:
            pending += _iallreduce(group, contribution, total, how)
        else:
            pending += _ireduce(group, contribution, total, how, root)
        if here and total is not None:
            started.append((total, tensor, how))
    yield pending
    for total, tensor, how in started:
        finish(group, total, tensor, how)
    return list(tensors)


def reduce_scatter(
    group: Group,
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[Sequence[torch.Tensor]],
    op: dist.ReduceOp,
) -> Operation:
    """Reduce lists of one tensor per rank, and give each rank its own. Collective.

    Raises:
        ValueError: a list does not have one tensor per rank, or this rank's tensors differ in size.
        TypeError: the dtypes differ.
    """
    pending: list[Pending] = []
    started = []
    for output, parts in zip(outputs, inputs, strict=True):
        check_parts(group, output, parts)
        how = datatypes.reduction(output.dtype, op)
        total = target_of(output, how)
        received: list[torch.Tensor] = []
        if _summed_here(sum(part.numel() for part in parts), how):
            waited, received = _exchange_parts(group, parts)
        else:
            whole = parts[0] if len(parts) == 1 else torch.cat([part.reshape(-1) for part in parts])
            counts = [part.numel() for part in parts]
            contribution = contribution_of(group, whole, how, op)
            waited = _ireduce_scatter(group, contribution, total, counts, how)
        pending += waited
        started.append((received, total, output, how))
    yield pending
    for received, total, output, how in started:
        _add_up(group, received, total, how)
        finish(group, total, output, how)
    return list(outputs)


def reduce_scatter_single(
    group: Group,
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    op: dist.ReduceOp,
) -> Operation:
    """Reduce tensors, and give each rank an equal part of each. Collective.

    Raises:
        ValueError: an input does not have as many elements as all ranks' outputs together.
        TypeError: the dtypes differ.
    """
    pending: list[Pending] = []
    started = []
    for output, tensor in zip(outputs, inputs, strict=True):
        check_single(group, output, tensor)
        count = output.numel()
        how = datatypes.reduction(output.dtype, op)
        total = target_of(output, how)
        received: list[torch.Tensor] = []
        if _summed_here(tensor.numel(), how):
            flat = packing.dense(tensor).detach().view(-1)
            waited, received = _exchange_parts(group, torch.split(flat, count))
        else:
            contribution = contribution_of(group, tensor, how, op)
            waited = _ireduce_scatter(group, contribution, total, [count] * group.size(), how)
        pending += waited
        started.append((received, total, output, how))
    yield pending
    for received, total, output, how in started:
        _add_up(group, received, total, how)
        finish(group, total, output, how)
    return list(outputs)


def contribution_of(
    group: Group,
    tensor: torch.Tensor,
    how: ReductionRule,
    op: dist.ReduceOp,
    in_place: bool = False,
) -> torch.Tensor:
    """Return this rank's input to a reduction: the tensor's own memory, where that will do.

    `in_place`: the reduction overwrites that memory anyway, and no other tensor's.
    """
    contribution = packing.dense(tensor)
    if contribution.dtype != how.dtype or contribution.requires_grad:
        contribution = contribution.detach().to(how.dtype)
    scales = how.divides and _has_fractions(contribution)
    overwrites = how.multiplies or (scales and not in_place)
    if overwrites and contribution.data_ptr() == tensor.data_ptr():
        contribution = contribution.clone()
    if how.multiplies:
        packing.multiply(contribution, op)
    if scales:
        packing.scale(contribution, group.size())
    return contribution


def _has_fractions(tensor: torch.Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def target_of(tensor: torch.Tensor, how: ReductionRule) -> torch.Tensor:
    """Return memory for a result for `tensor`: its own, where that will do."""
    if tensor.dtype == how.dtype:
        total = packing.dense(tensor)
        return total.detach() if total.requires_grad else total
    return torch.empty(tensor.shape, dtype=how.dtype, device="cpu")


def finish(group: Group, total: torch.Tensor, tensor: torch.Tensor, how: ReductionRule) -> None:
    """Write what was reduced to a tensor, divided if it is to be an average."""
    if how.divides:
        divisor: float = group.size()
        if _has_fractions(total):
            # Exact: see Note [Averages in range].
            divisor *= scale_of(group.size())
        packing.divide(total, divisor)
    if total is not tensor:
        packing.write_back(total, tensor)


def _summed_here(count: int, how: ReductionRule) -> bool:
    """Return whether the ranks themselves add up their parts of a reduce_scatter.

    Depends on nothing that differs over ranks.
    """
    return (
        how.dtype in _SUMMED_DTYPES
        and how.operation == MPI.SUM
        and not how.multiplies
        and count * how.dtype.itemsize >= _SUMMED_HERE
    )


def _exchange_parts(
    group: Group, parts: Sequence[torch.Tensor]
) -> tuple[list[Pending], list[torch.Tensor]]:
    """Send each rank its part unchanged; return memory for every rank's part for this one."""
    sent = [packing.dense(part).detach() for part in parts]
    own = group.rank()
    received = [torch.empty_like(sent[own]) for _ in sent]
    received[own] = sent[own]
    outgoing = [None if rank == own else part for rank, part in enumerate(sent)]
    incoming = [None if rank == own else part for rank, part in enumerate(received)]
    return point_to_point.exchange(group, outgoing, incoming), received


def _add_up(
    group: Group, parts: list[torch.Tensor], total: torch.Tensor, how: ReductionRule
) -> None:
    """Write the sum of parts to `total`, in the order of ranks: the same in each run."""
    if not parts:
        return
    # This rank's part may lie in the output, which is written first.
    parts = [packing.apart(part, [total]).view(total.shape) for part in parts]
    with torch.no_grad():
        total.copy_(parts[0])
        if how.divides and _has_fractions(total):
            packing.scale(total, group.size())
            for part in parts[1:]:
                scaled = part.to(total.dtype, copy=True)
                packing.scale(scaled, group.size())
                total.add_(scaled)
            return
        for part in parts[1:]:
            total.add_(part.to(total.dtype))  # torch cannot add a uint16 to an int32


def _iallreduce(
    group: Group, contribution: torch.Tensor, total: torch.Tensor, how: ReductionRule
) -> list[Pending]:
    """Reduce to all, in place where both are the same memory.

    Open MPI's nonblocking all-reduce is faster out of place, but by less than a copy takes.
    """
    pending = []
    in_place = contribution is total or contribution.data_ptr() == total.data_ptr()
    targets = point_to_point.pieces(total)
    sources = targets if in_place else point_to_point.pieces(contribution)
    for source, target in zip(sources, targets, strict=True):
        request = group.communicator.Iallreduce(
            MPI.IN_PLACE if in_place else datatypes.buffer_of(source, how.datatype),
            datatypes.buffer_of(target, how.datatype),
            op=how.operation,
        )
        pending.append(group.pending(request, "MPI_Iallreduce", source, target))
    return pending


def _ireduce(
    group: Group,
    contribution: torch.Tensor,
    total: torch.Tensor | None,
    how: ReductionRule,
    root: int,
) -> list[Pending]:
    """Reduce to one rank, where `total` is the memory for the result."""
    pending = []
    sources = point_to_point.pieces(contribution)
    targets = [None] * len(sources) if total is None else point_to_point.pieces(total)
    for source, target in zip(sources, targets, strict=True):
        request = group.communicator.Ireduce(
            datatypes.buffer_of(source, how.datatype),
            None if target is None else datatypes.buffer_of(target, how.datatype),
            op=how.operation,
            root=root,
        )
        pending.append(group.pending(request, "MPI_Ireduce", source, target))
    return pending


def _ireduce_scatter(
    group: Group,
    contribution: torch.Tensor,
    total: torch.Tensor,
    counts: list[int],
    how: ReductionRule,
) -> list[Pending]:
    flat = packing.apart(contribution, [total]).view(-1)
    if flat.numel() > point_to_point.LARGEST_COUNT:
        return [
            pending
            for rank, part in enumerate(torch.split(flat, counts))
            for pending in _ireduce(
                group, part, total.view(-1) if rank == group.rank() else None, how, rank
            )
        ]
    source = datatypes.buffer_of(flat, how.datatype)
    target = datatypes.buffer_of(total, how.datatype)
    if len(set(counts)) == 1:
        memory, _, datatype = source
        request = group.communicator.Ireduce_scatter_block(
            (memory, counts[0], datatype), target, op=how.operation
        )
        return [group.pending(request, "MPI_Ireduce_scatter_block", flat, total)]
    request = group.communicator.Ireduce_scatter(source, target, counts, op=how.operation)
    return [group.pending(request, "MPI_Ireduce_scatter", flat, total)]


def check_single(group: Group, output: torch.Tensor, tensor: torch.Tensor) -> None:
    """Raise unless this rank's tensors fit a reduce_scatter of one. Not collective."""
    count = output.numel()
    if tensor.numel() != count * group.size():
        raise ValueError(
            f"reduce_scatter to {count} elements on each of {group.size()} ranks "
            f"needs an input of {count * group.size()} elements, not {tensor.numel()}"
        )
    if tensor.dtype != output.dtype:
        raise TypeError(f"reduce_scatter of {tensor.dtype} into an output of {output.dtype}")


def check_parts(group: Group, output: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Raise unless this rank's tensors fit a reduce_scatter of lists. Not collective."""
    if len(parts) != group.size():
        raise ValueError(
            f"reduce_scatter needs {group.size()} input tensors, one a rank, not {len(parts)}"
        )
    own = parts[group.rank()]
    if own.numel() != output.numel():
        raise ValueError(
            f"reduce_scatter of {own.numel()} elements for rank {group.me} into an output of "
            f"{output.numel()}"
        )
    for part in parts:
        if part.dtype != output.dtype:
            raise TypeError(f"reduce_scatter of {part.dtype} into an output of {output.dtype}")
