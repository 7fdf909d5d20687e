from libc.stdint cimport uint32_t

from mpiddp.transports.shared cimport Bell


cdef struct Attendance:
    # In shared memory, followed by two numbers for each rank and by its rounds.
    Bell arrived            # rung once for each arrival, over all rounds
    uint32_t failures       # ranks that have failed
    uint32_t failed         # 1 + the first of them, 0 while all is well


cdef class NodeMeeting:
    cdef readonly Py_ssize_t rank
    cdef readonly Py_ssize_t ranks
    cdef uint32_t round
    cdef bint crowded
    cdef object mapping
    cdef Attendance *attendance
    cdef double *numbers
    cdef uint32_t *rounds
