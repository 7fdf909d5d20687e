from libc.stdint cimport uint32_t

from mpiddp.engine.interface cimport Job, Transport


cdef enum:
    CACHE_LINE = 64


cdef struct Bell:
    # In shared memory, one per transport: rung when a waiting rank may find something to do.
    uint32_t rung           # how often: a futex
    uint32_t sleepers
    char padding[CACHE_LINE - 8]


cdef struct Meeting:
    # One per bucket, in shared memory, followed by a claim for each chunk. All numbers only
    # grow: in the n-th round of a bucket they are compared with n times what a round adds.
    uint32_t arrived        # ranks that have filled the bucket
    char padding[CACHE_LINE - 4]
    uint32_t finished       # chunks that hold the mean
    char padding_behind[CACHE_LINE - 4]


cdef struct SharedBucket:
    # What one process knows of a bucket.
    Meeting *meeting
    uint32_t *claims        # the round in which a chunk was last taken by some rank
    char **buffers          # of each rank
    size_t index            # in its set of buckets
    uint32_t round          # how often the bucket was submitted
    uint32_t chunks
    uint32_t next_own       # chunk of its own that this rank takes next
    uint32_t end_of_own
    uint32_t owned          # chunks, from the first on, whose mean goes to their owner only
    int swept               # all chunks of this round are taken


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


cdef class SharedBuckets:
    cdef SharedBucket *buckets
    cdef char **buffers
    cdef list mappings
    cdef readonly size_t chunk_bytes
    cdef readonly bint has_owners       # the transport can write means to their owners only


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
cdef size_t owner_of(SharedBucket *bucket, size_t chunk, size_t ranks) noexcept nogil
cdef void sleep_on(Bell *bell, uint32_t rung, double seconds) noexcept nogil
cdef unsigned int take_ticket(Transport *transport) noexcept nogil
cdef void sleep(Transport *transport, unsigned int ticket, double seconds) noexcept nogil
