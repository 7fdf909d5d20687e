from mpiddp.kernels cimport (
    ELEMENT_BFLOAT16,
    ELEMENT_FLOAT16,
    ELEMENT_FLOAT32,
    ELEMENT_FLOAT64,
    ElementType,
)
from mpiddp.queues cimport (
    ADVANCE_BLOCKED,
    ADVANCE_DONE,
    ADVANCE_FAILED,
    ADVANCE_PENDING,
    ADVANCE_SOME,
    MAX_SLOTS,
    Advance,
    ChannelState,
    EngineState,
    Transport,
    Work,
)


cdef enum WaitStatus:
    WAIT_DONE
    WAIT_TIMED_OUT


cdef class Engine:
    cdef EngineState *state
    cdef bint threaded
    cdef list channels
    cdef int process_id

    cdef _stop_thread(self)
    cdef int step(self) noexcept nogil


cdef class Channel:
    cdef readonly Engine engine
    cdef readonly object transport
    cdef readonly object communicator
    cdef readonly object device     # a torch.device where buckets are, None for the CPU
    cdef readonly bint closed
    cdef ChannelState state

    cdef int submit(self, Work *work) except -1
    cdef WaitStatus wait(self, Work *work, double timeout) except *
    cdef WaitStatus wait_until(self, Work *work, double deadline, double patience) except *
    cdef void poke(self) noexcept nogil


cdef int work_is_done(Work *work) noexcept nogil
cdef size_t element_bytes(ElementType element) noexcept nogil
# Put a work into a queue; its memory belongs to the engine until it is done.
cdef void enqueue(EngineState *state, ChannelState *channel, Work *work) noexcept nogil
