"""The differentiable forms of the operations, with the gradients that Horovod defines.

Note [Gradients as in Horovod]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
They are not always those of mathematics, and programs depend on them: that of an all-reduce is the
same all-reduce, also with Min, Max and Product; those of an all-gather and a broadcast are averages
over the ranks, not sums; that of a reduce-scatter is an all-gather, with Sum times the number of
ranks. All are collective in backward. Checked against horovod/torch/mpi_ops.py of Horovod 0.28.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from mpiddp.horovod import submitting
from mpiddp.horovod.handles import synchronize
from mpiddp.horovod.process_sets import ProcessSet, table
from mpiddp.horovod.reduce_ops import Average, ReduceOp, Sum

__all__ = ["all_gather", "all_reduce", "all_to_all", "broadcast", "reduce_scatter"]

Factors = tuple[float, float]


def all_reduce(
    tensors: Sequence[Tensor],
    name: str | None,
    op: ReduceOp,
    factors: Factors,
    process_set: ProcessSet,
    grouped: bool,
) -> list[Tensor]:
    """Return the reduced tensors. Collective."""
    return list(_apply(_AllReduce, name, op, factors, process_set, grouped, *tensors))


def all_gather(
    tensors: Sequence[Tensor], name: str | None, process_set: ProcessSet, grouped: bool
) -> list[Tensor]:
    """Return the gathered tensors. Collective."""
    return list(_apply(_AllGather, name, process_set, grouped, *tensors))


def broadcast(tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Tensor:
    """Return the tensor of `root_rank`. Collective."""
    return cast(Tensor, _apply(_Broadcast, tensor, root_rank, name, process_set))


def all_to_all(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None,
    name: str | None,
    process_set: ProcessSet,
) -> tuple[Tensor, Tensor]:
    """Return the received rows, and how many came from each rank. Collective."""
    output, received = _apply(_AllToAll, tensor, splits, name, process_set)
    return output, received


def reduce_scatter(
    tensors: Sequence[Tensor],
    name: str | None,
    op: ReduceOp,
    factors: Factors,
    process_set: ProcessSet,
    grouped: bool,
) -> list[Tensor]:
    """Return this rank's parts of the reduced tensors. Collective."""
    return list(_apply(_ReduceScatter, name, op, factors, process_set, grouped, *tensors))


def _apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    return function.apply(*args)  # type: ignore[no-untyped-call]


def _all(results: Any, grouped: bool) -> tuple[Tensor, ...]:
    return tuple(results) if grouped else (results,)


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        name: str | None,
        op: ReduceOp,
        factors: Factors,
        process_set: ProcessSet,
        grouped: bool,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.how = op, factors, process_set, grouped
        outputs = submitting.new_outputs("allreduce", tensors)
        handle = submitting.all_reduce(tensors, outputs, name, op, factors, process_set, grouped)
        return _all(synchronize(handle), grouped)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return (None,) * 5 + tuple(all_reduce(grads, None, *ctx.how))


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, name: str | None, process_set: ProcessSet, grouped: bool, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        handle, submission = submitting.all_gather(tensors, name, process_set, grouped)
        outputs = _all(synchronize(handle), grouped)
        ctx.how = process_set, grouped
        ctx.places = []
        own = process_set.rank()
        for place, tensor in enumerate(tensors):
            rows = [sizes[place] for sizes in submission.gathered_rows]
            ctx.places.append((sum(rows[:own]), tensor.shape[0]))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        process_set, grouped = ctx.how
        means = all_reduce(grads, None, Average, (1.0, 1.0), process_set, grouped)
        own = [mean.narrow(0, *place) for mean, place in zip(means, ctx.places, strict=True)]
        return (None, None, None, *own)


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet
    ) -> Tensor:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        (output,) = submitting.new_outputs("broadcast", [tensor])
        handle = submitting.broadcast(tensor, output, root_rank, name, process_set)
        return cast(Tensor, synchronize(handle))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (mean,) = all_reduce(grads, None, Average, (1.0, 1.0), ctx.process_set, False)
        if table().rank != ctx.root_rank:
            mean = torch.zeros_like(mean)
        return mean, None, None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, splits: Any, name: str | None, process_set: ProcessSet
    ) -> tuple[Tensor, Tensor]:
        handle = submitting.all_to_all(tensor, splits, name, process_set)
        output, received = synchronize(handle)
        ctx.process_set, ctx.received, ctx.rows = process_set, received, tensor.shape[0]
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        grad, _ = all_to_all(grads[0], ctx.received, None, ctx.process_set)
        # Rows that the splits left out went nowhere.
        left_out = ctx.rows - grad.shape[0]
        if left_out:
            grad = torch.cat([grad, grad.new_zeros((left_out, *grad.shape[1:]))])
        return grad, None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        name: str | None,
        op: ReduceOp,
        factors: Factors,
        process_set: ProcessSet,
        grouped: bool,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.how = op, factors, process_set, grouped
        handle = submitting.reduce_scatter(tensors, name, op, factors, process_set, grouped)
        return _all(synchronize(handle), grouped)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        op, (before, after), process_set, grouped = ctx.how
        factor = before * after * (process_set.size() if op == Sum else 1)
        scaled = [grad * factor if factor != 1.0 else grad for grad in grads]
        return (None,) * 5 + tuple(all_gather(scaled, None, process_set, grouped))
