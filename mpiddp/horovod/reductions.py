"""Horovod's reductions: allreduce, reducescatter, and their grouped and asynchronous forms.

Arguments that all have:

- `name`: operations of the same kind and name match over ranks, in whatever order ranks submit
  them. Without a name they match by their order. Two of one name cannot wait at the same time.
- `op`: hvd.Average (the default), hvd.Sum, hvd.Min, hvd.Max, hvd.Product or hvd.Adasum;
  reduce-scatter knows the first two. Averages of int32 and int64 are rounded towards zero; those of
  smaller integers are refused, as in Horovod.
- `average`: deprecated, see `mpiddp.horovod.reduce_ops.chosen_op`.
- `prescale_factor`, `postscale_factor`: multiply before and after the reduction.
- `process_set`: whose ranks take part.
- `compression`: one of hvd.Compression, or any class with its two functions.

16-bit floats are reduced in float32 and rounded once. Errors that all raise: HorovodInternalError,
on all ranks, where ranks differ in shape, dtype, op, factors or number of tensors. On this rank
alone, ValueError for arguments that are wrong: it is not in the process set, an operation of the
name waits already, or a layout or dtype cannot be reduced; NotImplementedError for Adasum with a
number of ranks that is no power of two. What is asynchronous raises the first in `synchronize`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mpiddp.horovod import gradients, movement, submitting
from mpiddp.horovod.compression import Compression
from mpiddp.horovod.handles import synchronize
from mpiddp.horovod.process_sets import ProcessSet, global_process_set, registered
from mpiddp.horovod.reduce_ops import Average, ReduceOp, Sum, chosen_op

__all__ = [
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "reducescatter",
    "reducescatter_async",
    "sparse_allreduce_async",
]


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Submit an all-reduce, and return its handle for `synchronize`.

    Not collective. The input keeps its values; the result is a new tensor of its shape and dtype.
    For the arguments and errors see this file's first lines.
    """
    outputs = submitting.new_outputs("allreduce", [tensor])
    how = chosen_op(op, average), (prescale_factor, postscale_factor), process_set
    return submitting.all_reduce([tensor], outputs, name, *how)


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Submit an all-reduce in place, and return its handle for `synchronize`.

    Not collective. `tensor` must not be used until then. As `allreduce_async` otherwise.
    """
    how = chosen_op(op, average), (prescale_factor, postscale_factor), process_set
    return submitting.all_reduce([tensor], [tensor], name, *how)


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Return the tensor reduced over all ranks; the input keeps its values.

    Collective. Differentiable: the gradient is reduced in the same way. For the arguments and
    errors see this file's first lines.
    """
    narrow, context = compression.compress(tensor)
    how = chosen_op(op, average), (prescale_factor, postscale_factor), process_set
    (reduced,) = gradients.all_reduce([narrow], name, *how, grouped=False)
    return _tensor(compression.decompress(reduced, context))


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduce a tensor over all ranks in place, and return it.

    Collective. Not differentiable. As `allreduce` otherwise.
    """
    op = chosen_op(op, average)
    how = prescale_factor, postscale_factor, process_set
    return _tensor(synchronize(allreduce_async_(tensor, None, name, op, *how)))


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Submit the all-reduce of several tensors as one operation, and return its handle.

    Not collective. `synchronize` returns a tuple of new tensors. As `allreduce_async` otherwise.
    """
    outputs = submitting.new_outputs("grouped_allreduce", tensors)
    how = chosen_op(op, average), (prescale_factor, postscale_factor), process_set
    return submitting.all_reduce(tensors, outputs, name, *how, grouped=True)


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Submit the all-reduce of several tensors in place, and return its handle.

    Not collective. As `grouped_allreduce_async` otherwise.
    """
    how = chosen_op(op, average), (prescale_factor, postscale_factor), process_set
    return submitting.all_reduce(tensors, tensors, name, *how, grouped=True)


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Return several tensors reduced over all ranks, as one operation.

    Collective. Differentiable, as `allreduce`.
    """
    pairs = [compression.compress(tensor) for tensor in tensors]
    how = chosen_op(op, average), (prescale_factor, postscale_factor), process_set
    narrow = [tensor for tensor, _ in pairs]
    reduced = gradients.all_reduce(narrow, name, *how, grouped=True)
    return _decompressed(reduced, pairs, compression)


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Reduce several tensors over all ranks in place, as one operation, and return them.

    Collective. Not differentiable. As `allreduce_` otherwise.
    """
    op = chosen_op(op, average)
    how = prescale_factor, postscale_factor, process_set
    return list(synchronize(grouped_allreduce_async_(tensors, None, name, op, *how)))


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Submit a reduce-scatter, and return its handle for `synchronize`.

    Not collective. As `reducescatter` otherwise.
    """
    how = ReduceOp(op), (prescale_factor, postscale_factor), process_set
    return submitting.reduce_scatter([tensor], name, *how)


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Reduce a tensor over all ranks, and return this rank's rows of it.

    Collective. The first dimension is divided over the ranks; where that is not even, the first
    ranks get one row more. Differentiable: the gradient is the all-gather of those of the ranks,
    with hvd.Sum times the number of ranks, as in Horovod. For the arguments and errors see this
    file's first lines.
    """
    narrow, context = compression.compress(tensor)
    how = ReduceOp(op), (prescale_factor, postscale_factor), process_set
    (reduced,) = gradients.reduce_scatter([narrow], name, *how, grouped=False)
    return _tensor(compression.decompress(reduced, context))


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Submit the reduce-scatter of several tensors as one operation, and return its handle.

    Not collective. `synchronize` returns a tuple of tensors. As `reducescatter` otherwise.
    """
    how = ReduceOp(op), (prescale_factor, postscale_factor), process_set
    return submitting.reduce_scatter(tensors, name, *how, grouped=True)


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Do the `reducescatter` of several tensors as one operation. Collective.

    Differentiable, as `reducescatter`.
    """
    pairs = [compression.compress(tensor) for tensor in tensors]
    how = ReduceOp(op), (prescale_factor, postscale_factor), process_set
    narrow = [tensor for tensor, _ in pairs]
    reduced = gradients.reduce_scatter(narrow, name, *how, grouped=True)
    return _decompressed(reduced, pairs, compression)


def sparse_allreduce_async(
    tensor: Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Submit the all-reduce of a sparse COO tensor.

    Not collective. Indices and values of all ranks are gathered; the same index may come twice
    (see torch.Tensor.coalesce).

    Args:
        tensor: the ranks' may differ in the number of values.
        name: of the operation.
        op: hvd.Average or hvd.Sum.
        process_set: whose ranks take part.

    Returns:
        a function that waits, and returns the sparse result; `synchronize` takes it as well.

    Raises:
        ValueError: the tensor is not sparse, or `op` is another reduction.
    """
    if tensor.layout is not torch.sparse_coo or op not in (Average, Sum):
        raise ValueError(
            "sparse_allreduce_async adds or averages sparse COO tensors: it got layout "
            f"{tensor.layout} and {ReduceOp(op).name}"
        )
    rows = tensor._indices().t().contiguous()
    indices = movement.allgather_async(rows, f"{name}.indices", process_set)
    values = movement.allgather_async(tensor._values(), f"{name}.values", process_set)
    divisor = len(registered(process_set).ranks) if op == Average else 1

    def wait() -> Tensor:
        all_values, all_indices = synchronize(values), synchronize(indices)
        if divisor != 1:
            all_values = all_values / divisor
        return torch.sparse_coo_tensor(
            all_indices.t(), all_values, tensor.shape, is_coalesced=False
        )

    return wait


def _tensor(value: Any) -> Tensor:
    """Return what the user's compression has returned, if it is a tensor.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"decompress() of a compression must return a tensor, not {value!r}")
    return value


def _decompressed(reduced: list[Tensor], pairs: list[Any], compression: Any) -> list[Tensor]:
    return [
        _tensor(compression.decompress(tensor, context))
        for tensor, (_, context) in zip(reduced, pairs, strict=True)
    ]
