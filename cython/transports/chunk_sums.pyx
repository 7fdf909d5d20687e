"""The all-reduce of one chunk by MPI_Iallreduce.

Note [Out of place]
~~~~~~~~~~~~~~~~~~~
The sum lands in a scratch chunk and is divided on its way back to the bucket.
The division needs one pass over the data anyway, the scratch chunk stays in the
cache, and Open MPI's Iallreduce takes half the time out of place (in MPICH it makes
no difference).

Note [Sums of 16-bit gradients]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
float16 and bfloat16 are widened to float32, summed, divided, and rounded once.
MPI has no portable datatype for either (`MPI.BFLOAT16_T` is null in Open MPI's and
MPICH's wheels), and adding in 16 bits would round after each rank. So here they travel in
twice as many bytes; chunk_exchange.pyx sends them as they are.

Note [Sums that overflow in MPI]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
MPI adds what the ranks send, and the sum may be infinite where the mean is a number. Always
sending smaller numbers would need one more pass over the gradients, and cost small ones their
last digits. So the plain numbers are sent. All ranks get the same bits; where these are not all
finite, all ranks send what is left of the chunk a second time, scaled, and take from that what
the first sum lacks: see Note [Sums that overflow] in kernels_values.h. The chunks in the bucket
are unchanged until then.
Ranks see chunks arrive in different orders, but must start their collectives in the same order.
So second all-reduces have a communicator of their own, and start in the order in which the
chunks have started: each when all earlier chunks are known to need none, or have begun theirs.
An infinity or NaN in a rank's gradients costs a second all-reduce too: the sum looks the same.
"""

from mpiddp.engine.interface cimport CHUNK_FINISHED, CHUNK_MOVED, CHUNK_WAITS
from mpiddp.mpi.calls cimport MPI_Datatype, MPI_SUCCESS, mpi
from mpiddp.system.kernels cimport ELEMENT_FLOAT32, ELEMENT_FLOAT64, ElementType, selected_kernels


cdef void set_up(
    ChunkSums *sums, Transport *transport, char *memory, size_t window, size_t stride,
    size_t bytes_,
) noexcept:
    cdef size_t slot
    sums.transport = transport
    for slot in range(window):
        sums.slots[slot].sent = memory + slot * stride
        sums.slots[slot].received = memory + slot * stride + bytes_
        sums.slots[slot].request = mpi.request_null


cdef MPI_Datatype datatype_of(ElementType element) noexcept nogil:
    return mpi.float64 if element == ELEMENT_FLOAT64 else mpi.float32


cdef int start_sum(
    ChunkSums *sums, size_t slot, Job *job, char **buffers, size_t ranks, size_t first,
    size_t count,
) noexcept nogil:
    cdef ChunkSum *chunk = &sums.slots[slot]
    cdef char *sent = chunk.sent
    chunk.job = job
    chunk.buffers = buffers
    chunk.ranks = ranks
    chunk.first = first
    chunk.count = count
    chunk.written = 0
    chunk.number = sums.started
    chunk.phase = CHUNK_SUMS
    sums.started += 1
    if ranks == 1 and job.element == ELEMENT_FLOAT32:
        sent = buffers[0] + first * sizeof(float)
    elif ranks == 1 and job.element == ELEMENT_FLOAT64:
        sent = buffers[0] + first * sizeof(double)
    else:
        selected_kernels().sum_to(job.element, sent, buffers, ranks, first, count)
    sums.transport.call = "MPI_Iallreduce"
    return mpi.iallreduce(
        sent, chunk.received, <int>count, datatype_of(job.element), mpi.sum, sums.comm,
        &chunk.request,
    )


cdef int may_start_again(ChunkSums *sums, ChunkSum *chunk) noexcept nogil:
    cdef ChunkSum *other
    cdef size_t slot
    for slot in range(MAX_SLOTS):
        other = &sums.slots[slot]
        if other.phase in (CHUNK_SUMS, CHUNK_OVERFLOWED) and other.number < chunk.number:
            return False
    return True


cdef int start_again(ChunkSums *sums, ChunkSum *chunk) noexcept nogil:
    cdef size_t count = chunk.count - chunk.written
    chunk.phase = CHUNK_SUMS_AGAIN
    selected_kernels().scaled_sum_to(
        chunk.job.element, chunk.sent, chunk.buffers, chunk.ranks, chunk.first + chunk.written,
        count, chunk.job.divisor,
    )
    sums.transport.call = "MPI_Iallreduce"
    return mpi.iallreduce(
        mpi.in_place, chunk.sent, <int>count, datatype_of(chunk.job.element), mpi.sum,
        sums.comm_again, &chunk.request,
    )


cdef void finish_again(ChunkSum *chunk) noexcept nogil:
    cdef size_t bytes_ = (
        sizeof(double) if chunk.job.element == ELEMENT_FLOAT64 else sizeof(float)
    )
    selected_kernels().spread_scaled_mean(
        chunk.job.element, chunk.buffers, chunk.ranks, chunk.first + chunk.written,
        chunk.count - chunk.written, chunk.received + chunk.written * bytes_, chunk.sent,
        chunk.job.divisor,
    )


cdef int test_sum(ChunkSums *sums, size_t slot, ChunkProgress *progress) noexcept nogil:
    cdef ChunkSum *chunk = &sums.slots[slot]
    cdef int code, arrived = 0
    progress[0] = CHUNK_WAITS
    if chunk.phase != CHUNK_OVERFLOWED:
        sums.transport.call = "MPI_Test"
        code = mpi.test(&chunk.request, &arrived, NULL)
        if code != MPI_SUCCESS or not arrived:
            return code
        if chunk.phase == CHUNK_SUMS_AGAIN:
            finish_again(chunk)
            chunk.written = chunk.count
        else:
            chunk.written = selected_kernels().spread_mean(
                chunk.job.element, chunk.buffers, chunk.ranks, chunk.first, chunk.count,
                chunk.received, chunk.job.divisor,
            )
        if chunk.written == chunk.count:
            chunk.phase = CHUNK_NONE
            progress[0] = CHUNK_FINISHED
            return MPI_SUCCESS
        chunk.phase = CHUNK_OVERFLOWED
    if may_start_again(sums, chunk):
        progress[0] = CHUNK_MOVED
        return start_again(sums, chunk)
    return MPI_SUCCESS
