from libc.stdint cimport uint32_t

from mpiddp.engine.interface cimport Job, Transport
from mpiddp.transports.shared_buckets cimport CACHE_LINE, SharedBucket


cdef struct Bell:
    # In shared memory, one per transport: rung when a waiting rank may find something to do.
    uint32_t rung           # how often: a futex
    uint32_t sleepers
    char padding[CACHE_LINE - 8]


cdef struct Sweep:
    # What all threads of a rank reduce of one bucket.
    SharedState *state
    Job *job
    uint32_t first          # chunk to look at first
    int reduced             # whether there was any left


cdef struct SharedState:
    Transport transport     # first: the engine's pointer is a pointer to this
    Bell *bell
    size_t ranks
    size_t rank
    size_t chunk_bytes


cdef class SharedTransport:
    cdef SharedState state
    cdef object node
    cdef object bell


# For transports whose ranks meet in shared memory too, but reduce in another way.
cdef void announce(Transport *transport, Job *job) noexcept nogil
cdef int all_arrived(SharedState *state, SharedBucket *bucket) noexcept nogil
cdef int all_finished(SharedBucket *bucket) noexcept nogil
cdef void finish_chunk(SharedState *state, SharedBucket *bucket) noexcept nogil
cdef uint32_t load32(const uint32_t *counter) noexcept nogil
cdef uint32_t add32(uint32_t *counter, uint32_t number) noexcept nogil
cdef void ring(Bell *bell) noexcept nogil
cdef void wake(Bell *bell) noexcept nogil
cdef int wait_for(Bell *counter, uint32_t target, double timeout, bint crowded) except -1
cdef void sleep_on(Bell *bell, uint32_t rung, double seconds) noexcept nogil
cdef unsigned int take_ticket(Transport *transport) noexcept nogil
cdef void sleep(Transport *transport, unsigned int ticket, double seconds) noexcept nogil
