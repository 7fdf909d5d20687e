"""The transport of buckets on a device: through pinned host memory, piece by piece.

Below it lies the channel of another transport, which reduces host memory. A bucket is cut into
pieces. Each is copied to the host as soon as the gradients are there, is an all-reduce of the
channel below as soon as it has landed, and is copied back as soon as that is done: copies to the
host, sums, the network and copies back of different pieces overlap.

Note [Two waits]
~~~~~~~~~~~~~~~~
Nobody reads a bucket before the stream that fills it has come to the end of that: the event
`filled`, for which the stream of the copies waits. And nobody reads its means before they are back:
the event `returned`, for which `wait_on` lets a stream wait. The host waits for neither; the
engine asks for the events of the copies whenever it comes by.

Note [Order of pieces]
~~~~~~~~~~~~~~~~~~~~~~
The channel below gets pieces strictly in order of bucket and place, and that is the same on all
ranks: a bucket that has landed waits until all pieces of those before it were queued.

Note [Memory of a bucket that goes away]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Copies may be on their way when the last user of a bucket lets go of it: after an error, or because
nobody waited for the means. Device memory, host memory and events then stay in a list until all
that is over, which is looked at whenever memory is allocated or a transport freed.
"""

import mmap
import weakref

cimport cython
from libc.stdlib cimport calloc, free

import torch

from mpiddp.device_runtime cimport (
    COPY_TO_DEVICE,
    COPY_TO_HOST,
    DEVICE_READY,
    DeviceRuntime,
    Event,
    Runtime,
    Stream,
    check_device,
    device_error,
    enter_device,
    event_passed,
    leave_device,
)
from mpiddp.engine cimport (
    ADVANCE_BLOCKED,
    ADVANCE_DONE,
    ADVANCE_FAILED,
    ADVANCE_PENDING,
    ADVANCE_SOME,
    Advance,
    Channel,
    Transport,
    Work,
    element_bytes,
    enqueue,
)
from mpiddp.memory cimport BucketMemory, DeviceMemory
from mpiddp.memory import allocate_pages
from mpiddp.system cimport getpid, load, sleep_for


cdef enum:
    # Every piece starts on a cache line, whatever its elements are.
    ALIGNMENT = 64


# How long a waiting thread sleeps between two looks at the events of copies, in seconds.
cdef double COPY_CHECK = 50e-6

# What buckets that went away still use, see Note [Memory of a bucket that goes away].
_kept = []


cdef int copy_to_host(StagingState *state, StagedBucket *bucket, void *stream) noexcept nogil:
    """Issue the copies of all pieces; return the code of a call that failed, see `bucket.call`."""
    cdef DeviceRuntime *functions = state.functions
    cdef Piece *piece
    cdef size_t index
    cdef int code
    bucket.call = "EventRecord"
    code = functions.event_record(bucket.filled, stream)
    if code != DEVICE_READY:
        return code
    bucket.call = "StreamWaitEvent"
    code = functions.stream_wait_event(state.out, bucket.filled, 0)
    if code != DEVICE_READY:
        return code
    for index in range(bucket.count):
        piece = &bucket.pieces[index]
        bucket.call = "MemcpyAsync"
        code = functions.memcpy_async(
            piece.work.data, bucket.data + piece.offset, piece.device_bytes, COPY_TO_HOST,
            state.out)
        if code != DEVICE_READY:
            return code
        bucket.call = "EventRecord"
        code = functions.event_record(piece.copied, state.out)
        if code != DEVICE_READY:
            return code
    return DEVICE_READY


cdef void announce(Transport *transport, Work *work) noexcept nogil:
    cdef StagingState *state = <StagingState *>transport
    cdef StagedBucket *bucket = <StagedBucket *>work.context
    cdef int before = state.device
    bucket.queued = 0
    bucket.sent_back = 0
    bucket.busy = True
    bucket.number = state.announced
    state.announced += 1
    if bucket.device_bytes:
        bucket.call = "SetDevice"
        bucket.code = enter_device(state.functions, state.device, &before)
        if bucket.code == DEVICE_READY:
            bucket.code = copy_to_host(state, bucket, work.stream)
            leave_device(state.functions, state.device, before)


cdef int queue_pieces(StagingState *state, StagedBucket *bucket, Work *work) noexcept nogil:
    """Hand what has landed to the channel below; return how many pieces, -1 for an error."""
    cdef Piece *piece
    cdef int passed, moved = 0
    if bucket.number != state.queued:
        return 0
    while bucket.queued < bucket.count:
        piece = &bucket.pieces[bucket.queued]
        if piece.device_bytes:
            passed = event_passed(state.functions, piece.copied)
            if passed == 0:
                return moved
            if passed < 0:
                state.transport.call = "EventQuery"
                state.transport.code = -passed
                return -1
        piece.work.element = work.element
        piece.work.count = piece.bytes // element_bytes(work.element)
        piece.work.divisor = work.divisor
        enqueue(state.engine, state.inner, &piece.work)
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
        if not load(&piece.work.done):
            return moved
        if piece.device_bytes:
            code = state.functions.memcpy_async(
                bucket.data + piece.offset, piece.work.data, piece.device_bytes, COPY_TO_DEVICE,
                state.back)
            if code != DEVICE_READY:
                state.transport.call = "MemcpyAsync"
                state.transport.code = code
                return -1
        bucket.sent_back += 1
        moved += 1
    if bucket.sent_back == bucket.count and bucket.device_bytes:
        code = state.functions.event_record(bucket.returned, state.back)
        if code != DEVICE_READY:
            state.transport.call = "EventRecord"
            state.transport.code = code
            return -1
    return moved


cdef Advance move_pieces(StagingState *state, StagedBucket *bucket, Work *work) noexcept nogil:
    cdef int queued, sent
    queued = queue_pieces(state, bucket, work)
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


cdef Advance advance(Transport *transport, Work *work, int helping) noexcept nogil:
    cdef StagingState *state = <StagingState *>transport
    cdef StagedBucket *bucket = <StagedBucket *>work.context
    cdef Advance status
    cdef int before = state.device
    if state.inner.failure:
        state.inner_failed = True
        transport.call = state.inner.failed_call
        transport.code = state.inner.failure
        return ADVANCE_FAILED
    if bucket.code != DEVICE_READY:
        transport.call = bucket.call
        transport.code = bucket.code
        return ADVANCE_FAILED
    if not bucket.device_bytes:
        return move_pieces(state, bucket, work)
    transport.call = "SetDevice"
    transport.code = enter_device(state.functions, state.device, &before)
    if transport.code != DEVICE_READY:
        return ADVANCE_FAILED
    status = move_pieces(state, bucket, work)
    # The engine's own thread stays, see Note [Current devices].
    if not state.engine.on_thread:
        leave_device(state.functions, state.device, before)
    return status


cdef unsigned int take_ticket(Transport *transport) noexcept nogil:
    cdef Transport *inner = (<StagingState *>transport).inner.transport
    return 0 if inner.take_ticket == NULL else inner.take_ticket(inner)


cdef void sleep(Transport *transport, unsigned int ticket, double seconds) noexcept nogil:
    """Sleep until other ranks ring, where nothing but them is waited for."""
    cdef StagingState *state = <StagingState *>transport
    cdef Transport *inner = state.inner.transport
    if state.queued == state.announced and inner.sleep != NULL:
        inner.sleep(inner, ticket, seconds)
    else:
        sleep_for(min(seconds, COPY_CHECK))


def _merged(ranges):
    """Return pairs of first address and end so that those which touch are one."""
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


# Not collected: copies may use this when whoever refers to it is garbage. It refers to nothing that
# refers to it.
@cython.no_gc
cdef class StagedBuckets:
    """One set of buckets: their memory on the device and on the host, and the events of copies.

    Not collective.

    Args:
        runtime: of the device.
        device: its index.
        sizes: of the buckets in bytes, with their tails.
        tails: what of each stays on the host, in bytes.
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
            bucket.device_bytes = gradients[index]
            pieces_before += bucket.count
            if bucket.count == 0:
                continue
            step = (bucket.device_bytes + bucket.count - 1) // bucket.count
            step = (step + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
            for number in range(bucket.count):
                piece = &bucket.pieces[number]
                offset = min(number * step, bucket.device_bytes)
                piece.offset = offset
                piece.device_bytes = min(step, bucket.device_bytes - offset)
                piece.bytes = piece.device_bytes
                piece.work.done = 1
            piece.bytes += <size_t>tails[index]

    def __dealloc__(self):
        self.release()
        free(self.buckets)
        free(self.pieces)

    @property
    def piece_sizes(self):
        """What of the host's memory each piece needs, in bytes, bucket by bucket."""
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
                piece.work.data = <char *><size_t>host.buffer.data_ptr()
                piece.work.context = host.context
                if piece.device_bytes:
                    event = Event(self.runtime, self.device)
                    self.events.append(event)
                    piece.copied = event.handle
            if bucket.device_bytes:
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
        cdef DeviceRuntime *functions = &self.runtime.functions
        ranges = []
        for host in self.hosts:
            first = host.buffer.data_ptr() // mmap.PAGESIZE
            end = -(-(host.buffer.data_ptr() + host.buffer.numel()) // mmap.PAGESIZE)
            ranges.append((first * mmap.PAGESIZE, end * mmap.PAGESIZE))
        code = enter_device(functions, self.device, &before)
        check_device(self.runtime, code, "SetDevice", self.device)
        try:
            for first, end in _merged(ranges):
                self.runtime.host_register(first, end - first)
                self.registered.append(first)
        finally:
            leave_device(functions, self.device, before)

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
cdef class StagedMemory(DeviceMemory):
    """The memory of one bucket. Made by `StagingTransport.allocate`."""

    def __dealloc__(self):
        cdef StagedBuckets buckets = self.owner
        if buckets is not None and buckets.busy() and buckets not in _kept:
            _kept.append(buckets)

    cpdef int wait_on(self, size_t stream) except -1:
        """Let what comes later on the stream wait for the means. Not collective."""
        cdef StagedBuckets buckets = self.owner
        cdef StagedBucket *bucket = <StagedBucket *>self.context
        cdef int code
        if bucket.returned == NULL:
            return 0
        with nogil:
            code = buckets.runtime.functions.stream_wait_event(<void *>stream, bucket.returned, 0)
        return check_device(buckets.runtime, code, "StreamWaitEvent", buckets.device)


def _forget_kept():
    """Give back what is no longer in use of what went away. Not collective."""
    _kept[:] = [buckets for buckets in _kept if (<StagedBuckets>buckets).busy()]


cdef class StagingTransport:
    """Means of buckets on one device, reduced by the host.

    Not collective (what it allocates is allocated on all ranks).

    Args:
        inner: the channel that reduces host memory; used by nothing else, and closed with this
            transport's channel.
        runtime: of the device.
        device: a `torch.device`.
        piece_bytes: the most that is copied and reduced at once, in bytes; a multiple of 64.

    Raises:
        ValueError: `piece_bytes` is out of range.
        DeviceError: the runtime refuses to make streams.
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
        """Return a `DeviceMemory` for each of `sizes` in bytes.

        Collective.

        Args:
            sizes: of the buckets, with their tails.
            tails: what of each, at its end, stays in host memory, in bytes; None: nothing.

        Raises:
            DeviceError: the runtime refuses to pin host memory or to make events.
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
        """Free the streams, what is pinned and the transport below. Collective.

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
        raise device_error(self.runtime, code, call.decode(), self.state.device)

    @property
    def address(self):
        """Where the engine finds the C ``Transport``."""
        return <size_t>&self.state.transport
