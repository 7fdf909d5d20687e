from mpiddp.engine.interface cimport Job


cdef bint tracing           # whether moments are noted that only a trace needs


cdef int note_reduction(object reducer) except -1


cdef void begin_bucket(
    int source, long long number, long long elements, int element, double filled, double full,
    Job *job
) noexcept
