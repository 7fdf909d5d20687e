"""Average sparse gradients, which have no place in a bucket, through the process group."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from mpiddp.system.scaling import scale_of

if TYPE_CHECKING:
    from mpiddp.reducer.state import ReducerState


def reduce(reducer: ReducerState, joined: bool = False) -> bool:
    """Average the sparse gradients of a reducer, or what its communication hook makes of them.

    Collective.

    Args:
        reducer: all its other gradients are reduced.
        joined: this rank has no inputs left and only takes part for the others.

    Returns:
        Whether some rank missed some of these gradients.
    """
    buckets = [bucket for bucket in reducer.buckets if bucket.sparse]
    missed = len(buckets)  # the flag after the parameters' own
    # Without a dense bucket these also count forward passes, see Note [Out of step].
    counts = reducer.counting < 0 and reducer.passes is not None
    flags = torch.zeros(missed + 4, dtype=torch.int64, device="cpu")
    if counts and not joined:
        lost = reducer.passes.settle()
        flags[missed + 1 :] = torch.tensor([1, lost, lost * lost], device="cpu")
    for position, bucket in enumerate(buckets):
        index = bucket.parameter_indices[0]
        flags[position] = reducer.was_used(index) and not joined
        flags[missed] += index in reducer.missing
    dist.all_reduce(flags, group=reducer.process_group)
    if counts:
        ranks, total_lost, squares = flags[missed + 1 :].tolist()
        # They are equal exactly if the mean of their squares is the square of their mean.
        differ = ranks * squares != total_lost * total_lost
        reducer.out_of_step = differ and ranks == reducer.process_group.size()
    for position, bucket in enumerate(buckets):
        parameter = reducer.parameters[bucket.parameter_indices[0]]
        if reducer.python_hook is not None:
            total = reducer.python_hook.finish(reducer, bucket)
            if flags[position] and not joined:
                parameter.grad = total
            continue
        if not flags[position]:
            continue
        gradient = None if joined else parameter.grad
        if gradient is None:
            gradient = torch.zeros_like(parameter, layout=torch.sparse_coo)
        with torch.no_grad():
            # Indices and their number are needed on the host in any case.
            total = gradient.detach().coalesce().cpu()
            # A copy, scaled so that the sum is in range where the mean is.
            scale = scale_of(reducer.process_group.size())
            total = total * scale
            dist.all_reduce(total, group=reducer.process_group)
            if not joined:
                total.div_(reducer.divisor * scale)
                parameter.grad = total.to(parameter.device)
    return flags[missed].item() > 0
