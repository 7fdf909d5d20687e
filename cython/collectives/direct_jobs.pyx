"""Long collectives of a node's ranks, which read each other's memory instead of showing it.

Note [Reading each other's memory]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
In halves each byte is copied twice: into a half by one rank, and out of it by another. Linux lets
processes of one user copy out of each other's memory (process_vm_readv, see man 2), unless a
security module or a container forbids it, which the ranks of a node try when they start. A call of
the kernel costs a microsecond and looks up each page, so what is short still goes in halves; on
some machines all does, see Note [Measured ways].

The rounds are those of Note [Rounds in memory]:

* In the first one a rank's half says where its tensors are. Whoever needs them reads them there,
  in pieces that fit the cache where they are reduced.
* An all-reduce has one round more: when all have read, each rank has its slice of the result in
  place, and the others read it there.
* In the last one a rank says that it has read all. Who was read from waits for that of the others:
  then its tensors are its own again. Nothing is shown, so nobody waits for it longer than that.

In a deal nobody is waited for but the root, which waits until all have read. Both see from the
largest part whether anything is read; what is short is in the root's half.

In a broadcast there is work for one more. A rank takes up one piece after the other, and the root
takes up pieces of those that have come, too, and writes them into their memory. Who comes late is
not waited for: each rank could read all by itself. The root also gets a sum so, from all ranks.

A rank that gives up (its time is over) gives its tensors back to its program. It first says that it
has left, and then waits while anybody writes. Who writes says so before it looks whether the other
has left. There is a full fence between the two steps on both sides, so one sees the other. Who has
read looks afterwards whether the other had left, and then goes no further.

A rank that is gone ends nothing: the others wait, and the watch names it.
"""

from libc.errno cimport ESRCH
from libc.stdint cimport uint32_t
from libc.string cimport memcpy

from mpiddp.collectives.memory_jobs cimport (
    CLOSE, COLLECT, DEAL, EXCHANGE, FILL, GATHER_ALL, HALF_BYTES, MEET, MOST_RANKS, REDUCE_ALL,
    REDUCE_PARTS, REDUCE_TO_ROOT, SPIN, SPREAD, TAKE, all_have_begun, begin_round, half,
    has_begun, has_own_sizes, keep_own, line, reduce_parts, slice_bytes,
)
from mpiddp.collectives.memory_jobs cimport advance as advance_in_halves
from mpiddp.engine.interface cimport ADVANCE_BLOCKED, ADVANCE_DONE, ADVANCE_SOME
from mpiddp.system.posix cimport getpid, load, now, store
from mpiddp.transports.shared cimport add32, load32, ring
from mpiddp.transports.shared_buckets cimport CACHE_LINE


cdef extern from *:
    """
    #include <errno.h>
    #include <sched.h>
    #include <sys/types.h>
    #include <sys/uio.h>

    typedef ssize_t (*mpiddp_copying)(
        pid_t, const struct iovec *, unsigned long, const struct iovec *, unsigned long,
        unsigned long);

    /* One call moves at most 2 GiB, and less where it meets the end of what is mapped. */
    static inline int mpiddp_copy_memory(
        mpiddp_copying copy, int process, char *theirs, char *ours, size_t size)
    {
        while (size > 0) {
            struct iovec here = {ours, size}, there = {theirs, size};
            ssize_t moved = copy(process, &here, 1, &there, 1, 0);
            if (moved <= 0) return moved < 0 ? errno : EFAULT;
            ours += moved, theirs += moved, size -= (size_t)moved;
        }
        return 0;
    }
    static inline int mpiddp_read_memory(int process, const char *theirs, char *ours, size_t size)
    { return mpiddp_copy_memory(process_vm_readv, process, (char *)theirs, ours, size); }
    static inline int mpiddp_write_memory(int process, char *theirs, const char *ours, size_t size)
    { return mpiddp_copy_memory(process_vm_writev, process, theirs, (char *)ours, size); }
    static inline void mpiddp_fence(void) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
    """
    int read_process "mpiddp_read_memory"(int, const char *, char *, size_t) noexcept nogil
    int write_process "mpiddp_write_memory"(int, char *, const char *, size_t) noexcept nogil
    void full_fence "mpiddp_fence"() noexcept nogil

cdef enum:
    # What is read of one rank at a time before it is reduced.
    REDUCED_BYTES = 1 << 16
    # What is copied between two looks whether the group is still there, and what a rank of a
    # broadcast takes up at a time.
    COPIED_BYTES = 1 << 18
    CLAIMED_BYTES = 1 << 17

# What is moved from so many bytes on is never read directly.
cdef size_t NEVER = <size_t>-1 // 2

# Seconds to wait for a rank that may be writing, and may be gone.
cdef double LAST_WRITE = 1.0


cdef struct Shown:
    # At the beginning of a half. Of collectives with parts an address of each rank's part follows.
    char *source
    char *target
    size_t largest          # of a trade or a deal: the most bytes that the rank has for another
    int process
    char padding[CACHE_LINE - 28]


cdef int read_memory(int process, const char *theirs, char *ours, size_t size) noexcept nogil:
    return read_process(process, theirs, ours, size)


cdef inline Shown *shown(MemoryState *state, MemoryJob *job, uint32_t rank) noexcept nogil:
    return <Shown *>half(state, rank, job.shown)


cdef inline char **addresses(Shown *of) noexcept nogil:
    return <char **>(<char *>of + sizeof(Shown))


cdef inline size_t rows_bytes(MemoryState *state) noexcept nogil:
    """What a half of a trade or a deal begins with."""
    return (
        sizeof(Shown) + (state.ranks * sizeof(char *) + CACHE_LINE - 1) // CACHE_LINE * CACHE_LINE
    )


cdef inline size_t traded_bytes(MemoryState *state) noexcept nogil:
    """How many bytes for each rank a half has room for. What is longer is read where it is."""
    return (HALF_BYTES - rows_bytes(state)) // state.ranks // CACHE_LINE * CACHE_LINE


cdef bint goes_directly(MemoryState *state, MemoryJob *job) noexcept nogil:
    """Whether the ranks read each other's memory: the same on all ranks."""
    cdef size_t size = job.size
    cdef size_t least = state.moves_from
    if least == 0 or job.kind == MEET:
        return False
    if has_own_sizes(job):
        return least < NEVER
    if job.kind == REDUCE_ALL:
        least = state.all_reduces_from
    elif job.kind == REDUCE_PARTS or job.kind == REDUCE_TO_ROOT:
        least = state.sums_from
    if job.kind == REDUCE_PARTS or job.kind == EXCHANGE or job.kind == GATHER_ALL:
        size *= state.ranks
    return size >= least


cdef void leave(MemoryState *state) noexcept nogil:
    cdef double until = now() + LAST_WRITE
    cdef uint32_t rank
    store(&line(state, state.rank).left, True)
    full_fence()
    for rank in range(state.ranks):
        while rank != state.rank and load(&line(state, rank).writes) and now() < until:
            pass


cdef int read_from(
    MemoryState *state, MemoryJob *job, uint32_t rank, const char *theirs, char *ours, size_t size
) noexcept nogil:
    """Read another rank's memory; return whether it still belonged to the collective."""
    cdef size_t at = 0
    cdef size_t piece
    cdef int failure
    while at < size:
        if state.given_up:
            return 0
        piece = min(COPIED_BYTES, size - at)
        failure = read_process(shown(state, job, rank).process, theirs + at, ours + at, piece)
        if failure == ESRCH:
            return 0
        if failure:
            job.failure = failure
        at += piece
    return not load(&line(state, rank).left)


cdef int write_to(
    MemoryState *state, MemoryJob *job, uint32_t rank, char *theirs, const char *ours, size_t size
) noexcept nogil:
    """Write into another rank's memory, if it has not given up; return whether it has not."""
    cdef int *writes = &line(state, state.rank).writes
    cdef int failure = ESRCH
    store(writes, True)
    full_fence()
    if not load(&line(state, rank).left) and not state.given_up:
        failure = write_process(shown(state, job, rank).process, theirs, ours, size)
    store(writes, False)
    if failure and failure != ESRCH:
        job.failure = failure
    return failure != ESRCH


cdef void say_where(MemoryState *state, MemoryJob *job) noexcept nogil:
    """Write into the half of the next round where this rank's tensors are."""
    cdef Shown *own
    cdef size_t part = traded_bytes(state)
    cdef uint32_t rank
    job.shown = state.round + 1
    if job.kind == DEAL and state.rank != job.root:
        return
    own = shown(state, job, state.rank)
    own.source, own.target, own.process = job.source, job.target, getpid()
    if has_own_sizes(job):
        own.largest = job.size
        for rank in range(state.ranks):
            addresses(own)[rank] = job.sources[rank]
            if rank != state.rank and job.sizes[rank] <= part:
                memcpy(
                    <char *>own + rows_bytes(state) + rank * part, job.sources[rank],
                    job.sizes[rank],
                )
    elif job.sources != NULL:
        for rank in range(state.ranks):
            addresses(own)[rank] = job.sources[rank]
    if job.kind == SPREAD:
        job.claims = 0
        line(state, state.rank).claimed = line(state, state.rank).pushed = 0


cdef inline uint32_t pieces_of(MemoryJob *job) noexcept nogil:
    return <uint32_t>((job.size + CLAIMED_BYTES - 1) // CLAIMED_BYTES)


cdef inline size_t length_of(MemoryJob *job, uint32_t piece) noexcept nogil:
    return min(CLAIMED_BYTES, job.size - <size_t>piece * CLAIMED_BYTES)


cdef int read_root(MemoryState *state, MemoryJob *job) noexcept nogil:
    """Read what nobody has taken up of what this rank gets."""
    cdef uint32_t *claimed = &line(state, state.rank).claimed
    cdef uint32_t piece = add32(claimed, 1) - 1
    while piece < pieces_of(job):
        if not read_from(
            state, job, job.root,
            shown(state, job, job.root).source + <size_t>piece * CLAIMED_BYTES,
            job.target + <size_t>piece * CLAIMED_BYTES, length_of(job, piece),
        ):
            return 0
        job.claims += 1
        piece = add32(claimed, 1) - 1
    return 1


cdef int help_others(MemoryState *state, MemoryJob *job) noexcept nogil:
    """Write to the others what they have not taken up yet."""
    cdef uint32_t rank, piece
    cdef int more = True
    while more:
        more = False
        for rank in range(state.ranks):
            if rank == state.rank or load32(&line(state, rank).claimed) >= pieces_of(job):
                continue
            piece = add32(&line(state, rank).claimed, 1) - 1
            if piece >= pieces_of(job):
                continue
            if not write_to(
                state, job, rank,
                shown(state, job, rank).target + <size_t>piece * CLAIMED_BYTES,
                job.source + <size_t>piece * CLAIMED_BYTES, length_of(job, piece),
            ):
                return 0
            add32(&line(state, rank).pushed, 1)
            ring(state.bell)
            more = True
    return 1


cdef inline int has_all_pieces(MemoryState *state, MemoryJob *job) noexcept nogil:
    return job.claims + load32(&line(state, state.rank).pushed) == pieces_of(job)


cdef int reduce_directly(
    MemoryState *state, MemoryJob *job, char *out, uint32_t root, const char *own, size_t first,
    size_t size,
) noexcept nogil:
    """Reduce what the ranks have at an offset.

    Args:
        out: where the result goes; of another rank's memory, if that is the root.
        root: whose memory it is.
        own: where this rank has it.
        first: the offset in what the others have.
        size: bytes.
    """
    cdef char *scratch = half(state, state.rank, job.shown + 1)     # nobody reads it now
    cdef size_t each = min(
        REDUCED_BYTES, HALF_BYTES // (state.ranks + 1) // CACHE_LINE * CACHE_LINE)
    cdef char *parts[MOST_RANKS]
    cdef char *result
    cdef const char *theirs
    cdef size_t at = 0
    cdef size_t length
    cdef uint32_t turn, rank
    while at < size:
        length = min(each, size - at)
        for turn in range(state.ranks):
            rank = (state.rank + turn) % state.ranks
            parts[rank] = scratch + rank * each
            if rank == state.rank:
                continue
            theirs = shown(state, job, rank).source
            if job.kind == REDUCE_PARTS:
                theirs = addresses(shown(state, job, rank))[state.rank]
            if not read_from(state, job, rank, theirs + first + at, parts[rank], length):
                return 0
        result = out + at if root == state.rank else scratch + state.ranks * each
        reduce_parts(state, job, result, parts, own + at, length)
        if root != state.rank and not write_to(state, job, root, out + at, result, length):
            return 0
        at += length
    return 1


cdef inline size_t first_of(MemoryState *state, MemoryJob *job, uint32_t rank) noexcept nogil:
    return min(slice_bytes(state, job.size) * rank, job.size)


cdef inline size_t slice_of(MemoryState *state, MemoryJob *job, uint32_t rank) noexcept nogil:
    return min(slice_bytes(state, job.size), job.size - first_of(state, job, rank))


cdef int receive(MemoryState *state, MemoryJob *job) noexcept nogil:
    """Take what other ranks trade, or the root deals out."""
    cdef size_t *sizes = job.sizes + state.ranks
    cdef size_t part = traded_bytes(state)
    cdef uint32_t turn, rank
    cdef Shown *theirs
    keep_own(state, job)
    for turn in range(state.ranks):
        rank = (state.rank + turn) % state.ranks
        if job.kind == DEAL and rank != job.root:
            continue
        theirs = shown(state, job, rank)
        job.size = max(job.size, theirs.largest)
        if rank == state.rank:
            continue
        if sizes[rank] <= part:
            memcpy(
                job.targets[rank], <char *>theirs + rows_bytes(state) + state.rank * part,
                sizes[rank],
            )
        elif not read_from(
            state, job, rank, addresses(theirs)[state.rank], job.targets[rank], sizes[rank]
        ):
            return 0
    return 1


cdef int take(MemoryState *state, MemoryJob *job) noexcept nogil:
    """Read what this rank needs; return whether all was still there."""
    cdef size_t first = first_of(state, job, state.rank)
    cdef size_t size = slice_of(state, job, state.rank)
    cdef uint32_t turn, rank
    cdef char *theirs
    if job.kind == REDUCE_ALL:
        return reduce_directly(
            state, job, job.target + first, state.rank, job.source + first, first, size)
    if job.kind == REDUCE_TO_ROOT:
        return reduce_directly(
            state, job, shown(state, job, job.root).target + first, job.root, job.source + first,
            first, size,
        )
    if job.kind == REDUCE_PARTS:
        return reduce_directly(
            state, job, job.target, state.rank, job.sources[state.rank], 0, job.size)
    if job.kind == SPREAD:
        return (
            help_others(state, job) if state.rank == job.root else read_root(state, job)
        )
    if has_own_sizes(job):
        return receive(state, job)
    for turn in range(state.ranks):
        rank = (state.rank + turn) % state.ranks
        theirs = shown(state, job, rank).source
        if job.kind == EXCHANGE:
            theirs = addresses(shown(state, job, rank))[state.rank]
        if rank != state.rank:
            if not read_from(state, job, rank, theirs, job.targets[rank], job.size):
                return 0
        elif job.targets[rank] != theirs:
            memcpy(job.targets[rank], theirs, job.size)
    return 1


cdef int collect(MemoryState *state, MemoryJob *job) noexcept nogil:
    """Read the slices that the others have reduced."""
    cdef uint32_t turn, rank
    cdef size_t first
    for turn in range(1, state.ranks):
        rank = (state.rank + turn) % state.ranks
        first = first_of(state, job, rank)
        if not read_from(
            state, job, rank, shown(state, job, rank).target + first, job.target + first,
            slice_of(state, job, rank),
        ):
            return 0
    return 1


cdef inline int only_reads(MemoryState *state, MemoryJob *job) noexcept nogil:
    """Return whether nobody reads this rank's memory."""
    return job.kind == SPREAD and state.rank != job.root


cdef inline int is_all_shown(MemoryState *state, MemoryJob *job) noexcept nogil:
    """Return whether all fits into the halves, so that nobody reads anything else."""
    return has_own_sizes(job) and job.size <= traded_bytes(state)


cdef int deal_is_due(MemoryState *state, MemoryJob *job) noexcept nogil:
    """Return whether those have come that the next step of a deal waits for."""
    if state.rank == job.root:
        if job.phase == TAKE or job.phase == CLOSE and is_all_shown(state, job):
            return 1
        return all_have_begun(state, state.round)
    return job.phase != TAKE or has_begun(state, job.root, state.round)


cdef int is_due(MemoryState *state, MemoryJob *job) noexcept nogil:
    """Return whether the ranks that the next step waits for have come."""
    if job.kind == DEAL:
        return deal_is_due(state, job)
    if only_reads(state, job):
        if job.phase == TAKE:
            return has_begun(state, job.root, state.round)
        if job.phase == COLLECT:
            return has_all_pieces(state, job)
        if job.phase == CLOSE:
            return 1
    return all_have_begun(state, state.round)


cdef int comes_soon(MemoryState *state, MemoryJob *job) noexcept nogil:
    """Spin for other ranks, if these are at work as well; return whether they came."""
    cdef double until
    if job.phase == FILL or state.transport.crowded:
        return 0
    until = now() + SPIN
    while now() < until:
        if is_due(state, job):
            return 1
    return 0


cdef int step(MemoryState *state, MemoryJob *job) noexcept nogil:
    """Do what is due; return whether it could be done."""
    if job.phase == FILL:
        say_where(state, job)
        begin_round(state)
        job.phase = TAKE
    elif job.phase == TAKE:
        if not take(state, job):
            return 0
        if only_reads(state, job):
            job.phase = COLLECT
            return 1
        job.phase = COLLECT if job.kind == REDUCE_ALL else CLOSE
        if not is_all_shown(state, job):
            begin_round(state)
    elif job.phase == COLLECT:
        if not only_reads(state, job) and not collect(state, job):
            return 0
        begin_round(state)
        job.phase = CLOSE
    return 1


cdef Advance advance(Transport *transport, Job *job_, int helping) noexcept nogil:
    """Move a collective along as far as the other ranks let it; collectives go in their order."""
    cdef MemoryState *state = <MemoryState *>transport
    cdef MemoryJob *job = <MemoryJob *>job_
    cdef Advance status = ADVANCE_BLOCKED
    if not goes_directly(state, job):
        return advance_in_halves(transport, job_, helping)
    if state.given_up:
        return ADVANCE_DONE
    if state.current != NULL and state.current != job:
        return ADVANCE_BLOCKED
    state.current = job
    while is_due(state, job) or comes_soon(state, job):
        if job.phase == CLOSE:
            state.current = NULL
            return ADVANCE_DONE
        if not step(state, job):
            return ADVANCE_BLOCKED
        status = ADVANCE_SOME
    return status
