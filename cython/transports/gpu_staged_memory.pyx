"""What staged buckets are made of: memory on the GPU, pinned memory of the host, and events.

Note [Memory of a bucket that goes away]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Copies may be on their way when the last user of a bucket lets go of it: after an error, or because
nobody waited for the means. Device memory, host memory and events then stay in a list until the
copies are over. The list is checked whenever memory is allocated or a transport is freed.
"""

import mmap

cimport cython
from libc.stdlib cimport calloc, free


from mpiddp.engine.memory cimport BucketMemory, GpuMemory
from mpiddp.gpu.runtime cimport (
    Event, GpuFunctions, Runtime, check_gpu, enter_gpu, event_passed, leave_gpu,
)
from mpiddp.system.posix cimport getpid


# Buckets without a user whose copies are not over, see Note [Memory of a bucket that goes away].
_kept = []


def _merged(ranges):
    """Return pairs of first address and end, with those that touch merged."""
    result = []
    start, stop = None, None
    for first, end in sorted(ranges):
        if start is not None and first <= stop:
            stop = max(stop, end)
            continue
        if start is not None:
            result.append((start, stop))
        start, stop = first, end
    if start is not None:
        result.append((start, stop))
    return result


# Without garbage collection: copies may use this when its last user is garbage. It is part of no
# reference cycle.
@cython.no_gc
cdef class StagedBuckets:
    """One set of buckets: their memory on the device and on the host, and the events of copies.

    Not collective.

    Args:
        runtime: of the device.
        device: its index.
        sizes: of the buckets in bytes, with their tails.
        tails: how many bytes of each stay on the host.
        piece_bytes: the most that a piece holds, without the tail.

    Raises:
        ValueError: a tail is larger than its bucket.
    """

    def __init__(self, Runtime runtime not None, int device, sizes, tails, size_t piece_bytes):
        cdef size_t index, number, offset, step, pieces_before = 0
        cdef StagedBucket *bucket
        cdef Piece *piece
        self.runtime = runtime
        self.device = device
        self.registered = []
        self.events = []
        gradients = [size - tail for size, tail in zip(sizes, tails, strict=True)]
        if any([size < 0 for size in gradients]):
            raise ValueError(f"tails of {tails} bytes are more than buckets of {sizes}")
        # As many pieces as are needed, of about the same size.
        counts = [
            max(-(-size // piece_bytes), 1) if size + tail else 0
            for size, tail in zip(gradients, tails)
        ]
        self.buckets = <StagedBucket *>calloc(max(len(sizes), 1), sizeof(StagedBucket))
        self.pieces = <Piece *>calloc(max(sum(counts), 1), sizeof(Piece))
        if self.buckets == NULL or self.pieces == NULL:
            raise MemoryError
        self.count = len(sizes)
        for index in range(self.count):
            bucket = &self.buckets[index]
            bucket.pieces = &self.pieces[pieces_before]
            bucket.count = counts[index]
            bucket.gpu_bytes = gradients[index]
            pieces_before += bucket.count
            if bucket.count == 0:
                continue
            step = (bucket.gpu_bytes + bucket.count - 1) // bucket.count
            step = (step + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
            for number in range(bucket.count):
                piece = &bucket.pieces[number]
                offset = min(number * step, bucket.gpu_bytes)
                piece.offset = offset
                piece.gpu_bytes = min(step, bucket.gpu_bytes - offset)
                piece.bytes = piece.gpu_bytes
                piece.job.done = 1
            piece.bytes += <size_t>tails[index]

    def __dealloc__(self):
        self.release()
        free(self.buckets)
        free(self.pieces)

    @property
    def piece_sizes(self):
        """How many bytes of host memory each piece needs, bucket by bucket."""
        cdef StagedBucket *bucket
        cdef size_t index, number
        sizes = []
        for index in range(self.count):
            bucket = &self.buckets[index]
            for number in range(bucket.count):
                sizes.append(bucket.pieces[number].bytes)
        return sizes

    cdef attach(self, list hosts, list tensors):
        """Take the memory of the pieces, in order of `piece_sizes`, and of the buckets."""
        cdef StagedBucket *bucket
        cdef BucketMemory host
        cdef Event event
        cdef size_t index, number
        cdef Piece *piece
        self.hosts = hosts
        self.tensors = tensors
        remaining = iter(hosts)
        for index in range(self.count):
            bucket = &self.buckets[index]
            bucket.data = <char *><size_t>tensors[index].data_ptr()
            for number in range(bucket.count):
                piece = &bucket.pieces[number]
                host = next(remaining)
                piece.job.data = <char *><size_t>host.buffer.data_ptr()
                piece.job.context = host.context
                if piece.gpu_bytes:
                    event = Event(self.runtime, self.device)
                    self.events.append(event)
                    piece.copied = event.handle
            if bucket.gpu_bytes:
                event = Event(self.runtime, self.device)
                self.events.append(event)
                bucket.filled = event.handle
                event = Event(self.runtime, self.device)
                self.events.append(event)
                bucket.returned = event.handle
        self.register()

    cdef register(self):
        """Pin the pages of all pieces. Pages that pieces share are pinned once."""
        cdef int code
        cdef int before = self.device
        cdef GpuFunctions *functions = &self.runtime.functions
        ranges = []
        for host in self.hosts:
            first = host.buffer.data_ptr() // mmap.PAGESIZE
            end = -(-(host.buffer.data_ptr() + host.buffer.numel()) // mmap.PAGESIZE)
            ranges.append((first * mmap.PAGESIZE, end * mmap.PAGESIZE))
        code = enter_gpu(functions, self.device, &before)
        check_gpu(self.runtime, code, "SetDevice", self.device)
        try:
            for first, end in _merged(ranges):
                self.runtime.host_register(first, end - first)
                self.registered.append(first)
        finally:
            leave_gpu(functions, self.device, before)

    cdef int busy(self) noexcept:
        """Whether the engine or a copy still uses any of it."""
        cdef StagedBucket *bucket
        cdef size_t index
        # A forked child has copies of these objects, but nothing on the device.
        if self.runtime.process_id != getpid():
            return False
        for index in range(self.count):
            bucket = &self.buckets[index]
            if bucket.busy:
                return True
            if bucket.returned != NULL and (
                event_passed(&self.runtime.functions, bucket.returned) == 0
            ):
                return True
        return False

    cdef void release(self):
        """Unpin the host's memory and destroy the events, unless they are in use."""
        cdef size_t index
        if self.runtime is None or self.runtime.process_id != getpid():
            return
        for index in range(self.count):
            self.buckets[index].returned = NULL
        for address in self.registered:
            self.runtime.functions.host_unregister(<void *><size_t>address)
        self.registered = []
        self.events = []


@cython.no_gc_clear
cdef class StagedMemory(GpuMemory):
    """The memory of one bucket. Made by `StagingTransport.allocate`."""

    def __dealloc__(self):
        cdef StagedBuckets buckets = self.owner
        if buckets is not None and buckets.busy() and buckets not in _kept:
            _kept.append(buckets)

    cpdef int wait_on(self, size_t stream) except -1:
        """Make later work on the stream wait for the means. Not collective."""
        cdef StagedBuckets buckets = self.owner
        cdef StagedBucket *bucket = <StagedBucket *>self.context
        cdef int code
        if bucket.returned == NULL:
            return 0
        with nogil:
            code = buckets.runtime.functions.stream_wait_event(<void *>stream, bucket.returned, 0)
        return check_gpu(buckets.runtime, code, "StreamWaitEvent", buckets.device)


def _forget_kept():
    """Let go of kept buckets that are no longer in use. Not collective."""
    _kept[:] = [buckets for buckets in _kept if (<StagedBuckets>buckets).busy()]
