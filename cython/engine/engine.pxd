from mpiddp.engine.interface cimport ChannelState, EngineState, Job, Transport


cdef enum WaitStatus:
    WAIT_DONE
    WAIT_TIMED_OUT


# Whether `Engine.fail_channels` was called and no other engine was made since.
cdef int has_failed() noexcept nogil

# For threads that wait, after each look for signals.
cdef int look_if_due(double *looked) except -1


cdef class Engine:
    cdef EngineState *state
    cdef bint threaded
    cdef object cores
    cdef list channels
    cdef int process_id

    cdef _start_thread(self)
    cdef _stop_thread(self)
    cdef int step(self) noexcept nogil


cdef class Channel:
    cdef readonly Engine engine
    cdef readonly object transport
    cdef readonly object communicator
    cdef readonly object device     # the torch.device of the buckets, None for the CPU
    cdef readonly bint closed
    cdef ChannelState state

    cdef int submit(self, Job *job) except -1
    cdef WaitStatus wait(self, Job *job, double timeout) except *
    cdef WaitStatus wait_until(self, Job *job, double deadline, double patience) except *
    cdef void poke(self) noexcept nogil
