"""The transport inside a node: ranks reduce directly in each other's buckets.

Every rank maps the buckets of all ranks (shared_memory.pyx). When the last rank has
filled a bucket, each rank takes chunks of it: it adds that chunk of all ranks, always in
order of rank, divides, and writes the mean to all of them. Nothing is copied, and
nobody sends anything.

Note [Who reduces a chunk]
~~~~~~~~~~~~~~~~~~~~~~~~~~
Each rank has chunks of its own, one part of every bucket, and takes those first: its
memory pages and its NUMA node stay the same from step to step. A rank that waits at the
end of backward helps with the chunks that others have not begun. A chunk is taken by
advancing its claim to the current round, which only one rank can do. Who took it does not
show in the result, because the order of the sum is fixed.
A bucket with fewer chunks than ranks belongs to whoever comes first, which is the last
rank to fill it: so small buckets cost one meeting, not two. For a single chunk it wakes nobody
before the mean is there.

Note [No lock, no reset]
~~~~~~~~~~~~~~~~~~~~~~~~
A rank fills its bucket for the next round only after all chunks of this one are finished,
and no chunk can be taken before all ranks have filled theirs. So nobody writes what
another one still reads, and counters that only grow need no reset. They wrap around at
2^32; only differences are compared.
"""

from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport int32_t, uint32_t
from libc.string cimport memcpy
from posix.time cimport timespec

from mpiddp.engine.engine cimport has_failed, look_if_due
from mpiddp.engine.interface cimport (
    ADVANCE_BLOCKED, ADVANCE_DONE, ADVANCE_PENDING, ADVANCE_SOME, Advance, Job, Transport,
)
from mpiddp.system.helpers cimport share
from mpiddp.system.kernels cimport element_bytes, selected_kernels
from mpiddp.system.posix cimport as_timespec, now, store
from mpiddp.system.running_time cimport look
from mpiddp.transports.shared_buckets cimport SharedBucket
from mpiddp.transports.shared_memory cimport Mapping
from mpiddp.system import memory_files
from mpiddp.transports import shared_memory
from mpiddp.transports.shared_buckets import SharedBuckets


cdef extern from *:
    """
    #include <stdint.h>
    #include <limits.h>
    #include <linux/futex.h>
    #include <sys/syscall.h>
    #include <time.h>
    #include <unistd.h>

    static inline uint32_t mpiddp_load32(const uint32_t *p)
    { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
    static inline uint32_t mpiddp_add32(uint32_t *p, uint32_t n)
    { return __atomic_add_fetch(p, n, __ATOMIC_ACQ_REL); }
    static inline int mpiddp_swap32(uint32_t *p, uint32_t from, uint32_t to)
    {
        return __atomic_compare_exchange_n(
            p, &from, to, 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
    }

    /* Not FUTEX_PRIVATE: the waiters are in other processes. */
    static inline void mpiddp_futex_wait(uint32_t *p, uint32_t value, const struct timespec *limit)
    { syscall(SYS_futex, p, FUTEX_WAIT, value, limit, NULL, 0); }
    static inline void mpiddp_futex_wake_all(uint32_t *p)
    { syscall(SYS_futex, p, FUTEX_WAKE, INT_MAX, NULL, NULL, 0); }
    static inline void mpiddp_full_fence(void) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
    """
    uint32_t inline_load32 "mpiddp_load32"(const uint32_t *) noexcept nogil
    uint32_t inline_add32 "mpiddp_add32"(uint32_t *, uint32_t) noexcept nogil
    int swap32 "mpiddp_swap32"(uint32_t *, uint32_t, uint32_t) noexcept nogil
    void futex_wait "mpiddp_futex_wait"(uint32_t *, uint32_t, const timespec *) noexcept nogil
    void futex_wake_all "mpiddp_futex_wake_all"(uint32_t *) noexcept nogil
    void full_fence "mpiddp_full_fence"() noexcept nogil


cdef uint32_t load32(const uint32_t *counter) noexcept nogil:
    return inline_load32(counter)


cdef uint32_t add32(uint32_t *counter, uint32_t number) noexcept nogil:
    """Add and return the new value."""
    return inline_add32(counter, number)


cdef void ring(Bell *bell) noexcept nogil:
    add32(&bell.rung, 1)
    wake(bell)


cdef void wake(Bell *bell) noexcept nogil:
    """Wake all sleepers. The bell has been rung."""
    # Either the sleeper sees the new number, or this sees the sleeper.
    full_fence()
    if load32(&bell.sleepers):
        futex_wake_all(&bell.rung)


cdef unsigned int take_ticket(Transport *transport) noexcept nogil:
    return load32(&(<SharedState *>transport).bell.rung)


cdef void sleep(Transport *transport, unsigned int ticket, double seconds) noexcept nogil:
    sleep_on((<SharedState *>transport).bell, ticket, seconds)


cdef void sleep_on(Bell *bell, uint32_t rung, double seconds) noexcept nogil:
    """Sleep until woken if the bell has been rung so often, no longer than `seconds`."""
    cdef timespec limit = as_timespec(seconds)
    add32(&bell.sleepers, 1)
    full_fence()
    futex_wait(&bell.rung, rung, &limit)
    add32(&bell.sleepers, <uint32_t>-1)


# Waiting for a counter: how long without sleeping, and how often signals are looked for.
cdef double SPIN = 50e-6
cdef double SIGNAL_CHECK = 0.1


cdef int wait_for(Bell *counter, uint32_t target, double timeout, bint crowded) except -1:
    """Wait until `counter.rung` has reached `target`; return whether it did in time.

    Not collective.

    Args:
        counter: whoever rings it wakes the waiting ranks.
        target: the number.
        timeout: in seconds in which this process runs.
        crowded: there are more ranks than cores; sleep at once.
    """
    cdef double began = now()
    cdef double looked = began
    cdef double last = look(&looked) + timeout
    cdef double limit
    cdef uint32_t counted
    if reached(load32(&counter.rung), target):
        return 1
    while True:
        with nogil:
            limit = now() + SIGNAL_CHECK
            while now() < limit:
                counted = load32(&counter.rung)
                if reached(counted, target):
                    return 1
                if crowded or now() - began > SPIN:
                    sleep_on(counter, counted, SIGNAL_CHECK)
        PyErr_CheckSignals()
        if has_failed():
            raise RuntimeError("a rank was lost that this one waits for in memory that they share")
        if look(&looked) > last:
            return 0
        look_if_due(&looked)


cdef int reached(uint32_t counter, uint32_t target) noexcept nogil:
    return <int32_t>(counter - target) >= 0


cdef int all_arrived(SharedState *state, SharedBucket *bucket) noexcept nogil:
    return reached(
        load32(&bucket.meeting.arrived), bucket.round * <uint32_t>state.ranks
    )


cdef int all_finished(SharedBucket *bucket) noexcept nogil:
    return reached(load32(&bucket.meeting.finished), bucket.round * bucket.chunks)


cdef void finish_chunk(SharedState *state, SharedBucket *bucket) noexcept nogil:
    if add32(&bucket.meeting.finished, 1) == bucket.round * bucket.chunks:
        ring(state.bell)


cdef int arrive(SharedState *state, SharedBucket *bucket) noexcept nogil:
    """Count this rank's arrival in a new round; return whether it is the last one."""
    bucket.round += 1
    return add32(&bucket.meeting.arrived, 1) == bucket.round * <uint32_t>state.ranks


cdef void announce(Transport *transport, Job *job) noexcept nogil:
    cdef SharedState *state = <SharedState *>transport
    if arrive(state, <SharedBucket *>job.context):
        ring(state.bell)


cdef void announce_to_node(Transport *transport, Job *job) noexcept nogil:
    cdef SharedState *state = <SharedState *>transport
    cdef SharedBucket *bucket = <SharedBucket *>job.context
    cdef size_t chunks = bucket.chunks
    bucket.swept = False
    if chunks < state.ranks:
        bucket.next_own = 0
        bucket.end_of_own = bucket.chunks
    else:
        bucket.next_own = <uint32_t>(chunks * state.rank // state.ranks)
        bucket.end_of_own = <uint32_t>(chunks * (state.rank + 1) // state.ranks)
    if not arrive(state, bucket):
        return
    if chunks == 1:
        # At once: this rank may take its next step only much later, and nobody else is woken.
        if take_chunk(bucket, 0):
            reduce_chunk(state, job, 0)
    else:
        ring(state.bell)


cdef void reduce_chunk(SharedState *state, Job *job, uint32_t chunk) noexcept nogil:
    cdef SharedBucket *bucket = <SharedBucket *>job.context
    cdef size_t elements = state.chunk_bytes // element_bytes(job.element)
    cdef size_t first = chunk * elements
    cdef size_t count = min(elements, job.count - first)
    cdef size_t start = chunk * state.chunk_bytes
    cdef size_t place
    if bucket.domains:
        selected_kernels().mean_to(
            job.element, bucket.means[0] + start,
            bucket.buffers, state.ranks, first, count, job.divisor,
        )
        for place in range(1, bucket.domains):
            memcpy(
                bucket.means[place] + start, bucket.means[0] + start,
                count * element_bytes(job.element),
            )
    else:
        selected_kernels().mean_in_place(
            job.element, bucket.buffers, state.ranks, first, count, job.divisor,
        )
    finish_chunk(state, bucket)


cdef int take_chunk(SharedBucket *bucket, uint32_t chunk) noexcept nogil:
    return swap32(&bucket.claims[chunk], bucket.round - 1, bucket.round)


cdef void sweep_chunk(void *argument, size_t part) noexcept nogil:
    """Reduce a chunk if nobody has begun it; the first part is this rank's first own chunk."""
    cdef Sweep *sweep = <Sweep *>argument
    cdef SharedBucket *bucket = <SharedBucket *>sweep.job.context
    cdef uint32_t chunk = <uint32_t>((sweep.first + part) % bucket.chunks)
    if load32(&bucket.claims[chunk]) != bucket.round and take_chunk(bucket, chunk):
        reduce_chunk(sweep.state, sweep.job, chunk)
        store(&sweep.reduced, 1)


cdef Advance advance(Transport *transport, Job *job, int helping) noexcept nogil:
    cdef SharedState *state = <SharedState *>transport
    cdef SharedBucket *bucket = <SharedBucket *>job.context
    cdef uint32_t chunk
    cdef Sweep sweep
    cdef Advance status = ADVANCE_PENDING
    if not all_arrived(state, bucket):
        return ADVANCE_BLOCKED
    if helping and not bucket.swept:
        # This thread waits at the end of backward, which computes no more: see helpers.pyx.
        bucket.swept = True
        sweep.state, sweep.job, sweep.first, sweep.reduced = state, job, bucket.next_own, 0
        bucket.next_own = bucket.end_of_own
        share(
            sweep_chunk, &sweep, bucket.chunks,
            state.ranks * job.count * element_bytes(job.element),
        )
        if sweep.reduced:
            status = ADVANCE_SOME
    while bucket.next_own < bucket.end_of_own:
        chunk = bucket.next_own
        bucket.next_own += 1
        if take_chunk(bucket, chunk):
            reduce_chunk(state, job, chunk)
            status = ADVANCE_SOME
    if all_finished(bucket):
        return ADVANCE_DONE
    return status


def make_bell(node, size_t state):
    """Give the `SharedState` at this address its bell; return what keeps the memory alive.

    Collective over `node`.

    Raises:
        OSError: the ranks cannot share memory; raised on all ranks.
    """
    cdef Mapping first = shared_memory.allocate(node, sizeof(Bell))[0]
    (<SharedState *>state).bell = <Bell *>first.address
    return first


cdef class SharedTransport:
    """Means of gradients over the ranks of one node, in shared memory.

    Collective over `node`.

    Args:
        node: an mpi4py communicator whose ranks share memory, used by nothing else.
        chunk_bytes: what a rank takes at once, in bytes of one bucket, a multiple of 64.
        crowded: there are more ranks than cores; a waiting rank sleeps at once.
        wants_thread: there are cores to spare; the engine thread reduces as well.

    Raises:
        ValueError: `chunk_bytes` is no multiple of 64.
        OSError: the ranks cannot share memory; raised on all ranks.
    """

    def __init__(self, node, *, size_t chunk_bytes=1 << 16, bint crowded=False,
                 bint wants_thread=False):
        if chunk_bytes == 0 or chunk_bytes % CACHE_LINE:
            raise ValueError(
                f"chunk_bytes must be a multiple of {CACHE_LINE}, not {chunk_bytes}"
            )
        self.node = node
        self.bell = make_bell(node, <size_t>&self.state)
        self.state.ranks = node.Get_size()
        self.state.rank = node.Get_rank()
        self.state.chunk_bytes = chunk_bytes
        self.state.transport.announce = announce_to_node
        self.state.transport.advance = advance
        self.state.transport.take_ticket = take_ticket
        self.state.transport.sleep = sleep
        self.state.transport.crowded = crowded
        self.state.transport.wants_thread = wants_thread

    def allocate(self, sizes):
        """Return a `BucketMemory` for each of `sizes` in bytes.

        Collective.

        Raises:
            OSError: some rank has too little memory; raised on all ranks.
        """
        return self._allocate(sizes, None)

    def allocate_once(self, sizes, domain):
        """Return memory for each of `sizes` in bytes, see Note [Means that lie once].

        Collective. A `CommonMemory` each, if that can be.

        Args:
            sizes: of the buckets.
            domain: a number; ranks with the same one share each mean.

        Raises:
            OSError: some rank has too little memory; raised on all ranks.
        """
        # Where the kernel does not tell what a rank has written, nobody could scale means once.
        can_be = all(self.node.allgather(memory_files.knows_own_pages()))
        return self._allocate(sizes, domain if can_be else None)

    def _allocate(self, sizes, domain):
        buckets = SharedBuckets(
            self.node, sizes, self.state.chunk_bytes, has_owners=True, domain=domain)
        return buckets.memories(sizes, self.state.rank)

    def free(self):
        """Free the communicator. Collective."""
        self.node.Free()

    @property
    def address(self):
        """Where the engine finds the C ``Transport``."""
        return <size_t>&self.state.transport
