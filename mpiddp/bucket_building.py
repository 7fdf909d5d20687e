"""Make the buckets of a reducer, on the host or on devices, with memory from their queues."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from mpiddp.bucket import Bucket, bytes_needed
from mpiddp.device_bucket import DeviceBucket

if TYPE_CHECKING:
    from mpiddp.memory import BucketMemory
    from mpiddp.reducer import Reducer


def make_buckets(reducer: Reducer, assignment: Sequence[Sequence[int]]) -> list[Bucket]:
    """Return a bucket for each list of parameter indices, in launch order.

    Collective. The parameters of a bucket are of one dtype, on one device.

    Raises:
        OSError: some rank has too little memory.
        TypeError: gradients of some dtype cannot be averaged.
    """
    members = [[reducer.parameters[index] for index in indices] for indices in assignment]
    dense = [
        number
        for number, indices in enumerate(assignment)
        if not reducer.expect_sparse[indices[0]]
    ]
    memories = _allocate(reducer, {number: members[number] for number in dense})
    buckets = []
    for number, (indices, parameters) in enumerate(zip(assignment, members, strict=True)):
        device = parameters[0].device
        on_device = number in memories and device in reducer.device_channels
        make = DeviceBucket if on_device else Bucket
        buckets.append(
            make(
                number,
                parameters,
                indices,
                reducer.divisor,
                memories.get(number),
                channel=reducer.device_channels.get(device, reducer.channel),
                sparse=number not in memories,
                compression=reducer.compression,
                gradients_are_views=reducer.gradient_as_bucket_view,
                flags_only=reducer.python_hook is not None,
                dtype=reducer.gradient_dtype(parameters[0]),
            )
        )
    return buckets


def _allocate(
    reducer: Reducer, members: dict[int, list[torch.Tensor]]
) -> dict[int, BucketMemory]:
    """Return the memory of the buckets that hold `members`, by number. Collective."""
    found = {}
    for device in dict.fromkeys(parameters[0].device for parameters in members.values()):
        some = {n: parameters for n, parameters in members.items() if parameters[0].device == device}
        flags_only = reducer.python_hook is not None
        sizes, tails = (
            [
                bytes_needed(
                    parameters,
                    reducer.compression,
                    flags_only or tail,
                    reducer.gradient_dtype(parameters[0]),
                )
                for parameters in some.values()
            ]
            for tail in (False, True)
        )
        if device in reducer.device_channels:
            memories = reducer.device_channels[device].allocate(sizes, tails, device)
        else:
            memories = reducer.channel.allocate(sizes)
        found.update(zip(some, memories, strict=True))
    return found
