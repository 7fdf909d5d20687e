from libc.stdint cimport uint32_t

from mpiddp.transports.shared cimport Bell


cdef enum:
    AREAS = 2


cdef struct Counters:
    # In shared memory, one for each area. A bell is rung once for each that is counted.
    Bell published          # rounds whose bytes are there
    Bell consumed           # ranks that have read, over all rounds


cdef class SharedBroadcast:
    cdef uint32_t readers
    cdef bint crowded
    cdef object mapping
    cdef object areas
    cdef readonly Py_ssize_t capacity
    cdef Counters *counters
    cdef char *bytes
    cdef uint32_t rounds[AREAS]
    cdef int area
