from libc.stdint cimport uint32_t

from mpiddp.transports.shared cimport SharedState


cdef enum:
    AREAS = 2


cdef struct Counters:
    # In shared memory, one for each area; both only grow.
    uint32_t published      # rounds whose bytes are there
    char padding[60]
    uint32_t consumed       # ranks that have read, over all rounds
    char padding_behind[60]


cdef class SharedBroadcast:
    cdef SharedState state
    cdef object bell
    cdef object mapping
    cdef object areas
    cdef readonly Py_ssize_t capacity
    cdef Counters *counters
    cdef char *bytes
    cdef uint32_t rounds[AREAS]
    cdef int area

    cdef int wait_for(self, uint32_t *counter, uint32_t target, double timeout) except -1
