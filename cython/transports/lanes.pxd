from mpiddp.engine.interface cimport MAX_SLOTS, Job, Transport
from mpiddp.transports.shared cimport SharedState
from mpiddp.transports.wire cimport Wire, WireState


cdef struct LaneState:
    SharedState shared      # first: the engine's pointer is a pointer to this
    WireState *wire         # to the ranks of this lane, one a node
    size_t lanes            # of each node
    size_t window           # chunks in flight at once
    size_t in_flight
    Job *jobs[MAX_SLOTS]


cdef class LaneTransport:
    cdef LaneState state
    cdef object node
    cdef readonly Wire wire     # None where this rank drives no lane
    cdef object lane
    cdef object bell
