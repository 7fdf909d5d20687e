# The look of a thread that waits: returns the running time. Needs the GIL.
cdef double look(double *looked) noexcept

# The running time at a moment of the monotonic clock. Needs the GIL.
cdef double running_at(double time) noexcept


cdef class Clock:
    cdef public double looked
