from mpiddp.engine.interface cimport Job


cdef void begin_bucket(
    int source, long long number, long long elements, int element, Job *job
) noexcept
