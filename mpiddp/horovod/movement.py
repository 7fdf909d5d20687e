"""Horovod's allgather, broadcast and alltoall, with their grouped and asynchronous forms.

Arguments that all have:

- `name`: operations of the same kind and name match over ranks, in whatever order ranks submit
  them. Without a name they match by their order. Two of one name cannot wait at the same time.
- `process_set`: whose ranks take part.

Any dtype. Errors that all raise: HorovodInternalError, on all ranks, where ranks differ in shape,
dtype or root rank. On this rank alone, ValueError for arguments that are wrong: it is not in the
process set, an operation of the name waits already, or a tensor is sparse. What is asynchronous
raises the first in `synchronize`.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mpiddp.horovod import gradients, submitting
from mpiddp.horovod.handles import synchronize
from mpiddp.horovod.process_sets import ProcessSet, global_process_set

__all__ = [
    "allgather",
    "allgather_async",
    "alltoall",
    "alltoall_async",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather",
    "grouped_allgather_async",
]


def allgather_async(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Submit an `allgather`, and return its handle for `synchronize`. Not collective."""
    return submitting.all_gather([tensor], name, process_set)[0]


def allgather(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Return the tensors of all ranks, one after the other along the first dimension.

    Collective. The ranks' tensors may differ in the first dimension only. Differentiable: the
    gradient is this rank's rows of the gradients' average over the ranks, as in Horovod.
    """
    return gradients.all_gather([tensor], name, process_set, grouped=False)[0]


def grouped_allgather_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Submit a `grouped_allgather`, and return its handle. Not collective.

    `synchronize` returns a tuple of tensors.
    """
    return submitting.all_gather(tensors, name, process_set, grouped=True)[0]


def grouped_allgather(
    tensors: Sequence[Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> tuple[Tensor, ...]:
    """Do the `allgather` of several tensors as one operation. Collective. Differentiable."""
    return tuple(gradients.all_gather(tensors, name, process_set, grouped=True))


def broadcast_async(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Submit a `broadcast`, and return its handle for `synchronize`. Not collective."""
    (output,) = submitting.new_outputs("broadcast", [tensor])
    return submitting.broadcast(tensor, output, root_rank, name, process_set)


def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Return the tensor of one rank; the input keeps its values.

    Collective. Differentiable: the gradient is the average over the ranks on `root_rank` and zero
    elsewhere, as in Horovod.

    Args:
        tensor: of the same shape and dtype on all ranks.
        root_rank: as `hvd.rank` counts, also in a process set.
        name: see this file's first lines.
        process_set: whose ranks take part.

    Raises:
        ValueError: `root_rank` is not in the process set. See this file's first lines.
    """
    return gradients.broadcast(tensor, root_rank, name, process_set)


def broadcast_async_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Submit a `broadcast_`, and return its handle for `synchronize`. Not collective."""
    return submitting.broadcast(tensor, tensor, root_rank, name, process_set)


def broadcast_(
    tensor: Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Replace a tensor by that of `root_rank`, and return it.

    Collective. Not differentiable. As `broadcast` otherwise.
    """
    synchronize(broadcast_async_(tensor, root_rank, name, process_set))
    return tensor


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Submit an `alltoall`, and return its handle for `synchronize`. Not collective.

    `synchronize` returns the rows and how many came from each rank, also without splits.
    """
    return submitting.all_to_all(tensor, splits, name, process_set)


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor | tuple[Tensor, Tensor]:
    """Send each rank some rows of a tensor, and return the rows that this rank receives.

    Collective. Differentiable: gradients go back where the rows came from.

    Args:
        tensor: its first dimension is divided.
        splits: how many rows each rank gets, in order; None: all the same. Rows that are left go
            nowhere.
        name: see this file's first lines.
        process_set: whose ranks take part.

    Returns:
        the rows in the order of the ranks; if `splits` are given, also how many came from each
        rank: a tensor like `splits`, else of int32.

    Raises:
        ValueError: the splits do not fit. See this file's first lines.
    """
    output, received = gradients.all_to_all(tensor, splits, name, process_set)
    return output if splits is None else (output, received)
