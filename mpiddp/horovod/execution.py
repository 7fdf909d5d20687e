"""Start the operations that all ranks of a process set have agreed on, and finish them.

Every rank of the set calls `start` with the same decisions in the same order, so collectives of the
set's process group start in one order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    ReduceScatterOptions,
)

from mpiddp.horovod.adasum import adasum
from mpiddp.horovod.coordinator import Decision, Request, dtype_of
from mpiddp.horovod.reduce_ops import Adasum, Average, ReduceOp

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Work as TorchWork

    from mpiddp.process_group.group import ProcessGroup

__all__ = ["Running", "Submission", "place_of_zeros", "rows_of", "start", "torch_operation"]

_OPERATIONS = {
    ReduceOp.Sum: dist.ReduceOp.SUM,
    ReduceOp.Min: dist.ReduceOp.MIN,
    ReduceOp.Max: dist.ReduceOp.MAX,
    ReduceOp.Product: dist.ReduceOp.PRODUCT,
}


class Submission:
    """An operation that this rank has submitted.

    Args:
        request: what the other ranks are told.
        inputs: its tensors.
        outputs: where the results go; empty where their size is not known yet.
        result: makes what `synchronize` returns from the outputs.

    Attributes:
        received_splits: of an alltoall: rows from each rank, once it has started.
        gathered_rows: of an allgather: by rank, the rows of each tensor.
        running: the operation under way, once it has started.
        done: whether it has succeeded or failed.
        error: why it failed.
        last_joined: what `join` returns.
        stream: the GPU stream on which it was submitted.
    """

    def __init__(
        self,
        request: Request,
        inputs: Sequence[torch.Tensor] = (),
        outputs: Sequence[torch.Tensor] = (),
        result: Callable[[Submission], Any] | None = None,
    ) -> None:
        self.request = request
        self.inputs = list(inputs)
        self.outputs = list(outputs)
        self.result = result
        self.received_splits: list[int] = []
        self.gathered_rows: Sequence[Sequence[int]] = ()
        self.running: Running | None = None
        self.done = False
        self.error: Exception | None = None
        self.last_joined = -1
        self.stream: Any = None
        if self.inputs and self.inputs[0].is_cuda:
            self.stream = torch.cuda.current_stream(self.inputs[0].device)


class Running:
    """Operations of a decision that are under way.

    Args:
        submissions: this rank's; empty if it has joined.
        works: those of the process group.
        finish: writes the results, when all works are done.
    """

    def __init__(
        self,
        submissions: Sequence[Submission],
        works: Sequence[TorchWork] = (),
        finish: Callable[[], None] | None = None,
    ) -> None:
        self.submissions = submissions
        self._works = works
        self._finish = finish

    def is_completed(self) -> bool:
        """Return whether `finish` would not wait. Not collective."""
        return all(work.is_completed() for work in self._works)

    def wait(self) -> None:
        """Wait for the messages; errors are left to `finish`. Not collective."""
        for work in self._works:
            with contextlib.suppress(RuntimeError):
                work.wait()

    def finish(self) -> None:
        """Write the results. Not collective. Raises what a work failed with."""
        with _on_stream(self.submissions):
            for work in self._works:
                work.wait()
            if self._finish is not None:
                self._finish()


def start(decision: Decision, submissions: Sequence[Submission], group: ProcessGroup) -> Running:
    """Start what was decided. Collective over `group`.

    Args:
        decision: RUN, with one or several keys.
        submissions: this rank's for these keys; empty if it has joined.
        group: of the process set.
    """
    first = submissions[0].request if submissions else decision.requests[0]
    with _on_stream(submissions):
        if first.kind == "allreduce":
            return _all_reduce(first, decision, submissions, group)
        maker = _MAKERS.get(first.kind)
        if maker is None:  # a barrier, say: the agreement was all
            return Running(submissions)
        return maker(submissions[0], decision, group)


def _on_stream(submissions: Sequence[Submission]) -> Any:
    """Work on the stream of the submission: this may be another thread."""
    if submissions and submissions[0].stream is not None:
        return torch.cuda.stream(submissions[0].stream)
    return contextlib.nullcontext()


def place_of_zeros(requests: Sequence[Request]) -> list[torch.Tensor]:
    """Return what a rank that has joined contributes. Not collective."""
    return [
        torch.zeros(shape, dtype=dtype_of(dtype), device="cpu")
        for request in requests
        for dtype, shape in request.tensors
    ]


def _all_reduce(
    request: Request,
    decision: Decision,
    submissions: Sequence[Submission],
    group: ProcessGroup,
) -> Running:
    if submissions:
        inputs = [tensor for each in submissions for tensor in each.inputs]
        outputs = [tensor for each in submissions for tensor in each.outputs]
    else:
        inputs = outputs = place_of_zeros(decision.requests)
    if request.op == Adasum:
        for source, target in zip(inputs, outputs, strict=True):
            _copy_scaled(source, target, request.prescale)
            adasum(group, target)
            _scale(target, request.postscale)
        return Running(submissions)
    works: list[TorchWork] = []
    finishers: list[Callable[[], None]] = []
    by_dtype: dict[torch.dtype, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for pair in zip(inputs, outputs, strict=True):
        by_dtype.setdefault(pair[0].dtype, []).append(pair)
    for pairs in by_dtype.values():
        _all_reduce_together(request, pairs, group, works, finishers)

    def finish() -> None:
        for each in finishers:
            each()

    return Running(submissions, works, finish)


def _all_reduce_together(
    request: Request,
    pairs: list[tuple[torch.Tensor, torch.Tensor]],
    group: ProcessGroup,
    works: list[TorchWork],
    finishers: list[Callable[[], None]],
) -> None:
    """Start the all-reduce of tensors of one dtype, as one."""
    together = len(pairs) > 1
    if together:
        total = torch.cat([source.detach().reshape(-1) for source, _ in pairs])
        _scale(total, request.prescale)
    else:
        source, total = pairs[0][0], pairs[0][1].detach()
        _copy_scaled(source, total, request.prescale)
    apart = together or _sum_type(request.op, total.dtype) is not total.dtype
    total = total.to(_sum_type(request.op, total.dtype))
    options = AllreduceOptions()
    options.asyncOp = True
    options.reduceOp = torch_operation(request.op, total.dtype)
    works.append(group.allreduce([total], options))

    def finish() -> None:
        _finish_reduction(request, total, group.size())
        if apart:
            parts = torch.split(total.reshape(-1), [target.numel() for _, target in pairs])
            for (_, target), part in zip(pairs, parts, strict=True):
                target.detach().copy_(part.view(target.shape))

    finishers.append(finish)


def _all_gather(submission: Submission, decision: Decision, group: ProcessGroup) -> Running:
    inputs = [tensor.detach() for tensor in submission.inputs]
    submission.gathered_rows = decision.sizes
    lists = []
    for place, tensor in enumerate(inputs):
        rows = [sizes[place] for sizes in decision.sizes]
        output = tensor.new_empty((sum(rows), *tensor.shape[1:]))
        submission.outputs.append(output)
        lists.append(list(torch.split(output, rows)))
    options = AllgatherOptions()
    options.asyncOp = True
    return Running([submission], [group.allgather(lists, inputs, options)])


def _broadcast(submission: Submission, decision: Decision, group: ProcessGroup) -> Running:
    source, target = submission.inputs[0], submission.outputs[0].detach()
    options = BroadcastOptions()
    options.asyncOp = True
    options.rootRank = int(submission.request.detail)
    if group.rank() == options.rootRank:
        _copy_scaled(source, target, 1.0)
    return Running([submission], [group.broadcast([target], options)])


def _all_to_all(submission: Submission, decision: Decision, group: ProcessGroup) -> Running:
    tensor = submission.inputs[0].detach()
    splits = list(submission.request.splits)
    submission.received_splits = list(decision.sizes)
    output = tensor.new_empty((sum(decision.sizes), *tensor.shape[1:]))
    submission.outputs.append(output)
    options = AllToAllOptions()
    options.asyncOp = True
    sent = tensor.narrow(0, 0, sum(splits)).contiguous()
    work = group.all_to_all_single(output, sent, submission.received_splits, splits, options)
    return Running([submission], [work])


def rows_of(rows: int, size: int) -> list[int]:
    """Return how many of `rows` each of `size` ranks gets: the first ones get one more.

    Not collective.
    """
    least, more = divmod(rows, size)
    return [least + (rank < more) for rank in range(size)]


def _reduce_scatter(submission: Submission, decision: Decision, group: ProcessGroup) -> Running:
    request = submission.request
    works, totals = [], []
    for tensor in submission.inputs:
        rows = rows_of(tensor.shape[0], group.size())
        source = tensor.detach()
        if request.prescale != 1.0:
            source = source.clone()
            _scale(source, request.prescale)
        source = source.to(_sum_type(request.op, tensor.dtype))
        output = source.new_empty((rows[group.rank()], *tensor.shape[1:]))
        totals.append(output)
        options = ReduceScatterOptions()
        options.asyncOp = True
        options.reduceOp = torch_operation(request.op, tensor.dtype)
        works.append(group.reduce_scatter([output], [list(torch.split(source, rows))], options))

    def finish() -> None:
        for tensor, total in zip(submission.inputs, totals, strict=True):
            _finish_reduction(request, total, group.size())
            submission.outputs.append(total.to(tensor.dtype))

    return Running([submission], works, finish)


_MAKERS: dict[str, Callable[[Submission, Decision, ProcessGroup], Running]] = {
    "allgather": _all_gather,
    "broadcast": _broadcast,
    "alltoall": _all_to_all,
    "reducescatter": _reduce_scatter,
}


def torch_operation(op: int, dtype: torch.dtype) -> Any:
    """Return torch's operation for one of Horovod's. Not collective.

    Means of integers are sums here, and divided afterwards.
    """
    if op == Average:
        fractions = dtype.is_floating_point or dtype.is_complex
        return dist.ReduceOp.AVG if fractions else dist.ReduceOp.SUM
    return _OPERATIONS[ReduceOp(op)]


def _sum_type(op: int, dtype: torch.dtype) -> torch.dtype:
    """Return in which dtype ranks are added: means of int32 fit where their sums do not."""
    return torch.int64 if op == Average and dtype is torch.int32 else dtype


def _finish_reduction(request: Request, total: torch.Tensor, size: int) -> None:
    """Divide and multiply after a reduction. Means of integers are rounded towards zero."""
    fractions = total.dtype.is_floating_point or total.dtype.is_complex
    if request.op == Average and not fractions:
        if request.postscale == 1.0:
            total.copy_(torch.div(total, size, rounding_mode="trunc"))
        else:
            _scale(total, request.postscale / size)
    else:
        _scale(total, request.postscale)


def _copy_scaled(source: torch.Tensor, target: torch.Tensor, factor: float) -> None:
    if source is not target:
        target.detach().copy_(source.detach())
    _scale(target, factor)


def _scale(tensor: torch.Tensor, factor: float) -> None:
    """Multiply in place; integers are multiplied in float64 and rounded towards zero."""
    if factor == 1.0:
        return
    data = tensor.detach()
    if data.dtype.is_floating_point or data.dtype.is_complex:
        data.mul_(factor)
    else:
        data.copy_((data.double() * factor).trunc())
