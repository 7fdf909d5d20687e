"""The collectives of a group whose ranks share memory, carried out there: see group_memory.pyx.

Which way a collective takes depends on nothing that differs over ranks that call the same. What is
not here is traded in memory, see `point_to_point.exchange`, or goes by messages as elsewhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.distributed as dist

from mpiddp.collectives import movement, packing, point_to_point, reductions
from mpiddp.collectives.group_memory import NO_ELEMENT
from mpiddp.mpi import datatypes
from mpiddp.system.kernels import ELEMENTS

if TYPE_CHECKING:
    from mpiddp.collectives.operation import Group, Operation
    from mpiddp.mpi.datatypes import ReductionRule

__all__ = ["WAYS", "own_part"]

# Compared as numbers: comparing torch's enums takes microseconds.
_SUM_AND_AVG = [int(cast(Any, kind)) for kind in (dist.ReduceOp.SUM, dist.ReduceOp.AVG)]


class _Reduction(NamedTuple):
    """How a reduction is carried out in memory.

    Attributes:
        element: of the kernels, which round once and divide; else `NO_ELEMENT`.
        how: what is done around it, where the kernels do not.
    """

    element: int
    how: ReductionRule


def _reduction(dtype: torch.dtype, op: dist.ReduceOp) -> _Reduction | None:
    """Return how to reduce in memory, None if that cannot be."""
    how = datatypes.reduction(dtype, op)
    kind: Any = getattr(op, "op", op)
    if dtype in ELEMENTS and int(kind) in _SUM_AND_AVG:
        return _Reduction(ELEMENTS[dtype], how)
    return _Reduction(NO_ELEMENT, how) if how.way else None


def _contribution(
    group: Group, tensor: torch.Tensor, by: _Reduction, op: dist.ReduceOp
) -> torch.Tensor:
    """Return this rank's input; it is not written to."""
    if by.element == NO_ELEMENT:
        return reductions.contribution_of(group, tensor, by.how, op)
    return packing.dense(tensor)


def _target(tensor: torch.Tensor, by: _Reduction) -> torch.Tensor:
    if by.element == NO_ELEMENT:
        return reductions.target_of(tensor, by.how)
    return packing.dense(tensor)


def _finish(group: Group, total: torch.Tensor, tensor: torch.Tensor, by: _Reduction) -> None:
    if by.element == NO_ELEMENT:
        reductions.finish(group, total, tensor, by.how)
    else:
        packing.write_back(total, tensor)


def _divisor(group: Group, by: _Reduction) -> float:
    return group.size() if by.how.divides else 1.0


def _all_reduce(group: Group, tensor: torch.Tensor, op: dist.ReduceOp) -> Operation:
    by = _reduction(tensor.dtype, op)
    if by is None:
        yield from reductions.all_reduce(group, [tensor], op)
    else:
        yield from _reduced(group, tensor, by, op, -1)


def _reduce(group: Group, tensor: torch.Tensor, op: dist.ReduceOp, root: int) -> Operation:
    by = _reduction(tensor.dtype, op)
    if by is None:
        yield from reductions.reduce(group, [tensor], op, root)
    else:
        yield from _reduced(group, tensor, by, op, root)


def _reduced(
    group: Group, tensor: torch.Tensor, by: _Reduction, op: dist.ReduceOp, root: int
) -> Operation:
    contribution = _contribution(group, tensor, by, op)
    here = root in (-1, group.rank())
    total = _target(tensor, by) if here else contribution
    yield group.memory.reduce(
        contribution.data_ptr(),
        total.data_ptr(),
        contribution.nbytes,
        by.element,
        by.how.way,
        _divisor(group, by),
        root,
        (contribution, total, tensor),
    )
    if here:
        _finish(group, total, tensor, by)


def _all_reduce_together(
    group: Group, tensors: Sequence[torch.Tensor], op: dist.ReduceOp
) -> Operation:
    by = _reduction(tensors[0].dtype, op)
    if by is None:
        return (yield from reductions.all_reduce_together(group, tensors, op))
    flat = reductions.flattened(tensors)
    yield from _reduced(group, flat, by, op, -1)
    reductions.unflatten(flat, tensors)
    return list(tensors)


def _reduce_scatter(
    group: Group, output: torch.Tensor, parts: Sequence[torch.Tensor], op: dist.ReduceOp
) -> Operation:
    by = _reduction(output.dtype, op)
    if by is None:
        yield from reductions.reduce_scatter(group, [output], [parts], op)
        return
    sources = [_contribution(group, part, by, op) for part in parts]
    if len(set(packing.sizes_in_bytes(parts))) == 1:
        yield from _reduced_parts(group, output, sources, by)
        return
    total = _target(output, by)
    sources = [packing.apart(source, [total]) for source in sources]
    waited: list[Any] = [
        group.memory.reduce(
            source.data_ptr(),
            total.data_ptr() if to == group.rank() else source.data_ptr(),
            source.nbytes,
            by.element,
            by.how.way,
            _divisor(group, by),
            to,
            (sources, total, output),
        )
        for to, source in enumerate(sources)
    ]
    yield waited
    _finish(group, total, output, by)


def _reduce_scatter_single(
    group: Group, output: torch.Tensor, tensor: torch.Tensor, op: dist.ReduceOp
) -> Operation:
    by = _reduction(output.dtype, op)
    if by is None:
        yield from reductions.reduce_scatter_single(group, [output], [tensor], op)
    else:
        yield from _reduced_parts(group, output, [_contribution(group, tensor, by, op)], by)


def _reduced_parts(
    group: Group, output: torch.Tensor, sources: Sequence[torch.Tensor], by: _Reduction
) -> Operation:
    """Reduce one tensor for each rank, or one with the parts for all ranks."""
    total = _target(output, by)
    sources = [packing.apart(source, [total]) for source in sources]
    size = total.nbytes
    if len(sources) == 1:
        first = sources[0].data_ptr()
        addresses = [first + rank * size for rank in range(group.size())]
    else:
        addresses = [source.data_ptr() for source in sources]
    divisor = _divisor(group, by)
    yield group.memory.reduce_parts(
        addresses, total.data_ptr(), size, by.element, by.how.way, divisor, (sources, total, output)
    )
    _finish(group, total, output, by)


def _broadcast(group: Group, tensor: torch.Tensor, root: int) -> Operation:
    dense = packing.dense(tensor)
    yield group.memory.spread(dense.data_ptr(), dense.nbytes, root, (dense, tensor))
    if group.rank() != root:
        packing.write_back(dense, tensor)


def _all_gather(group: Group, parts: Sequence[torch.Tensor], tensor: torch.Tensor) -> Operation:
    targets = [packing.dense(part) for part in parts]
    if len(set(packing.sizes_in_bytes(parts))) == 1:
        source = own_part(group, packing.dense(tensor), targets)
        addresses = [target.data_ptr() for target in targets]
        kept = (source, targets, parts)
        yield group.memory.gather(source.data_ptr(), addresses, source.nbytes, kept)
    else:
        source = packing.apart(packing.dense(tensor), parts)
        yield point_to_point.exchange(group, [source] * group.size(), targets)
    for target, part in zip(targets, parts, strict=True):
        packing.write_back(target, part)


def _all_gather_single(group: Group, output: torch.Tensor, tensor: torch.Tensor) -> Operation:
    target = packing.dense(output)
    source = packing.dense(tensor)
    size, first = source.nbytes, target.data_ptr()
    addresses = [first + rank * size for rank in range(group.size())]
    if source.data_ptr() != addresses[group.rank()]:
        source = packing.apart(source, [target])
    kept = (source, target, output)
    yield group.memory.gather(source.data_ptr(), addresses, size, kept)
    packing.write_back(target, output)


def own_part(group: Group, source: torch.Tensor, targets: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a rank's input, which may be its own part of the output, but no other.

    Not collective.
    """
    if source.data_ptr() == targets[group.rank()].data_ptr():
        return source
    return packing.apart(source, targets)


def _all_to_all_single(
    group: Group,
    output: torch.Tensor,
    tensor: torch.Tensor,
    output_splits: Sequence[int],
    input_splits: Sequence[int],
) -> Operation:
    rest = (output, tensor, output_splits, input_splits)
    splits = input_splits or output_splits  # then sizes may differ between ranks
    if splits:
        return (yield from movement.all_to_all_single(group, *rest))
    movement.check_exchanged(group, output, tensor)
    target = packing.dense(output)
    source = packing.apart(packing.dense(tensor), [target])
    size = source.nbytes // group.size()
    ranks = range(group.size())
    yield group.memory.exchange(
        [source.data_ptr() + rank * size for rank in ranks],
        [target.data_ptr() + rank * size for rank in ranks],
        size,
        (source, target, output),
    )
    packing.write_back(target, output)
    return [output]


def _barrier(group: Group) -> Operation:
    yield group.memory.meet()
    return []


def _check_sum(group: Group, tensor: torch.Tensor, op: dist.ReduceOp, *_: int) -> None:
    datatypes.reduction(tensor.dtype, op)


def _check_parts(
    group: Group, output: torch.Tensor, parts: Sequence[torch.Tensor], op: dist.ReduceOp
) -> None:
    reductions.check_parts(group, output, parts)
    datatypes.reduction(output.dtype, op)


def _check_single(
    group: Group, output: torch.Tensor, tensor: torch.Tensor, op: dist.ReduceOp
) -> None:
    reductions.check_single(group, output, tensor)
    datatypes.reduction(output.dtype, op)


def _for_each(
    one: Callable[..., Operation],
    check: Callable[..., None] | None,
    lists: int,
    result: Callable[..., object] = list,
) -> Callable[..., Operation]:
    """Return an operation on lists of tensors, from that on one of each.

    Args:
        one: the operation on one.
        check: raises what is wrong with one, before anything is under way.
        lists: how many of the arguments are lists; the others are the same for all.
        result: makes the result from the first list.
    """

    def all_of(group: Group, *arguments: Any) -> Operation:
        calls = [(*each, *arguments[lists:]) for each in zip(*arguments[:lists], strict=True)]
        if len(calls) > 1:
            for tensor in itertools.chain(*arguments[:lists]):
                packing.check_on_host([tensor] if isinstance(tensor, torch.Tensor) else tensor)
        if check is not None:
            for call in calls:
                check(group, *call)
        begun = [one(group, *call) for call in calls]
        if len(begun) == 1:
            yield from begun[0]
        else:
            waited: list[Any] = []
            for operation in begun:
                pending = next(operation)
                waited += pending if isinstance(pending, list) else [pending]
            yield waited
            for operation in begun:
                for _ in operation:
                    raise AssertionError("an operation has a second step")
        return result(arguments[0])

    return all_of


# What to do in the place of an operation.
WAYS: dict[Callable[..., Any], Callable[..., Operation]] = {
    reductions.all_reduce: _for_each(_all_reduce, _check_sum, 1),
    reductions.all_reduce_together: _all_reduce_together,
    reductions.reduce: _for_each(_reduce, _check_sum, 1),
    reductions.reduce_scatter: _for_each(_reduce_scatter, _check_parts, 2),
    reductions.reduce_scatter_single: _for_each(_reduce_scatter_single, _check_single, 2),
    movement.broadcast: _for_each(_broadcast, None, 1),
    movement.all_gather: _for_each(_all_gather, movement.check_gathered, 2, movement.stacked),
    movement.all_gather_single: _for_each(_all_gather_single, movement.check_gathered_single, 2),
    movement.all_to_all_single: _all_to_all_single,
    movement.barrier: _barrier,
}
