from mpi4py.libmpi cimport MPI_Comm, MPI_Request

from mpiddp.engine cimport MAX_SLOTS, Transport, Work
from mpiddp.shared cimport SharedState


cdef struct LaneState:
    SharedState shared      # first: the engine's pointer is a pointer to this
    MPI_Comm comm           # the ranks of this lane, one a node
    size_t lanes            # of each node
    size_t window           # chunks in flight at once
    size_t in_flight
    MPI_Request requests[MAX_SLOTS]
    Work *works[MAX_SLOTS]
    size_t chunks[MAX_SLOTS]
    char *sent[MAX_SLOTS]       # the node's sum
    char *received[MAX_SLOTS]   # the sum over all nodes


cdef class LaneTransport:
    cdef LaneState state
    cdef char *memory
    cdef object node
    cdef object lane
    cdef object bell
