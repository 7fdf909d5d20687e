from mpiddp.engine.interface cimport MAX_SLOTS, Advance, Job, Transport
from mpiddp.gpu.blas cimport Adder, GpuSums
from mpiddp.gpu.runtime cimport Runtime
from mpiddp.mpi.calls cimport MPI_Request
from mpiddp.transports.gpu_direct cimport PointerState


cdef struct RingChunk:
    # A chunk on its way around the ring.
    Job *job              # NULL: the slot is free
    char *data
    size_t count            # elements
    size_t step             # twice as many as there are other ranks: sums, then copies
    int adding              # what came in this step is being added
    MPI_Request requests[2]  # receive and send of this step
    char *scratch           # on the device: what came and is added
    void *added             # event


cdef struct RingState:
    PointerState pointers   # first: the engine's pointer is a pointer to this
    GpuSums *sums
    size_t ranks
    size_t rank
    size_t chunk_bytes
    size_t window           # chunks on their way at once
    size_t in_flight
    size_t next_slot        # of the next chunk, in turn on all ranks
    RingChunk chunks[MAX_SLOTS]
    void *wide              # of a transport that uses the ring for some jobs only


cdef class GpuRingTransport:
    cdef RingState state
    cdef readonly Runtime runtime
    cdef readonly object device
    cdef Adder adder
    cdef list kept              # events and memory of the chunks


# The `poll` and the `advance` of the transport.
cdef int poll_ring(Transport *transport, int *advanced) noexcept nogil
cdef Advance advance_around_ring(Transport *transport, Job *job, int helping) noexcept nogil
