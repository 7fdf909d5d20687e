"""Messages of GPU memory around a ring of ranks, with the sums on the GPU.

For MPIs that send and receive GPU memory but cannot reduce it. A chunk is cut into as many
segments as there are ranks. In the first half of the steps each rank adds what its left
neighbour sends to its own segment and passes the sum on, so that each rank ends with one segment
of the whole sum; in the second half these go around.

Note [Messages of the ring]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
Several chunks are on their way at once, each in a slot. Chunk number k of all jobs has slot k
modulo the number of slots on every rank, and waits until it is free: so the slot as the tag, and
MPI's order of messages, say which message is which. A step begins when both messages of the step
before are over and what came has been added, which an event on the stream of the sums shows.

Segment s is summed in the order of the ranks from s on: the same bits from run to run, and on all
ranks, since only one of them makes each sum. 16-bit elements are rounded after each addition.
"""

from libc.string cimport memset

from mpiddp.engine.interface cimport ADVANCE_PENDING, ADVANCE_SOME, Advance, Job, Transport
from mpiddp.gpu.blas cimport Adder, add, axpy_name
from mpiddp.gpu.runtime cimport GPU_READY, Event, enter_gpu, event_passed, leave_gpu
from mpiddp.mpi.calls cimport MPI_Comm, MPI_SUCCESS, mpi
from mpiddp.system.kernels cimport element_bytes
from mpiddp.transports.gpu_direct cimport (
    PointerBucket, allocate, check_settings, fail_in_mpi, fail_on_gpu, finish, gradients_of,
    may_start, raise_failure_of, set_up,
)
from mpiddp.gpu.allocation import Allocation
from mpiddp.gpu.runtime import runtime_of


cdef size_t segment_start(RingState *state, RingChunk *chunk, size_t segment) noexcept nogil:
    # Not segment * count // ranks, which may overflow where both are large.
    cdef size_t share = chunk.count // state.ranks
    cdef size_t more = chunk.count % state.ranks
    return segment * share + min(segment, more)


cdef size_t segment_count(RingState *state, RingChunk *chunk, size_t segment) noexcept nogil:
    return chunk.count // state.ranks + (segment < chunk.count % state.ranks)


cdef size_t segment_received(RingState *state, RingChunk *chunk) noexcept nogil:
    """Return which segment comes from the left in the chunk's step."""
    return (state.rank + 2 * state.ranks - chunk.step - 1) % state.ranks


cdef size_t segment_sent(RingState *state, RingChunk *chunk) noexcept nogil:
    """Return which segment goes to the right: the one that came in the step before."""
    return (segment_received(state, chunk) + 1) % state.ranks


cdef int begin_step(RingState *state, size_t slot) noexcept nogil:
    """Send and receive; return an MPI error code."""
    cdef RingChunk *chunk = &state.chunks[slot]
    cdef size_t size = element_bytes(chunk.job.element)
    cdef size_t coming = segment_received(state, chunk)
    cdef size_t going = segment_sent(state, chunk)
    cdef size_t left = (state.rank + state.ranks - 1) % state.ranks
    cdef size_t right = (state.rank + 1) % state.ranks
    cdef char *to = chunk.scratch
    cdef int code
    if chunk.step >= state.ranks - 1:
        to = chunk.data + segment_start(state, chunk, coming) * size
    state.pointers.transport.call = "MPI_Irecv"
    code = mpi.irecv(
        to, <int>(segment_count(state, chunk, coming) * size), mpi.byte, <int>left, <int>slot,
        state.pointers.comm, &chunk.requests[0],
    )
    if code != MPI_SUCCESS:
        return code
    state.pointers.transport.call = "MPI_Isend"
    return mpi.isend(
        chunk.data + segment_start(state, chunk, going) * size,
        <int>(segment_count(state, chunk, going) * size), mpi.byte, <int>right, <int>slot,
        state.pointers.comm, &chunk.requests[1],
    )


cdef int begin_sum(RingState *state, RingChunk *chunk) noexcept nogil:
    """Add what came; return an error code of MPI, which also stands for one of the GPU."""
    cdef PointerState *pointers = &state.pointers
    cdef size_t coming = segment_received(state, chunk)
    cdef size_t count = segment_count(state, chunk, coming)
    cdef char *own = chunk.data + (
        segment_start(state, chunk, coming) * element_bytes(chunk.job.element)
    )
    cdef int before = pointers.device
    cdef int code
    cdef const char *call = "SetDevice"
    if count == 0:
        return MPI_SUCCESS
    code = enter_gpu(pointers.functions, pointers.device, &before)
    if code == GPU_READY:
        call = axpy_name(state.sums)
        code = add(state.sums, chunk.job.element, own, chunk.scratch, count)
    if code == GPU_READY:
        call = "EventRecord"
        code = pointers.functions.event_record(chunk.added, state.sums.stream)
    leave_gpu(pointers.functions, pointers.device, before)
    if code != GPU_READY:
        fail_on_gpu(pointers, code, call)
        return pointers.transport.code
    chunk.adding = True
    return MPI_SUCCESS


cdef int move(RingState *state, size_t slot, int *advanced) noexcept nogil:
    """Take the steps of a chunk that can be taken; return an error code of MPI."""
    cdef RingChunk *chunk = &state.chunks[slot]
    cdef int finished, passed, code
    while True:
        if chunk.adding:
            passed = event_passed(state.pointers.functions, chunk.added)
            if passed < 0:
                fail_on_gpu(&state.pointers, -passed, "EventQuery")
                return state.pointers.transport.code
            if not passed:
                return MPI_SUCCESS
            chunk.adding = False
        else:
            finished = 0
            state.pointers.transport.call = "MPI_Testall"
            code = mpi.testall(2, chunk.requests, &finished)
            if code != MPI_SUCCESS or not finished:
                return code
            if chunk.step < state.ranks - 1:
                code = begin_sum(state, chunk)
                if code != MPI_SUCCESS:
                    return code
                if chunk.adding:
                    advanced[0] += 1
                    continue
        advanced[0] += 1
        chunk.step += 1
        if chunk.step == 2 * (state.ranks - 1):
            (<PointerBucket *>chunk.job.context).ended += chunk.count
            chunk.job = NULL
            state.in_flight -= 1
            return MPI_SUCCESS
        code = begin_step(state, slot)
        if code != MPI_SUCCESS:
            return code


cdef int poll_ring(Transport *transport, int *advanced) noexcept nogil:
    """Move all chunks that are on their way."""
    cdef RingState *state = <RingState *>transport
    cdef size_t slot
    cdef int code
    if not state.in_flight:
        return MPI_SUCCESS
    for slot in range(state.window):
        if state.chunks[slot].job == NULL:
            continue
        code = move(state, slot, advanced)
        if code != MPI_SUCCESS:
            return code
    return MPI_SUCCESS


cdef Advance advance_around_ring(
    Transport *transport, Job *job, int helping
) noexcept nogil:
    cdef RingState *state = <RingState *>transport
    cdef PointerBucket *bucket = <PointerBucket *>job.context
    cdef RingChunk *chunk
    cdef size_t gradients = gradients_of(job)
    cdef size_t size = element_bytes(job.element)
    cdef int code
    cdef Advance status = may_start(&state.pointers, job)
    if status == ADVANCE_SOME:
        status = ADVANCE_PENDING
        if state.ranks == 1:
            bucket.begun = bucket.ended = gradients
        while bucket.begun < gradients:
            chunk = &state.chunks[state.next_slot]
            if chunk.job != NULL:
                break
            chunk.job = job
            chunk.data = job.data + bucket.begun * size
            chunk.count = min(gradients - bucket.begun, state.chunk_bytes // size)
            chunk.step = 0
            chunk.adding = False
            code = begin_step(state, state.next_slot)
            if code != MPI_SUCCESS:
                return fail_in_mpi(&state.pointers, code)
            bucket.begun += chunk.count
            state.in_flight += 1
            state.next_slot = (state.next_slot + 1) % state.window
            status = ADVANCE_SOME
    elif status != ADVANCE_PENDING:
        return status
    return finish(&state.pointers, job, status)


cdef class GpuRingTransport:
    """Sums of GPU memory by messages around a ring.

    Not collective (the communicator was made collectively, and must be used by nothing else).

    Args:
        communicator: an mpi4py intracommunicator.
        device: the `torch.device` of the gradients.
        chunk_bytes: size of a chunk in bytes, a multiple of 64; a message has one part of it for
            each rank.
        window: chunks on their way at once, 1 to 16.

    Raises:
        ValueError: `chunk_bytes` or `window` is out of range, or there is no runtime for `device`.
        OSError: torch has loaded no BLAS library for the GPU.
        GpuError: there is not enough memory, or the runtime refuses.
    """

    def __init__(self, communicator, device, *, size_t chunk_bytes=1 << 22, size_t window=4):
        cdef size_t slot, ranks, scratch_bytes
        cdef Event added
        check_settings(chunk_bytes, window)
        self.runtime = runtime_of(device)
        if self.runtime is None:
            raise ValueError(f"{device} is no GPU")
        self.device = device
        memset(&self.state, 0, sizeof(self.state))
        index = self.runtime.index_of(device)
        set_up(
            &self.state.pointers, <MPI_Comm><size_t>communicator.handle, self.runtime, index
        )
        self.adder = Adder(self.runtime, index)
        self.state.sums = &self.adder.sums
        ranks = communicator.Get_size()
        self.state.ranks = ranks
        self.state.rank = communicator.Get_rank()
        self.state.chunk_bytes = chunk_bytes
        self.state.window = window
        # A segment has at most one element more than its share.
        scratch_bytes = (chunk_bytes // ranks // 64 + 2) * 64
        scratch = Allocation(self.runtime, index, window * scratch_bytes)
        self.kept = [scratch]
        for slot in range(window):
            added = Event(self.runtime, index)
            self.kept.append(added)
            self.state.chunks[slot].added = added.handle
            self.state.chunks[slot].scratch = <char *><size_t>(
                scratch.address + slot * scratch_bytes
            )
            self.state.chunks[slot].requests[0] = mpi.request_null
            self.state.chunks[slot].requests[1] = mpi.request_null
        self.state.pointers.transport.poll = poll_ring
        self.state.pointers.transport.advance = advance_around_ring

    def allocate(self, sizes, tails=None):
        """Return a `PointerMemory` for each bucket. Not collective.

        Args:
            sizes: in bytes.
            tails: how many of these, at the end, stay in host memory; None: none.

        Raises:
            GpuError: there is not enough memory.
        """
        return allocate(self.runtime, self.device, sizes, tails)

    def free(self):
        """Free what was made from the communicator: nothing. Not collective."""

    def raise_failure(self, code, call):
        """Raise the GpuError that made the channel fail, if it was one. Not collective."""
        raise_failure_of(&self.state.pointers, self.runtime)

    @property
    def address(self):
        """Where the engine finds the C ``Transport``."""
        return <size_t>&self.state.pointers.transport
