"""The collectives between nodes whose data fits into the block in which the calls are compared.

See Note [Calls in a block] in blocks.pyx. Whether it fits depends on nothing that differs over
ranks that call the same. What does not fit, or may have other sizes on each rank, goes as
elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mpiddp.collectives import movement, packing, reductions
from mpiddp.mpi import datatypes
from mpiddp.mpi.blocks import HANDED_ON, ROOM, Block

if TYPE_CHECKING:
    from mpiddp.collectives.movement import Lists
    from mpiddp.collectives.operation import Group, Operation


def _all_reduce(group: Group, tensors: Sequence[torch.Tensor], op: dist.ReduceOp) -> Operation:
    total = yield from _reduced(group, tensors, op)
    if total is None:
        return (yield from reductions.all_reduce(group, tensors, op))
    return list(tensors)


def _reduce(
    group: Group, tensors: Sequence[torch.Tensor], op: dist.ReduceOp, root: int
) -> Operation:
    total = yield from _reduced(group, tensors, op, here=group.rank() == root)
    if total is None:
        return (yield from reductions.reduce(group, tensors, op, root))
    return list(tensors)


def _reduced(
    group: Group, tensors: Sequence[torch.Tensor], op: dist.ReduceOp, here: bool = True
) -> Operation:
    """Reduce a tensor, and write the result to it if it belongs `here`; None: it does not fit."""
    if len(tensors) != 1:
        return None
    (tensor,) = tensors
    how = datatypes.reduction(tensor.dtype, op)
    size = tensor.numel() * how.dtype.itemsize
    if how.way == 0 or size > ROOM:
        return None
    contribution = reductions.contribution_of(group, tensor, how, op)
    block = Block()
    block.carry(how.way, contribution.data_ptr(), size, 0, size)
    yield from _combined(group, block)
    if here:
        total = reductions.target_of(tensor, how)
        block.read(total.data_ptr(), size, 0)
        reductions.finish(group, total, tensor, how)
    return tensor


def _reduce_scatter_single(
    group: Group,
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    op: dist.ReduceOp,
) -> Operation:
    if len(outputs) == 1:
        (output,), (tensor,) = outputs, inputs
        how = datatypes.reduction(output.dtype, op)
        whole = tensor.numel() * how.dtype.itemsize
        fits = tensor.numel() == output.numel() * group.size() and tensor.dtype == output.dtype
        if fits and how.way and whole <= ROOM:
            contribution = reductions.contribution_of(group, tensor, how, op)
            block = Block()
            block.carry(how.way, contribution.data_ptr(), whole, 0, whole)
            yield from _combined(group, block)
            total = reductions.target_of(output, how)
            own = whole // group.size()
            block.read(total.data_ptr(), own, group.rank() * own)
            reductions.finish(group, total, output, how)
            return list(outputs)
    return (yield from reductions.reduce_scatter_single(group, outputs, inputs, op))


def _broadcast(group: Group, tensors: Sequence[torch.Tensor], root: int) -> Operation:
    if len(tensors) == 1 and tensors[0].nbytes <= ROOM:
        dense = packing.dense(tensors[0])
        size = dense.nbytes
        block = Block()
        block.carry(HANDED_ON, dense.data_ptr(), size if group.rank() == root else 0, 0, size)
        yield from _combined(group, block)
        if group.rank() != root:
            block.read(dense.data_ptr(), size, 0)
            packing.write_back(dense, tensors[0])
        return list(tensors)
    return (yield from movement.broadcast(group, tensors, root))


def _all_gather(group: Group, outputs: Lists, inputs: Sequence[torch.Tensor]) -> Operation:
    if len(inputs) == 1 and len(outputs) == 1:
        (parts,), (tensor,) = outputs, inputs
        movement.check_gathered(group, parts, tensor)
        sizes = packing.sizes_in_bytes(parts)
        if sum(sizes) <= ROOM:
            dense = packing.dense(tensor)
            block = Block()
            place = sum(sizes[: group.rank()])
            block.carry(HANDED_ON, dense.data_ptr(), dense.nbytes, place, sum(sizes))
            yield from _combined(group, block)
            place = 0
            for part, size in zip(parts, sizes, strict=True):
                target = packing.dense(part)
                block.read(target.data_ptr(), size, place)
                packing.write_back(target, part)
                place += size
            return movement.stacked(outputs)
    return (yield from movement.all_gather(group, outputs, inputs))


def _all_gather_single(
    group: Group, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> Operation:
    if len(outputs) == 1 and outputs[0].nbytes <= ROOM:
        (output,), (tensor,) = outputs, inputs
        movement.check_gathered_single(group, output, tensor)
        dense = packing.dense(tensor)
        block = Block()
        size = dense.nbytes
        block.carry(HANDED_ON, dense.data_ptr(), size, group.rank() * size, output.nbytes)
        yield from _combined(group, block)
        target = packing.dense(output)
        block.read(target.data_ptr(), output.nbytes, 0)
        packing.write_back(target, output)
        return list(outputs)
    return (yield from movement.all_gather_single(group, outputs, inputs))


def _barrier(group: Group) -> Operation:
    yield from _combined(group, Block())
    return []


def _combined(group: Group, block: Block) -> Any:
    sent = group.send_block(block)
    yield sent.pending
    group.check_block(sent)


# What to do in the place of an operation.
WAYS: dict[Callable[..., Operation], Callable[..., Operation]] = {
    reductions.all_reduce: _all_reduce,
    reductions.reduce: _reduce,
    reductions.reduce_scatter_single: _reduce_scatter_single,
    movement.broadcast: _broadcast,
    movement.all_gather: _all_gather,
    movement.all_gather_single: _all_gather_single,
    movement.barrier: _barrier,
}
