from mpiddp.engine.interface cimport Job, Transport


cdef double patience(bint waits, bint crowded, size_t size) noexcept nogil
cdef bint drive(Transport *transport, Job *job, double seconds) noexcept nogil


cdef class WaitHabit:
    cdef int prompt             # how many in a row were waited for at once
    cdef long long unwaited     # which collective nobody has waited for, 0 for none
    cdef double returned        # when its call did

    cdef bint expects_wait(self) noexcept
    cdef void begun(self, long long number) noexcept
    cpdef waited(self, long long number)
