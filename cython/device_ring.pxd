from mpi4py.libmpi cimport MPI_Request

from mpiddp.device_pointers cimport PointerState
from mpiddp.device_runtime cimport Runtime
from mpiddp.device_sums cimport Adder, DeviceSums
from mpiddp.engine cimport MAX_SLOTS, Advance, Transport, Work


cdef struct RingChunk:
    # A chunk on its way around the ring.
    Work *work              # NULL: the slot is free
    char *data
    size_t count            # elements
    size_t step             # twice as many as there are other ranks: sums, then copies
    int adding              # what came in this step is being added
    MPI_Request requests[2]  # receive and send of this step
    char *scratch           # on the device: what came and is added
    void *added             # event


cdef struct RingState:
    PointerState pointers   # first: the engine's pointer is a pointer to this
    DeviceSums *sums
    size_t ranks
    size_t rank
    size_t chunk_bytes
    size_t window           # chunks on their way at once
    size_t in_flight
    size_t next_slot        # of the next chunk, in turn on all ranks
    RingChunk chunks[MAX_SLOTS]
    void *wide              # of a transport that uses the ring for some works only


cdef class DeviceRingTransport:
    cdef RingState state
    cdef readonly Runtime runtime
    cdef readonly object device
    cdef Adder adder
    cdef list kept              # events and memory of the chunks


# The `poll` and the `advance` of the transport.
cdef int poll_ring(Transport *transport, int *advanced) noexcept nogil
cdef Advance advance_around_ring(Transport *transport, Work *work, int helping) noexcept nogil
