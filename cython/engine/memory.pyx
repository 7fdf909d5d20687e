"""Memory for buckets, as a transport gives it out: a tensor of bytes, and what goes with it."""

import mmap

import torch


cdef enum:
    CACHE_LINE = 64


cdef class BucketMemory:
    """The memory of one bucket.

    Not collective.

    Args:
        buffer: a 1-D uint8 tensor of zeros that starts on a cache line.
        owner: kept alive as long as this object.
        context: address of what the transport wants to find in each `Job`.
        given_out: address of a C int that becomes 1 when a tensor of the user comes to lie there.
    """

    def __init__(self, buffer, owner=None, size_t context=0, size_t given_out=0):
        self.buffer = buffer
        self.owner = owner
        self.context = <void *>context
        self.given_out = <int *>given_out


cdef class CommonMemory(BucketMemory):
    """The memory of one bucket whose mean lies once for all ranks of a node.

    Not collective.

    Args:
        buffer: a 1-D uint8 tensor, where this rank sees the mean, and may write for itself.
        owner: kept alive as long as this object; has a method `forget_writes`.
        context: address of what the transport wants to find in each `Job`.
        stage: a 1-D uint8 tensor of the same size, where a rank puts what is reduced. All buckets
            of a set have the same.
        means: a 1-D uint8 tensor, the mean as all ranks see it.
    """

    def __init__(self, buffer, owner, size_t context, stage, means):
        BucketMemory.__init__(self, buffer, owner, context)
        self.stage = stage
        self.means = means


cdef class GpuMemory(BucketMemory):
    """The memory of one bucket on a GPU, and its tail on the host.

    Not collective. This base class is for means that are in place when the job is done, as in a
    world of one.

    Args:
        buffer: a 1-D uint8 tensor of zeros on the device, without the tail.
        owner: kept alive as long as this object.
        context: address of what the transport wants to find in each `Job`.
        tail: a 1-D uint8 tensor of zeros on the CPU; None: it has none.
        divides_before: gradients must be divided before they are summed.
    """

    def __init__(self, buffer, owner=None, size_t context=0, tail=None, bint divides_before=False):
        BucketMemory.__init__(self, buffer, owner, context)
        self.tail = torch.zeros(0, dtype=torch.uint8, device="cpu") if tail is None else tail
        self.host_tail = <char *><size_t>self.tail.data_ptr()
        self.divides_before = divides_before

    cpdef int wait_on(self, size_t stream) except -1:
        """Make later work on the stream wait for the means. Not collective."""
        return 0


def allocate_private(sizes):
    """Return a `BucketMemory` for each size in bytes, which no other process sees.

    Not collective.
    """
    return [BucketMemory(torch.zeros(size, dtype=torch.uint8, device="cpu")) for size in sizes]


def allocate_pages(sizes):
    """Return a `BucketMemory` for each size in bytes, in pages that hold nothing else.

    Not collective. For memory that is pinned, which is done page by page. Forked children share
    the pages: with copy-on-write, a write after the fork could replace a page that the GPU uses.

    Raises:
        OSError: no memory.
    """
    starts = []
    total = 0
    for size in sizes:
        starts.append(total)
        total += -(-size // CACHE_LINE) * CACHE_LINE
    everything = torch.frombuffer(mmap.mmap(-1, max(total, 1)), dtype=torch.uint8)
    return [
        BucketMemory(everything[start:start + size]) for start, size in zip(starts, sizes)
    ]
