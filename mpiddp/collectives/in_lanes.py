"""The large collectives of a group over several nodes, in lanes: see Note [Lanes of a group].

Which way a collective takes depends on nothing that differs over ranks that call the same. What is
too small, or the kernels do not add, goes as elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from mpi4py import MPI

from mpiddp.collectives import movement, packing, reductions
from mpiddp.collectives.in_memory import own_part
from mpiddp.collectives.way_table import fits_lanes
from mpiddp.mpi import datatypes
from mpiddp.system.kernels import ELEMENTS

if TYPE_CHECKING:
    from mpiddp.collectives.movement import Lists
    from mpiddp.collectives.operation import Group, Operation
    from mpiddp.mpi.datatypes import ReductionRule

__all__ = ["WAYS"]

# What an operation does that does not go in lanes.
Other = Callable[..., "Operation"]


def _sum(dtype: torch.dtype, op: dist.ReduceOp) -> ReductionRule | None:
    """Return how to reduce in lanes, None if that cannot be: there is only the sum of floats."""
    how = datatypes.reduction(dtype, op)
    return how if how.dtype in ELEMENTS and how.operation == MPI.SUM else None


def _all_reduce(
    other: Other, group: Group, tensors: Sequence[torch.Tensor], op: dist.ReduceOp
) -> Operation:
    if len(tensors) == 1:
        (tensor,) = tensors
        how = _sum(tensor.dtype, op)
        if how is not None and fits_lanes(group, "all_reduce", tensor.nbytes):
            yield from _reduced(group, tensor, how, op)
            return list(tensors)
    return (yield from other(group, tensors, op))


def _all_reduce_together(
    other: Other, group: Group, tensors: Sequence[torch.Tensor], op: dist.ReduceOp
) -> Operation:
    how = _sum(tensors[0].dtype, op)
    if how is None or not fits_lanes(group, "all_reduce", sum(tensor.nbytes for tensor in tensors)):
        return (yield from other(group, tensors, op))
    flat = reductions.flattened(tensors)
    yield from _reduced(group, flat, how, op)
    reductions.unflatten(flat, tensors)
    return list(tensors)


def _reduced(
    group: Group, tensor: torch.Tensor, how: ReductionRule, op: dist.ReduceOp
) -> Operation:
    contribution = reductions.contribution_of(group, tensor, how, op)
    total = reductions.target_of(tensor, how)
    yield group.lanes.reduce(
        contribution.data_ptr(),
        total.data_ptr(),
        contribution.nbytes,
        ELEMENTS[how.dtype],
        (contribution, total, tensor),
    )
    reductions.finish(group, total, tensor, how)


def _reduce_scatter(
    other: Other,
    group: Group,
    outputs: Sequence[torch.Tensor],
    inputs: Lists,
    op: dist.ReduceOp,
) -> Operation:
    if len(outputs) == 1 and len({part.numel() for part in inputs[0]}) == 1:
        reductions.check_parts(group, outputs[0], inputs[0])
        how = _sum(outputs[0].dtype, op)
        whole = outputs[0].nbytes * group.size()
        if how is not None and fits_lanes(group, "reduce_scatter", whole):
            yield from _reduced_parts(group, outputs[0], inputs[0], how, op)
            return list(outputs)
    return (yield from other(group, outputs, inputs, op))


def _reduce_scatter_single(
    other: Other,
    group: Group,
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    op: dist.ReduceOp,
) -> Operation:
    if len(outputs) == 1:
        (output,), (tensor,) = outputs, inputs
        reductions.check_single(group, output, tensor)
        how = _sum(output.dtype, op)
        if how is not None and fits_lanes(group, "reduce_scatter", tensor.nbytes):
            yield from _reduced_parts(group, output, [tensor], how, op)
            return list(outputs)
    return (yield from other(group, outputs, inputs, op))


def _reduced_parts(
    group: Group,
    output: torch.Tensor,
    inputs: Sequence[torch.Tensor],
    how: ReductionRule,
    op: dist.ReduceOp,
) -> Operation:
    """Reduce one tensor for each rank, or one with the parts for all ranks."""
    total = reductions.target_of(output, how)
    sources = [reductions.contribution_of(group, tensor, how, op) for tensor in inputs]
    sources = [packing.apart(source, [total]) for source in sources]
    if len(sources) == 1:
        first = sources[0].data_ptr()
        addresses = [first + rank * total.nbytes for rank in range(group.size())]
    else:
        addresses = [source.data_ptr() for source in sources]
    kept = (sources, total, output)
    element = ELEMENTS[how.dtype]
    yield group.lanes.reduce_parts(addresses, total.data_ptr(), total.nbytes, element, kept)
    reductions.finish(group, total, output, how)


def _broadcast(other: Other, group: Group, tensors: Sequence[torch.Tensor], root: int) -> Operation:
    if len(tensors) != 1 or not fits_lanes(group, "broadcast", tensors[0].nbytes):
        return (yield from other(group, tensors, root))
    dense = packing.dense(tensors[0])
    yield group.lanes.spread(dense.data_ptr(), dense.nbytes, root, (dense, tensors))
    if group.rank() != root:
        packing.write_back(dense, tensors[0])
    return list(tensors)


def _all_gather(
    other: Other, group: Group, outputs: Lists, inputs: Sequence[torch.Tensor]
) -> Operation:
    if len(inputs) == 1 and len(outputs) == 1:
        (parts,), (tensor,) = outputs, inputs
        movement.check_gathered(group, parts, tensor)
        sizes = packing.sizes_in_bytes(parts)
        if len(set(sizes)) == 1 and fits_lanes(group, "all_gather", sum(sizes)):
            targets = [packing.dense(part) for part in parts]
            source = own_part(group, packing.dense(tensor), targets)
            addresses = [target.data_ptr() for target in targets]
            kept = (source, targets, outputs)
            yield group.lanes.gather(source.data_ptr(), addresses, source.nbytes, kept)
            for target, part in zip(targets, parts, strict=True):
                packing.write_back(target, part)
            return movement.stacked(outputs)
    return (yield from other(group, outputs, inputs))


def _all_gather_single(
    other: Other, group: Group, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> Operation:
    if len(outputs) != 1 or not fits_lanes(group, "all_gather", outputs[0].nbytes):
        return (yield from other(group, outputs, inputs))
    (output,), (tensor,) = outputs, inputs
    movement.check_gathered_single(group, output, tensor)
    target, source = packing.dense(output), packing.dense(tensor)
    size, first = source.nbytes, target.data_ptr()
    addresses = [first + rank * size for rank in range(group.size())]
    if source.data_ptr() != addresses[group.rank()]:
        source = packing.apart(source, [target])
    kept = (source, target, output)
    yield group.lanes.gather(source.data_ptr(), addresses, size, kept)
    packing.write_back(target, output)
    return list(outputs)


# What to do in the place of an operation, before whose arguments comes what it does elsewhere.
WAYS: dict[Callable[..., Any], Callable[..., Operation]] = {
    reductions.all_reduce: _all_reduce,
    reductions.all_reduce_together: _all_reduce_together,
    reductions.reduce_scatter: _reduce_scatter,
    reductions.reduce_scatter_single: _reduce_scatter_single,
    movement.broadcast: _broadcast,
    movement.all_gather: _all_gather,
    movement.all_gather_single: _all_gather_single,
}
