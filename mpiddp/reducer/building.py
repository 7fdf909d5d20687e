"""Make the buckets of a reducer, on the host or on GPUs, with memory from their channels."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch._C._distributed_c10d import AllgatherOptions

from mpiddp.engine.memory import BucketMemory, GpuMemory
from mpiddp.reducer.bucket import Bucket, bytes_needed
from mpiddp.reducer.gpu_bucket import GpuBucket

if TYPE_CHECKING:
    from mpiddp.reducer.state import ReducerState

# What a module says whose buckets could not be made again.
NO_BUCKETS = "This module's gradients cannot be averaged any more: wrap it again"


def make_buckets(
    reducer: ReducerState, assignment: Sequence[Sequence[int]], through_mpi: bool = True
) -> list[Bucket]:
    """Return a bucket for each list of parameter indices, in launch order.

    Collective. The parameters of a bucket are of one dtype and on one device.

    Args:
        reducer: whose buckets they are.
        assignment: the lists of parameter indices.
        through_mpi: with transport "auto", if shared memory cannot be had, gradients go through
            MPI from this call on.

    Raises:
        OSError: some rank has too little memory, see `_agreed`.
        TypeError: gradients of some dtype cannot be averaged.
    """
    members = [[reducer.parameters[index] for index in indices] for indices in assignment]
    memories = _allocate(
        reducer,
        {
            number: members[number]
            for number, indices in enumerate(assignment)
            if not reducer.expect_sparse[indices[0]]
        },
        through_mpi,
    )
    dtype, reduced_as = reducer.mixed_precision or (None, None)
    buckets = []
    for number, (indices, parameters) in enumerate(zip(assignment, members, strict=True)):
        memory = memories.get(number)
        make = GpuBucket if isinstance(memory, GpuMemory) else Bucket
        buckets.append(
            make(
                number,
                parameters,
                indices,
                reducer.divisor,
                memory,
                channel=reducer.channels[parameters[0].device],
                sparse=memory is None,
                compression=reducer.compression,
                gradients_are_views=reducer.gradient_as_bucket_view,
                flags_only=reducer.python_hook is not None,
                dtype=dtype,
                gradient_buffer_dtype=reduced_as,
            )
        )
    return buckets


def make_again(
    reducer: ReducerState, assignment: Sequence[Sequence[int]], present: Sequence[Sequence[int]]
) -> tuple[list[Bucket], OSError | None]:
    """Return buckets for `assignment`, where there were others, which the caller has let go.

    Collective. Memory of the others is free again before any rank allocates.

    Returns:
        The buckets, and None; or buckets as they were before, and why there are no others.

    Raises:
        RuntimeError: some rank has too little memory even for the buckets that there were.
    """
    # Ranks may wait within MPI for one that runs out of memory here, and is killed for it.
    with reducer.process_group.recorded("the making of new buckets"):
        _everywhere(reducer, True)
        try:
            return make_buckets(reducer, assignment, through_mpi=False), None
        except OSError as error:
            try:
                return make_buckets(reducer, present), error
            except OSError as again:
                raise RuntimeError(f"{again}. {NO_BUCKETS}") from again


def _allocate(
    reducer: ReducerState, members: dict[int, list[torch.Tensor]], through_mpi: bool
) -> dict[int, BucketMemory]:
    """Return memory for the parameters of each bucket, by the bucket's number. Collective."""
    dtype, _ = reducer.mixed_precision or (None, None)
    flags_only = reducer.python_hook is not None
    found: dict[int, BucketMemory] = {}
    for device in dict.fromkeys(parameters[0].device for parameters in members.values()):
        numbers = [n for n, parameters in members.items() if parameters[0].device == device]
        sizes, tails = (
            [bytes_needed(members[n], reducer.compression, only, dtype) for n in numbers]
            for only in (flags_only, True)
        )
        memories = _agreed(reducer, device, sizes, tails, through_mpi)
        found.update(zip(numbers, memories, strict=True))
    return found


def _agreed(
    reducer: ReducerState,
    device: torch.device,
    sizes: Sequence[int],
    tails: Sequence[int],
    through_mpi: bool,
) -> Sequence[BucketMemory]:
    """Return memory for buckets on one device if all ranks have it. Collective.

    Raises:
        OSError: some rank has not; raised on all ranks, and names that rank.
    """
    group = reducer.process_group
    problem: Exception | None = None
    memories: Sequence[BucketMemory] = []
    try:
        plain = reducer.compression is None and reducer.python_hook is None
        memories = reducer.channels[device].allocate(
            sizes, tails, reducer.domain if plain else None
        )
    except Exception as error:
        problem = error
    if group.size() > 1 and not _everywhere(reducer, problem is None):
        del memories  # for ranks that have too little
        texts = group.allgather_objects("" if problem is None else str(problem))
        # With shared memory the text already names the rank that failed.
        each = "" if group.channel_pool.shares_memory(reducer.channels[device]) else "rank {}: "
        text = next(each.format(rank) + text for rank, text in enumerate(texts) if text)
        if through_mpi and group.channel_pool.replace_shared(reducer.channels, device):
            if group.rank() == 0:
                warnings.warn(
                    f"buckets cannot be allocated in shared memory, so gradients go through MPI, "
                    f"which is slower: {text}",
                    stacklevel=2,
                )
            return _agreed(reducer, device, sizes, tails, through_mpi)
        raise OSError(f"no memory for buckets of gradients: {text}") from problem
    if problem is not None:
        raise problem
    return memories


def _everywhere(reducer: ReducerState, fine: bool) -> bool:
    """Return whether `fine` is true on all ranks. Collective."""
    opts = AllgatherOptions()
    opts.asyncOp = False
    # Not an all-reduce: profilers count those of the buckets.
    flags = torch.zeros(reducer.process_group.size(), dtype=torch.uint8, device="cpu")
    flag = torch.tensor([int(fine)], dtype=torch.uint8, device="cpu")
    reducer.process_group.all_gather_single(flags, flag, opts)
    return bool(flags.all())
