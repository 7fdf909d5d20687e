"""Make the buckets of a reducer, on the host or on devices, with memory from their queues."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from mpiddp.bucket import Bucket, bytes_needed
from mpiddp.device_bucket import DeviceBucket
from mpiddp.memory import BucketMemory, DeviceMemory

if TYPE_CHECKING:
    from mpiddp.reducer import Reducer


def make_buckets(reducer: Reducer, assignment: Sequence[Sequence[int]]) -> list[Bucket]:
    """Return a bucket for each list of parameter indices, in launch order.

    Collective. The parameters of a bucket are of one dtype and on one device.

    Raises:
        OSError: some rank has too little memory.
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
    )
    dtype, reduced_as = reducer.mixed_precision or (None, None)
    buckets = []
    for number, (indices, parameters) in enumerate(zip(assignment, members, strict=True)):
        memory = memories.get(number)
        make = DeviceBucket if isinstance(memory, DeviceMemory) else Bucket
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
                staging_dtype=reduced_as,
            )
        )
    return buckets


def _allocate(reducer: Reducer, members: dict[int, list[torch.Tensor]]) -> dict[int, BucketMemory]:
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
        memories = reducer.channels[device].allocate(sizes, tails)
        found.update(zip(numbers, memories, strict=True))
    return found
