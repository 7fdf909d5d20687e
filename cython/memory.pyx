"""Memory for buckets, as a transport gives it out: a tensor of bytes, and what goes with it."""

import torch


cdef class BucketMemory:
    """The memory of one bucket.

    Not collective.

    Args:
        buffer: a 1-D uint8 tensor of zeros that starts on a cache line.
        owner: kept alive as long as this object.
        context: address of what the transport wants to find in each `Work`.
    """

    def __init__(self, buffer, owner=None, size_t context=0):
        self.buffer = buffer
        self.owner = owner
        self.context = <void *>context


def allocate_private(sizes):
    """Return a `BucketMemory` for each size in bytes that no other process sees.

    Not collective.
    """
    return [BucketMemory(torch.zeros(size, dtype=torch.uint8)) for size in sizes]
