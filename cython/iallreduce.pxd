from mpiddp.chunk_sums cimport ChunkSums
from mpiddp.engine cimport Transport


cdef struct IallreduceState:
    Transport transport             # first: the engine's pointer is a pointer to this
    ChunkSums sums


cdef class IallreduceTransport:
    cdef IallreduceState state
    cdef char *memory
    cdef object again               # a communicator of the same ranks
