"""Turn a call of an operation into a request to the other ranks, and submit it.

Arguments that are wrong on this rank alone are refused here; what must be equal over ranks is left
to the coordinator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from mpiddp.horovod import handles
from mpiddp.horovod.adasum import is_power_of_two
from mpiddp.horovod.coordinator import Request
from mpiddp.horovod.errors import HorovodInternalError
from mpiddp.horovod.execution import Submission, torch_operation
from mpiddp.horovod.process_sets import ProcessSet, agreement_of, registered, table
from mpiddp.horovod.reduce_ops import Adasum, Average, ReduceOp, Sum

if TYPE_CHECKING:
    from mpiddp.horovod.agreement import Agreement

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "new_outputs",
    "one",
    "reduce_scatter",
    "several",
    "without_tensors",
]

_INTEGERS_WITH_AVERAGE = (torch.int32, torch.int64)


def one(submission: Submission) -> torch.Tensor:
    """Return the one output of an operation. Not collective."""
    return submission.outputs[0]


def several(submission: Submission) -> tuple[torch.Tensor, ...]:
    """Return the outputs of a grouped operation. Not collective."""
    return tuple(submission.outputs)


def new_outputs(kind: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return memory for results like `tensors`. Not collective. Raises what `all_reduce` does."""
    _check_layout(kind, tensors)
    return [
        torch.empty_like(tensor, memory_format=torch.contiguous_format).detach()
        for tensor in tensors
    ]


def all_reduce(
    tensors: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    name: str | None,
    op: ReduceOp,
    factors: tuple[float, float],
    process_set: ProcessSet,
    grouped: bool = False,
) -> int:
    """Submit an all-reduce of `tensors` into `outputs`, and return its handle. Not collective."""
    kind = "grouped_allreduce" if grouped else "allreduce"
    agreement = agreement_of(process_set, kind)
    if op == Adasum:
        _check_adasum(tensors, process_set)
    else:
        _check_reduction(tensors, op)
    request = _request(agreement, kind, name, tensors)._replace(
        kind="allreduce", op=int(op), prescale=float(factors[0]), postscale=float(factors[1])
    )
    result = several if grouped else one
    return handles.submit(agreement, Submission(request, tensors, outputs, result))


def reduce_scatter(
    tensors: Sequence[torch.Tensor],
    name: str | None,
    op: ReduceOp,
    factors: tuple[float, float],
    process_set: ProcessSet,
    grouped: bool = False,
) -> int:
    """Submit a reduce-scatter along the first dimension; return its handle. Not collective."""
    kind = "grouped_reducescatter" if grouped else "reducescatter"
    agreement = agreement_of(process_set, kind)
    if op not in (Average, Sum):
        raise HorovodInternalError(f"{kind} knows hvd.Average and hvd.Sum, not {ReduceOp(op).name}")
    _check_reduction(tensors, op)
    if any(not tensor.dim() for tensor in tensors):
        raise ValueError(f"{kind}: a tensor without dimensions has no rows to divide")
    request = _request(agreement, kind, name, tensors)._replace(
        kind="reducescatter", op=int(op), prescale=float(factors[0]), postscale=float(factors[1])
    )
    result = several if grouped else one
    return handles.submit(agreement, Submission(request, tensors, result=result))


def all_gather(
    tensors: Sequence[torch.Tensor],
    name: str | None,
    process_set: ProcessSet,
    grouped: bool = False,
) -> tuple[int, Submission]:
    """Submit an all-gather along the first dimension. Not collective.

    Returns:
        its handle, and the submission.
    """
    kind = "grouped_allgather" if grouped else "allgather"
    agreement = agreement_of(process_set, kind)
    request = _request(agreement, kind, name, tensors)._replace(kind="allgather")
    submission = Submission(request, tensors, result=several if grouped else one)
    return handles.submit(agreement, submission), submission


def broadcast(
    tensor: torch.Tensor,
    output: torch.Tensor,
    root_rank: int,
    name: str | None,
    process_set: ProcessSet,
) -> int:
    """Submit a broadcast from a rank of the world, and return its handle. Not collective."""
    agreement = agreement_of(process_set, "broadcast")
    ranks = registered(process_set).ranks
    if root_rank not in ranks:
        raise ValueError(
            f"broadcast: root_rank {root_rank} is not in the process set of ranks {ranks}"
        )
    request = _request(agreement, "broadcast", name, [tensor])._replace(
        root=root_rank, detail=str(ranks.index(root_rank))
    )
    return handles.submit(agreement, Submission(request, [tensor], [output], one))


def all_to_all(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None,
    name: str | None,
    process_set: ProcessSet,
) -> int:
    """Submit an exchange of rows, and return its handle. Not collective."""
    agreement = agreement_of(process_set, "alltoall")
    size = len(registered(process_set).ranks)
    rows = tensor.shape[0] if tensor.dim() else 0
    if splits is None or len(splits) == 0:
        if rows % size:
            raise ValueError(
                f"alltoall cannot divide {rows} rows equally over {size} ranks; give splits"
            )
        counts = [rows // size] * size
    else:
        if isinstance(splits, torch.Tensor):
            if splits.dim() != 1 or splits.is_floating_point():
                raise ValueError("the splits of alltoall must be a list of integers")
            counts = [int(count) for count in splits.tolist()]
        else:
            counts = [int(count) for count in splits]
        if len(counts) != size:
            raise ValueError(f"alltoall needs as many splits as ranks, {size}, not {len(counts)}")
        if sum(counts) > rows or min(counts) < 0:
            raise ValueError(f"alltoall: splits {counts} do not fit a tensor of {rows} rows")
    request = _request(agreement, "alltoall", name, [tensor])._replace(splits=tuple(counts))

    def result(submission: Submission) -> tuple[torch.Tensor, torch.Tensor]:
        if isinstance(splits, torch.Tensor):
            received = splits.new_tensor(submission.received_splits)
        else:
            received = torch.tensor(submission.received_splits, dtype=torch.int32, device="cpu")
        return submission.outputs[0], received

    return handles.submit(agreement, Submission(request, [tensor], result=result))


def without_tensors(kind: str, process_set: ProcessSet, what: Any = None, steps: int = 0) -> int:
    """Submit a barrier or a join, and return its handle. Not collective."""
    agreement = agreement_of(process_set, kind)
    key = kind if kind == "join" else f"{kind}.{agreement.unnamed(kind)}"
    return handles.submit(agreement, Submission(Request(key, kind, steps=steps), result=what))


def _request(
    agreement: Agreement, kind: str, name: str | None, tensors: Sequence[torch.Tensor]
) -> Request:
    _check_layout(kind, tensors)
    devices = {"GPU" if tensor.is_cuda else "CPU" for tensor in tensors}
    if len(devices) > 1:
        raise ValueError(f"the tensors of one {kind} must all be on CPU or all on a GPU")
    described = tuple(
        (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for tensor in tensors
    )
    name = agreement.unnamed(kind) if name is None else name
    return Request(f"{kind}.{name}", kind, described, devices.pop())


def _check_layout(kind: str, tensors: Sequence[torch.Tensor]) -> None:
    if not tensors:
        raise ValueError(f"{kind} needs at least one tensor")
    for tensor in tensors:
        if tensor.layout is not torch.strided:
            raise ValueError(
                f"{kind} cannot handle a tensor of layout {tensor.layout}; see "
                f"hvd.sparse_allreduce_async, or call to_dense()"
            )


def _check_reduction(tensors: Sequence[torch.Tensor], op: ReduceOp) -> None:
    from mpiddp.mpi import datatypes  # imports MPI

    for dtype in {tensor.dtype for tensor in tensors}:
        try:
            datatypes.reduction(dtype, torch_operation(op, dtype))
        except TypeError as error:
            raise ValueError(str(error)) from None
        if op == Average:
            _check_average(dtype)


def _check_average(dtype: torch.dtype) -> None:
    """Refuse what Horovod has no average of: a sum of small integers soon overflows."""
    if dtype is torch.bool:
        raise ValueError("truth values have no average; give op=hvd.Max, or hvd.Min")
    if not (dtype.is_floating_point or dtype.is_complex or dtype in _INTEGERS_WITH_AVERAGE):
        raise ValueError(
            f"hvd.Average is not for {dtype}, whose sum would overflow: average "
            f"tensor.to(torch.int64), or give op=hvd.Sum, hvd.Min or hvd.Max"
        )


def _check_adasum(tensors: Sequence[torch.Tensor], process_set: ProcessSet) -> None:
    if process_set.process_set_id != 0:
        raise NotImplementedError("hvd.Adasum is for the set of all ranks only, as in Horovod")
    size = len(table().world_ranks)
    if not is_power_of_two(size):
        raise NotImplementedError(  # Adasum combines ranks in pairs; Horovod refuses the same
            f"hvd.Adasum needs a power of two of ranks (1, 2, 4, ...), not {size}"
        )
    for tensor in tensors:
        if not tensor.is_floating_point():
            raise ValueError(f"hvd.Adasum is for tensors of floats, not {tensor.dtype}")
