from mpiddp.engine.interface cimport Transport
from mpiddp.transports.chunk_sums cimport ChunkSums


cdef struct IallreduceState:
    Transport transport             # first: the engine's pointer is a pointer to this
    ChunkSums sums


cdef class IallreduceTransport:
    cdef IallreduceState state
    cdef char *memory
    cdef object again               # a communicator of the same ranks
