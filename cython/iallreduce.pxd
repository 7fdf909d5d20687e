from mpi4py.libmpi cimport MPI_Comm, MPI_Request

from mpiddp.engine cimport MAX_SLOTS, Transport, Work


cdef struct IallreduceState:
    Transport transport             # first: the engine's pointer is a pointer to this
    MPI_Comm comm
    MPI_Request requests[MAX_SLOTS]
    Work *works[MAX_SLOTS]
    size_t offsets[MAX_SLOTS]
    size_t counts[MAX_SLOTS]
    char *received[MAX_SLOTS]       # the sum, chunk_bytes each
    char *widened[MAX_SLOTS]        # float32 copy of a 16-bit chunk, chunk_bytes each


cdef class IallreduceTransport:
    cdef IallreduceState state
    cdef char *memory
