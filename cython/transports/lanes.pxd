from mpiddp.engine.interface cimport MAX_SLOTS, Job, Transport
from mpiddp.transports.chunk_sums cimport ChunkSums
from mpiddp.transports.shared cimport SharedState


cdef struct LaneState:
    SharedState shared      # first: the engine's pointer is a pointer to this
    ChunkSums sums          # with the ranks of this lane, one a node
    size_t lanes            # of each node
    size_t window           # chunks in flight at once
    size_t in_flight
    Job *jobs[MAX_SLOTS]


cdef class LaneTransport:
    cdef LaneState state
    cdef char *memory
    cdef object node
    cdef object lane
    cdef object lane_again
    cdef object bell
