"""MPI_Iallreduce of GPU memory, for MPIs that support this: `gpu_support` knows which.

The sum replaces the gradients in place: a second buffer on the GPU would have to be copied back.
MPI has no portable datatype for 16-bit elements, so those go around the ring, on the same
communicator.
"""

from mpiddp.engine.interface cimport ADVANCE_PENDING, ADVANCE_SOME, Advance, Job, Transport
from mpiddp.mpi.calls cimport MPI_SUCCESS, mpi
from mpiddp.system.kernels cimport ELEMENT_FLOAT32, ELEMENT_FLOAT64, element_bytes
from mpiddp.transports.gpu_direct cimport (
    PointerBucket, check_settings, fail_in_mpi, finish, gradients_of, may_start,
)
from mpiddp.transports.gpu_ring cimport GpuRingTransport, RingState, advance_around_ring, poll_ring


# The ring's, for 16-bit elements: a quarter of what a ring alone takes.
cdef enum:
    RING_CHUNK_BYTES = 1 << 20


cdef int start_chunk(
    WideState *state, size_t slot, Job *job, size_t count
) noexcept nogil:
    cdef PointerBucket *bucket = <PointerBucket *>job.context
    state.jobs[slot] = job
    state.counts[slot] = count
    state.in_flight += 1
    state.ring.pointers.transport.call = "MPI_Iallreduce"
    return mpi.iallreduce(
        mpi.in_place, job.data + bucket.begun * element_bytes(job.element), <int>count,
        mpi.float64 if job.element == ELEMENT_FLOAT64 else mpi.float32,
        mpi.sum, state.ring.pointers.comm, &state.requests[slot],
    )


cdef int poll(Transport *transport, int *advanced) noexcept nogil:
    """See which chunks hold the sum."""
    cdef WideState *state = <WideState *>(<RingState *>transport).wide
    cdef size_t slot
    cdef int finished
    cdef int code = poll_ring(transport, advanced)
    if code != MPI_SUCCESS or not state.in_flight:
        return code
    for slot in range(state.window):
        if state.jobs[slot] == NULL:
            continue
        finished = 0
        transport.call = "MPI_Test"
        code = mpi.test(&state.requests[slot], &finished, NULL)
        if code != MPI_SUCCESS:
            return code
        if finished:
            (<PointerBucket *>state.jobs[slot].context).ended += state.counts[slot]
            state.jobs[slot] = NULL
            state.in_flight -= 1
            advanced[0] += 1
    return MPI_SUCCESS


cdef Advance advance(Transport *transport, Job *job, int helping) noexcept nogil:
    cdef WideState *state = <WideState *>(<RingState *>transport).wide
    cdef PointerBucket *bucket = <PointerBucket *>job.context
    cdef size_t gradients = gradients_of(job)
    cdef size_t slot, count
    cdef int code
    cdef Advance status
    if job.element != ELEMENT_FLOAT32 and job.element != ELEMENT_FLOAT64:
        return advance_around_ring(transport, job, helping)
    status = may_start(&state.ring.pointers, job)
    if status == ADVANCE_SOME:
        status = ADVANCE_PENDING
        for slot in range(state.window):
            if bucket.begun == gradients:
                break
            if state.jobs[slot] != NULL:
                continue
            count = min(
                gradients - bucket.begun, state.chunk_bytes // element_bytes(job.element)
            )
            code = start_chunk(state, slot, job, count)
            if code != MPI_SUCCESS:
                return fail_in_mpi(&state.ring.pointers, code)
            bucket.begun += count
            status = ADVANCE_SOME
    elif status != ADVANCE_PENDING:
        return status
    return finish(&state.ring.pointers, job, status)


cdef class GpuIallreduceTransport(GpuRingTransport):
    """Chunked, windowed MPI_Iallreduce of GPU memory.

    Not collective (the communicator was made collectively, and must be used by nothing else).

    Args:
        communicator: an mpi4py intracommunicator.
        device: the `torch.device` of the gradients.
        chunk_bytes: size of a chunk in bytes, a multiple of 64.
        window: chunks in flight at once, 1 to 16.

    Raises:
        ValueError: `chunk_bytes` or `window` is out of range, or there is no runtime for `device`.
        OSError: torch has loaded no BLAS library for the GPU.
        GpuError: there is not enough memory, or the runtime refuses.
    """

    def __init__(self, communicator, device, *, size_t chunk_bytes=1 << 22, size_t window=2):
        cdef size_t slot
        check_settings(chunk_bytes, window)
        GpuRingTransport.__init__(
            self, communicator, device, chunk_bytes=min(chunk_bytes, <size_t>RING_CHUNK_BYTES)
        )
        self.wide.ring = &self.state
        self.wide.chunk_bytes = chunk_bytes
        self.wide.window = window
        for slot in range(window):
            self.wide.requests[slot] = mpi.request_null
        self.state.wide = &self.wide
        self.state.pointers.transport.poll = poll
        self.state.pointers.transport.advance = advance
