"""How a collective moves along in memory that the ranks of a group share.

Note [Rounds in memory]
~~~~~~~~~~~~~~~~~~~~~~~
Each rank has a region: a line with the number of the last round that it has begun, and two halves,
for rounds with an even and with an odd number. In a round a rank writes what it shows into its
half, then the round's number into its line, and reads the others' halves when their lines say so.
What is longer than a half takes several rounds. There is one number for all collectives of a group,
and a rank begins a round only after it has ended the one before, so:

* A line that says n also says that its rank reads nothing of round n - 1 or before any more. A rank
  may write its half for round n as soon as all lines say n - 1: nobody reads of n - 2 any more.
  That is the only rule; the root of a broadcast or a deal may so be a round ahead of the others.
* No counter is reset, and none is shared by writers. Numbers wrap around at 2^32; only differences
  are compared.

The store of a number releases what was written before, and the load that sees it acquires that:
what a rank reads of a half was written before, and what it has read, before its next store, is not
overwritten. That is all the order that there is, on x86 and on Arm.

Where a rank has another size for each other one (a trade, or of the root alone a deal), it says the
largest of them in the first round: so all know how many rounds there are.

All reduce in order of rank, so they have the same bits. What is short each rank reduces as a whole,
in one meeting. Of what is longer it reduces a slice, shows that in the next round, and takes the
others'. Nobody shows what only it reads itself.
"""

from libc.stdint cimport int32_t, uint32_t
from libc.string cimport memcpy

from mpiddp.engine.interface cimport (
    ADVANCE_BLOCKED, ADVANCE_DONE, ADVANCE_SOME, Advance, Job, Transport,
)
from mpiddp.mpi.combining cimport combine
from mpiddp.system.kernels cimport (
    ElementType, element_bytes, selected_kernels,
)
from mpiddp.system.posix cimport now, store
from mpiddp.transports.shared cimport load32, ring
from mpiddp.transports.shared_buckets cimport CACHE_LINE


cdef enum:
    # From how many bytes on each rank reduces a slice.
    SLICED_BYTES = 1 << 15

# Seconds to spin for ranks that are in the middle of the same collective.
cdef double SPIN = 30e-6


cdef inline char *region(MemoryState *state, uint32_t rank) noexcept nogil:
    return state.regions + <size_t>rank * REGION_BYTES


cdef Line *line(MemoryState *state, uint32_t rank) noexcept nogil:
    return <Line *>region(state, rank)


cdef char *half(MemoryState *state, uint32_t rank, uint32_t round) noexcept nogil:
    return region(state, rank) + HEAD_BYTES + (round & 1) * HALF_BYTES


cdef inline int reached(uint32_t round, uint32_t target) noexcept nogil:
    return <int32_t>(round - target) >= 0


cdef int has_begun(MemoryState *state, uint32_t rank, uint32_t round) noexcept nogil:
    return reached(load32(&line(state, rank).round), round)


cdef int all_have_begun(MemoryState *state, uint32_t round) noexcept nogil:
    cdef uint32_t rank
    if reached(state.reached, round):
        return 1
    for rank in range(state.ranks):
        if not has_begun(state, rank, round):
            return 0
    state.reached = round
    return 1


cdef void begin_round(MemoryState *state) noexcept nogil:
    """Show what was written into the half of the next round."""
    state.round += 1
    store(<int *>&line(state, state.rank).round, <int>state.round)
    ring(state.bell)


cdef inline size_t part_bytes(MemoryState *state) noexcept nogil:
    """How many bytes for each rank fit into a half."""
    return HALF_BYTES // state.ranks // CACHE_LINE * CACHE_LINE


cdef int has_own_sizes(MemoryJob *job) noexcept nogil:
    """Return whether parts have sizes of their own, which not all ranks know."""
    return job.kind == TRADE or job.kind == DEAL


cdef inline size_t traded_bytes(MemoryState *state) noexcept nogil:
    """The same for these, whose halves begin with a line of their own."""
    return (HALF_BYTES - CACHE_LINE) // state.ranks // CACHE_LINE * CACHE_LINE


cdef size_t bytes_of_round(MemoryState *state, MemoryJob *job) noexcept nogil:
    cdef size_t most = HALF_BYTES
    if job.kind == REDUCE_PARTS or job.kind == EXCHANGE:
        most = part_bytes(state)
    elif has_own_sizes(job):
        most = traded_bytes(state)
    return min(most, job.size - job.at)


cdef inline int is_sliced(MemoryJob *job, size_t size) noexcept nogil:
    return job.kind == REDUCE_ALL and size >= SLICED_BYTES


cdef size_t slice_bytes(MemoryState *state, size_t size) noexcept nogil:
    """How many bytes of a round each rank reduces, the last ones fewer."""
    return (size // state.ranks // CACHE_LINE + 1) * CACHE_LINE


cdef void offer(MemoryState *state, MemoryJob *job, char *place) noexcept nogil:
    """Show what other ranks get in a round of a trade or a deal."""
    cdef size_t part = traded_bytes(state)
    cdef uint32_t rank
    if job.at == 0:
        (<size_t *>place)[0] = job.size
    for rank in range(state.ranks):
        if rank != state.rank and job.sizes[rank] > job.at:
            memcpy(
                place + CACHE_LINE + rank * part, job.sources[rank] + job.at,
                min(part, job.sizes[rank] - job.at),
            )


cdef void keep_own(MemoryState *state, MemoryJob *job) noexcept nogil:
    """Copy what a rank has for itself in a trade or a deal."""
    cdef char *source = job.sources[state.rank]
    cdef char *target = job.targets[state.rank]
    if source != target and source != NULL and target != NULL:
        memcpy(target, source, job.sizes[state.rank])


cdef void receive(MemoryState *state, MemoryJob *job) noexcept nogil:
    """Take what other ranks offer in a round of a trade or a deal."""
    cdef size_t part = traded_bytes(state)
    cdef size_t *sizes = job.sizes + state.ranks
    cdef uint32_t rank
    if job.at == 0:
        keep_own(state, job)
    for rank in range(state.ranks):
        if job.kind == DEAL and rank != job.root:
            continue
        if job.at == 0:
            job.size = max(job.size, (<size_t *>half(state, rank, state.round))[0])
        if rank != state.rank and sizes[rank] > job.at:
            memcpy(
                job.targets[rank] + job.at,
                half(state, rank, state.round) + CACHE_LINE + state.rank * part,
                min(part, sizes[rank] - job.at),
            )


cdef void show_slices(
    MemoryState *state, char *place, const char *data, size_t size
) noexcept nogil:
    """Show the others the slices that they reduce."""
    cdef size_t each = slice_bytes(state, size)
    cdef size_t first
    cdef uint32_t rank
    for rank in range(state.ranks):
        first = min(each * rank, size)
        if rank != state.rank:
            memcpy(place + first, data + first, min(each, size - first))


cdef inline int shows_something(MemoryState *state, MemoryJob *job) noexcept nogil:
    if job.kind == SPREAD or job.kind == DEAL:
        return state.rank == job.root
    return job.kind != MEET


cdef void fill(MemoryState *state, MemoryJob *job, size_t size) noexcept nogil:
    cdef char *place = half(state, state.rank, state.round + 1)
    cdef size_t part = part_bytes(state)
    cdef uint32_t rank
    if has_own_sizes(job):
        if shows_something(state, job):
            offer(state, job, place)
        return
    if size == 0:
        return
    if job.kind == REDUCE_PARTS or job.kind == EXCHANGE:
        for rank in range(state.ranks):
            if rank != state.rank:
                memcpy(place + rank * part, job.sources[rank] + job.at, size)
    elif is_sliced(job, size):
        show_slices(state, place, job.source + job.at, size)
    elif job.kind != SPREAD or state.rank == job.root:
        memcpy(place, job.source + job.at, size)


cdef int may_take(MemoryState *state, MemoryJob *job) noexcept nogil:
    """Return whether what this rank takes in the round is there."""
    if job.kind == SPREAD or job.kind == DEAL:
        return state.rank == job.root or has_begun(state, job.root, state.round)
    if job.kind == REDUCE_TO_ROOT and state.rank != job.root:
        return 1
    return all_have_begun(state, state.round)


cdef void reduce(
    MemoryState *state, MemoryJob *job, char *out, const char *own, size_t offset, size_t size
) noexcept nogil:
    """Reduce what this rank has, and what the others show from an offset in their halves on.

    `out` may be `own`.
    """
    cdef char *parts[MOST_RANKS]
    cdef uint32_t rank
    for rank in range(state.ranks):
        parts[rank] = half(state, rank, state.round) + offset
    reduce_parts(state, job, out, parts, own, size)


cdef void reduce_parts(
    MemoryState *state, MemoryJob *job, char *out, char **parts, const char *own, size_t size
) noexcept nogil:
    """The same of what the others have in these parts; the own one may be written to."""
    cdef uint32_t rank
    if size == 0:
        return
    if job.way == 0:
        # The kernels read a block of all before they write it.
        parts[state.rank] = <char *>own
        selected_kernels().mean_to(
            job.element, out, parts, state.ranks, 0,
            size // element_bytes(<ElementType>job.element), job.job.divisor,
        )
        return
    memcpy(parts[state.rank], own, size)
    memcpy(out, parts[0], size)
    for rank in range(1, state.ranks):
        combine(job.way, parts[rank], out, size)


cdef int take(MemoryState *state, MemoryJob *job, size_t size) noexcept nogil:
    """Take what the others show; return whether the round was all for these bytes."""
    cdef size_t part = part_bytes(state)
    cdef size_t each, first
    cdef char *out
    cdef uint32_t rank
    if job.kind == REDUCE_ALL:
        if not is_sliced(job, size):
            reduce(state, job, job.target + job.at, job.source + job.at, 0, size)
            return 1
        each = slice_bytes(state, size)
        first = min(each * state.rank, size)
        each = min(each, size - first)
        out = job.target + job.at + first
        reduce(state, job, out, job.source + job.at + first, first, each)
        memcpy(half(state, state.rank, state.round + 1) + first, out, each)
        return 0
    if job.kind == REDUCE_TO_ROOT:
        if state.rank == job.root:
            reduce(state, job, job.target + job.at, job.source + job.at, 0, size)
    elif job.kind == REDUCE_PARTS:
        reduce(
            state, job, job.target + job.at, job.sources[state.rank] + job.at, state.rank * part,
            size,
        )
    elif job.kind == SPREAD:
        if state.rank != job.root:
            memcpy(job.target + job.at, half(state, job.root, state.round), size)
    elif job.kind == GATHER_ALL:
        for rank in range(state.ranks):
            if rank != state.rank:
                memcpy(job.targets[rank] + job.at, half(state, rank, state.round), size)
            elif job.targets[rank] != job.source:
                memcpy(job.targets[rank] + job.at, job.source + job.at, size)
    elif has_own_sizes(job):
        receive(state, job)
    elif job.kind == EXCHANGE:
        for rank in range(state.ranks):
            memcpy(
                job.targets[rank] + job.at,
                job.sources[rank] + job.at if rank == state.rank
                else half(state, rank, state.round) + state.rank * part,
                size,
            )
    return 1


cdef void collect(MemoryState *state, char *target, size_t size) noexcept nogil:
    """Take the slices that the others have reduced."""
    cdef size_t each = slice_bytes(state, size)
    cdef size_t first
    cdef uint32_t rank
    for rank in range(state.ranks):
        first = min(each * rank, size)
        if rank != state.rank:
            memcpy(
                target + first, half(state, rank, state.round) + first, min(each, size - first)
            )


cdef int is_due(MemoryState *state, MemoryJob *job) noexcept nogil:
    """Return whether the ranks that the next step waits for have come."""
    if job.phase == FILL:
        return not shows_something(state, job) or all_have_begun(state, state.round)
    return may_take(state, job)


cdef bint has_shown_all(MemoryState *state, MemoryJob *job) noexcept nogil:
    """Return whether nothing is left but to take what the others show, in the last round."""
    cdef size_t size = bytes_of_round(state, job)
    return (
        state.current == job and job.phase == TAKE and not has_own_sizes(job)
        and job.at + size == job.size and not is_sliced(job, size)
    )


cdef int comes_soon(MemoryState *state, MemoryJob *job) noexcept nogil:
    """Spin for other ranks, if these are at work as well; return whether they came."""
    cdef double until
    if job.at == 0 and job.phase == FILL or state.transport.crowded:
        return 0
    until = now() + SPIN
    while now() < until:
        if is_due(state, job):
            return 1
    return 0


cdef Advance advance(Transport *transport, Job *job_, int helping) noexcept nogil:
    """Move a collective along as far as the other ranks let it; collectives go in their order."""
    cdef MemoryState *state = <MemoryState *>transport
    cdef MemoryJob *job = <MemoryJob *>job_
    cdef Advance status = ADVANCE_BLOCKED
    cdef size_t size
    cdef int whole
    if state.given_up:
        return ADVANCE_DONE
    if state.current != NULL and state.current != job:
        return ADVANCE_BLOCKED
    state.current = job
    while True:
        if not is_due(state, job) and not comes_soon(state, job):
            return status
        status = ADVANCE_SOME
        size = bytes_of_round(state, job)
        if job.phase == FILL:
            fill(state, job, size)
            begin_round(state)
            job.phase = TAKE
            continue
        whole = True
        if job.phase == TAKE:
            whole = take(state, job, size)
        else:
            collect(state, job.target + job.at, size)
        if not whole:
            begin_round(state)
            job.phase = COLLECT
            continue
        if has_own_sizes(job):
            size = bytes_of_round(state, job)   # others may have more
        job.at += size
        job.phase = FILL
        if job.at == job.size:
            state.current = NULL
            return ADVANCE_DONE
