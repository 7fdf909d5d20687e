"""The transport of buckets on a device: through pinned host memory, piece by piece.

Below it lies the channel of another transport, which reduces host memory. A bucket is cut into
pieces. Each is copied to the host as soon as the gradients are there, is reduced by the channel
below as soon as it has landed, and is copied back as soon as that is done: copies to the
host, sums, the network and copies back of different pieces overlap.

Note [Two waits]
~~~~~~~~~~~~~~~~
A bucket is read only after its stream has filled it: the stream of the copies waits for the event
`filled`. Its means are read only after they are back: `wait_on` makes a stream wait for the event
`returned`. The host waits for neither; the engine polls the events of the copies in each step.

Note [Order of pieces]
~~~~~~~~~~~~~~~~~~~~~~
The channel below gets pieces strictly in order of bucket and offset, which is the same on all
ranks: a bucket that has landed waits until all pieces of earlier buckets are queued.
"""

import weakref


import torch

from mpiddp.engine.engine cimport Channel
from mpiddp.engine.interface cimport (
    ADVANCE_BLOCKED, ADVANCE_DONE, ADVANCE_FAILED, ADVANCE_PENDING, ADVANCE_SOME, Advance, Job,
    Transport,
)
from mpiddp.engine.progress cimport enqueue
from mpiddp.gpu.runtime cimport (
    COPY_TO_GPU, COPY_TO_HOST, GPU_READY, GpuFunctions, Runtime, Stream, enter_gpu,
    event_passed, gpu_error, leave_gpu,
)
from mpiddp.system.kernels cimport element_bytes
from mpiddp.system.posix cimport load, sleep_for
from mpiddp.transports.gpu_staged_memory cimport (
    ALIGNMENT, Piece, StagedBucket, StagedBuckets, StagedMemory,
)
from mpiddp.engine.memory import allocate_pages
from mpiddp.transports.gpu_staged_memory import _forget_kept


# How long a waiting thread sleeps before it polls the events of copies again, in seconds.
cdef double COPY_CHECK = 50e-6

cdef int copy_to_host(StagingState *state, StagedBucket *bucket, void *stream) noexcept nogil:
    """Issue the copies of all pieces; return the code of a call that failed, see `bucket.call`."""
    cdef GpuFunctions *functions = state.functions
    cdef Piece *piece
    cdef size_t index
    cdef int code
    bucket.call = "EventRecord"
    code = functions.event_record(bucket.filled, stream)
    if code != GPU_READY:
        return code
    bucket.call = "StreamWaitEvent"
    code = functions.stream_wait_event(state.out, bucket.filled, 0)
    if code != GPU_READY:
        return code
    for index in range(bucket.count):
        piece = &bucket.pieces[index]
        bucket.call = "MemcpyAsync"
        code = functions.memcpy_async(
            piece.job.data, bucket.data + piece.offset, piece.gpu_bytes, COPY_TO_HOST,
            state.out)
        if code != GPU_READY:
            return code
        bucket.call = "EventRecord"
        code = functions.event_record(piece.copied, state.out)
        if code != GPU_READY:
            return code
    return GPU_READY


cdef void announce(Transport *transport, Job *job) noexcept nogil:
    cdef StagingState *state = <StagingState *>transport
    cdef StagedBucket *bucket = <StagedBucket *>job.context
    cdef int before = state.device
    bucket.queued = 0
    bucket.sent_back = 0
    bucket.busy = True
    bucket.number = state.announced
    state.announced += 1
    if bucket.gpu_bytes:
        bucket.call = "SetDevice"
        bucket.code = enter_gpu(state.functions, state.device, &before)
        if bucket.code == GPU_READY:
            bucket.code = copy_to_host(state, bucket, job.stream)
            leave_gpu(state.functions, state.device, before)


cdef int queue_pieces(StagingState *state, StagedBucket *bucket, Job *job) noexcept nogil:
    """Hand what has landed to the channel below; return how many pieces, -1 for an error."""
    cdef Piece *piece
    cdef int passed, moved = 0
    if bucket.number != state.queued:
        return 0
    while bucket.queued < bucket.count:
        piece = &bucket.pieces[bucket.queued]
        if piece.gpu_bytes:
            passed = event_passed(state.functions, piece.copied)
            if passed == 0:
                return moved
            if passed < 0:
                state.transport.call = "EventQuery"
                state.transport.code = -passed
                return -1
        piece.job.element = job.element
        piece.job.count = piece.bytes // element_bytes(job.element)
        piece.job.divisor = job.divisor
        enqueue(state.engine, state.inner, &piece.job)
        bucket.queued += 1
        moved += 1
    state.queued += 1
    return moved


cdef int send_back(StagingState *state, StagedBucket *bucket) noexcept nogil:
    """Copy what has been reduced to the device; return how many pieces, -1 for an error."""
    cdef Piece *piece
    cdef int code, moved = 0
    while bucket.sent_back < bucket.queued:
        piece = &bucket.pieces[bucket.sent_back]
        if not load(&piece.job.done):
            return moved
        if piece.gpu_bytes:
            code = state.functions.memcpy_async(
                bucket.data + piece.offset, piece.job.data, piece.gpu_bytes, COPY_TO_GPU,
                state.back)
            if code != GPU_READY:
                state.transport.call = "MemcpyAsync"
                state.transport.code = code
                return -1
        bucket.sent_back += 1
        moved += 1
    if bucket.sent_back == bucket.count and bucket.gpu_bytes:
        code = state.functions.event_record(bucket.returned, state.back)
        if code != GPU_READY:
            state.transport.call = "EventRecord"
            state.transport.code = code
            return -1
    return moved


cdef Advance move_pieces(StagingState *state, StagedBucket *bucket, Job *job) noexcept nogil:
    cdef int queued, sent
    queued = queue_pieces(state, bucket, job)
    if queued < 0:
        return ADVANCE_FAILED
    sent = send_back(state, bucket)
    if sent < 0:
        return ADVANCE_FAILED
    if bucket.sent_back == bucket.count:
        bucket.busy = False
        return ADVANCE_DONE
    if queued or sent:
        return ADVANCE_SOME
    return ADVANCE_PENDING if bucket.queued == bucket.count else ADVANCE_BLOCKED


cdef Advance advance(Transport *transport, Job *job, int helping) noexcept nogil:
    cdef StagingState *state = <StagingState *>transport
    cdef StagedBucket *bucket = <StagedBucket *>job.context
    cdef Advance status
    cdef int before = state.device
    if state.inner.failure:
        state.inner_failed = True
        transport.call = state.inner.failed_call
        transport.code = state.inner.failure
        return ADVANCE_FAILED
    if bucket.code != GPU_READY:
        transport.call = bucket.call
        transport.code = bucket.code
        return ADVANCE_FAILED
    if not bucket.gpu_bytes:
        return move_pieces(state, bucket, job)
    transport.call = "SetDevice"
    transport.code = enter_gpu(state.functions, state.device, &before)
    if transport.code != GPU_READY:
        return ADVANCE_FAILED
    status = move_pieces(state, bucket, job)
    # The engine's own thread keeps the device, see Note [Current devices].
    if not state.engine.on_thread:
        leave_gpu(state.functions, state.device, before)
    return status


cdef unsigned int take_ticket(Transport *transport) noexcept nogil:
    cdef Transport *inner = (<StagingState *>transport).inner.transport
    return 0 if inner.take_ticket == NULL else inner.take_ticket(inner)


cdef void sleep(Transport *transport, unsigned int ticket, double seconds) noexcept nogil:
    """Sleep until another rank rings, if only other ranks are waited for."""
    cdef StagingState *state = <StagingState *>transport
    cdef Transport *inner = state.inner.transport
    if state.queued == state.announced and inner.sleep != NULL:
        inner.sleep(inner, ticket, seconds)
    else:
        sleep_for(min(seconds, COPY_CHECK))


cdef class StagingTransport:
    """Means of buckets on one device, reduced by the host.

    Not collective (but `allocate` and `free` are).

    Args:
        inner: the channel that reduces host memory; used by nothing else, and closed with this
            transport's channel.
        runtime: of the device.
        device: a `torch.device`.
        piece_bytes: the most that is copied and reduced at once, in bytes; a multiple of 64.

    Raises:
        ValueError: `piece_bytes` is out of range.
        GpuError: the runtime refuses to make streams.
    """

    def __init__(self, Channel inner not None, Runtime runtime not None, device, *,
                 size_t piece_bytes=2 << 20):
        if piece_bytes == 0 or piece_bytes % ALIGNMENT:
            raise ValueError(
                f"piece_bytes must be a multiple of {ALIGNMENT}, not {piece_bytes}"
            )
        self.inner = inner
        self.runtime = runtime
        self.device = device
        self.piece_bytes = piece_bytes
        self.allocated = weakref.WeakSet()
        self.state.device = runtime.index_of(device)
        self.out = Stream(runtime, self.state.device)
        self.back = Stream(runtime, self.state.device)
        self.state.out = self.out.handle
        self.state.back = self.back.handle
        self.state.functions = &runtime.functions
        self.state.engine = inner.engine.state
        self.state.inner = &inner.state
        self.state.transport.announce = announce
        self.state.transport.advance = advance
        self.state.transport.take_ticket = take_ticket
        self.state.transport.sleep = sleep
        # Nobody rings a bell when a copy is over.
        self.state.transport.wants_thread = True

    def allocate(self, sizes, tails=None):
        """Return a `GpuMemory` for each of `sizes` in bytes.

        Collective.

        Args:
            sizes: of the buckets, with their tails.
            tails: how many bytes at the end of each stay in host memory; None: none.

        Raises:
            GpuError: the runtime refuses to pin host memory or to make events.
            OSError: some rank has too little host memory; raised on all ranks of its node.
            torch.OutOfMemoryError: the device has too little.
        """
        cdef StagedBuckets buckets
        cdef size_t index
        _forget_kept()
        tails = [0] * len(sizes) if tails is None else list(tails)
        buckets = StagedBuckets(self.runtime, self.state.device, sizes, tails, self.piece_bytes)
        if getattr(self.inner.transport, "takes_any_memory", False):
            hosts = allocate_pages(buckets.piece_sizes)
        else:
            hosts = self.inner.allocate(buckets.piece_sizes)
        tensors = [
            torch.zeros(size - tail, dtype=torch.uint8, device=self.device)
            for size, tail in zip(sizes, tails)
        ]
        buckets.attach(hosts, tensors)
        self.allocated.add(buckets)
        memories = []
        place = 0
        for index in range(buckets.count):
            place += buckets.buckets[index].count
            tail = None
            if tails[index]:
                last = hosts[place - 1].buffer
                tail = last[last.numel() - tails[index]:]
            memories.append(
                StagedMemory(tensors[index], buckets, <size_t>&buckets.buckets[index], tail)
            )
        return memories

    def free(self):
        """Free the streams, the pinned memory and the transport below. Collective.

        Its channel must be closed.
        """
        cdef StagedBuckets buckets
        _forget_kept()
        for buckets in list(self.allocated):
            if not buckets.busy():
                buckets.release()
        self.state.out = NULL
        self.state.back = NULL
        self.out = None
        self.back = None
        self.inner.transport.free()

    def raise_failure(self, int code, bytes call):
        """Raise the error that has made `advance` fail. Not collective."""
        if self.state.inner_failed:
            self.inner._raise_failure()
        raise gpu_error(self.runtime, code, call.decode(), self.state.device)

    @property
    def address(self):
        """Where the engine finds the C ``Transport``."""
        return <size_t>&self.state.transport
