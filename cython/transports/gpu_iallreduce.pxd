from mpiddp.engine.interface cimport MAX_SLOTS, Job
from mpiddp.mpi.calls cimport MPI_Request
from mpiddp.transports.gpu_ring cimport GpuRingTransport, RingState


cdef struct WideState:
    # State of the jobs whose elements MPI can add. The ring's is for the others.
    RingState *ring
    size_t chunk_bytes
    size_t window           # chunks in flight at once
    size_t in_flight
    Job *jobs[MAX_SLOTS]
    size_t counts[MAX_SLOTS]
    MPI_Request requests[MAX_SLOTS]


cdef class GpuIallreduceTransport(GpuRingTransport):
    cdef WideState wide
