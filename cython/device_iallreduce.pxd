from mpi4py.libmpi cimport MPI_Request

from mpiddp.device_ring cimport DeviceRingTransport, RingState
from mpiddp.engine cimport MAX_SLOTS, Work


cdef struct WideState:
    # Of the works whose elements MPI can add. What the ring has is for the others.
    RingState *ring
    size_t chunk_bytes
    size_t window           # chunks in flight at once
    size_t in_flight
    Work *works[MAX_SLOTS]
    size_t counts[MAX_SLOTS]
    MPI_Request requests[MAX_SLOTS]


cdef class DeviceIallreduceTransport(DeviceRingTransport):
    cdef WideState wide
