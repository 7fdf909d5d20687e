from mpiddp.kernels cimport (
    ELEMENT_BFLOAT16,
    ELEMENT_FLOAT16,
    ELEMENT_FLOAT32,
    ELEMENT_FLOAT64,
    ElementType,
)


cdef enum WaitStatus:
    WAIT_DONE
    WAIT_TIMED_OUT


cdef struct Work:
    # The all-reduce of one bucket. Owned by the bucket, lent to the engine from
    # submit until `done`.
    char *data              # summed and divided in place
    size_t count            # elements
    ElementType element
    double divisor          # what the sum over ranks is divided by
    size_t started          # elements handed to the transport so far
    size_t finished         # elements that hold the mean
    int done                # read and written with load/store below
    Work *next


cdef struct Transport:
    # What the engine knows of a way to reduce: start a chunk, test a chunk.
    # Each transport's own struct has this one as its first member. Both
    # functions return an MPI error code and leave the call's name in `call`.
    size_t slots            # chunks that may be in flight at once, at most MAX_SLOTS
    size_t chunk_bytes      # size of one chunk as it is sent
    const char *call
    int (*start)(
        Transport *transport, size_t slot, Work *work, size_t offset, size_t count
    ) noexcept nogil
    int (*test)(Transport *transport, size_t slot, int *finished) noexcept nogil


cdef enum:
    MAX_SLOTS = 16


cdef struct ChannelState:
    # One ordered queue of work, with its own communicator below the transport:
    # chunks start strictly in queue order, so all ranks match them alike.
    Transport *transport    # NULL in a world of one: work is done when submitted
    Work *head              # oldest work that has chunks to start
    Work *tail
    Work *slot_work[MAX_SLOTS]
    size_t slot_count[MAX_SLOTS]
    size_t slots_used
    size_t pending          # works submitted and not done
    int failure             # first MPI error code, 0 while all is well
    const char *failed_call
    double last_progress    # seconds on the monotonic clock
    ChannelState *next


cdef struct EngineState


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
    cdef readonly bint closed
    cdef ChannelState state

    cdef int submit(self, Work *work) except -1
    cdef WaitStatus wait(self, Work *work, double timeout) except *
    cdef void poke(self) noexcept nogil


cdef int work_is_done(Work *work) noexcept nogil
cdef size_t element_bytes(ElementType element) noexcept nogil
