"""How a collective moves along in lanes: in the memory of each node, and between the nodes.

Note [Lanes of a group]
~~~~~~~~~~~~~~~~~~~~~~~
As with gradients (transports/lanes.pyx), rank l of each node drives lane l, so that all ranks of a
node keep the network busy, and each byte crosses it once per node:

* all_reduce: each rank adds its slice of what the node's ranks show, the lanes sum the slices over
  the nodes, and the node's ranks take all slices from each other. The wire is that of gradients.
* reduce_scatter: each rank adds the node's parts for its lane, sends each node its part, and adds
  what comes from them in order of the nodes.
* all_gather: each lane gathers its ranks' parts, and the node's ranks take them from each other.
* broadcast: the ranks of the root's node take it from the root, each lane sends its slice, and the
  ranks of the other nodes take all slices from each other.

A long collective is cut into pieces. Streams take them in turn, each in memory of its own, so that
one piece travels while another is added. All pieces travel in their order: MPI wants collectives
begun in one order on all ranks of a lane. How the ranks of a node meet says Note [Rounds in
memory]; a stream has one row of rounds. MPI writes to memory that nobody else has: what was given
up may still arrive, while the node's memory belongs to another group.

Sums are made in order of rank within a node, and then of nodes: all ranks get the same bits.
"""

from libc.stdint cimport uint32_t
from libc.string cimport memcpy

from mpiddp.collectives.memory_jobs cimport (
    GATHER_ALL, HALF_BYTES, MOST_RANKS, REDUCE_ALL, REDUCE_PARTS, SPREAD, all_have_begun,
    begin_round, collect, half, has_begun, reduce, show_slices, slice_bytes,
)
from mpiddp.engine.interface cimport (
    ADVANCE_BLOCKED, ADVANCE_DONE, ADVANCE_FAILED, ADVANCE_PENDING, ADVANCE_SOME, CHUNK_FINISHED,
    CHUNK_WAITS, ChunkProgress,
)
from mpiddp.mpi.calls cimport MPI_SUCCESS, mpi
from mpiddp.system.kernels cimport ElementType, element_bytes, selected_kernels
from mpiddp.transports.shared cimport ring
from mpiddp.transports.shared_buckets cimport CACHE_LINE
from mpiddp.transports.wire cimport start_chunk, test_chunk


cdef size_t bytes_of_piece(LaneState *state, MemoryJob *job) noexcept nogil:
    """How many bytes a piece has: of a rank's part, where each has one."""
    if job.kind == GATHER_ALL:
        return HALF_BYTES // state.nodes // CACHE_LINE * CACHE_LINE
    if job.kind == REDUCE_PARTS:
        return HALF_BYTES // (state.nodes * state.ranks) // CACHE_LINE * CACHE_LINE
    return HALF_BYTES


cdef inline uint32_t place_of(LaneState *state, uint32_t node, uint32_t rank) noexcept nogil:
    return state.places[node * state.ranks + rank]


cdef inline size_t first_of(Stream *stream, uint32_t rank) noexcept nogil:
    """Where a rank's slice of the piece begins."""
    return min(slice_bytes(&stream.memory, stream.size) * rank, stream.size)


cdef inline size_t length_of(Stream *stream, uint32_t rank) noexcept nogil:
    return min(
        slice_bytes(&stream.memory, stream.size), stream.size - first_of(stream, rank)
    )


cdef inline uint32_t node_of(LaneState *state, uint32_t place) noexcept nogil:
    """Return the node of a rank of the group."""
    cdef uint32_t index = 0
    while state.places[index] != place:
        index += 1
    return index // state.ranks


cdef inline int is_at_root(LaneState *state, MemoryJob *job) noexcept nogil:
    return node_of(state, job.root) == state.node


cdef void show_piece(LaneState *state, Stream *stream, MemoryJob *job) noexcept nogil:
    """Show the others of the node what they reduce, or the root's piece."""
    cdef MemoryState *memory = &stream.memory
    cdef char *place = half(memory, memory.rank, memory.round + 1)
    cdef uint32_t rank, node
    if job.kind == REDUCE_ALL:
        show_slices(memory, place, job.source + stream.at, stream.size)
    elif job.kind == REDUCE_PARTS:
        for rank in range(state.ranks):
            if rank == state.rank:
                continue
            for node in range(state.nodes):
                memcpy(
                    place + (rank * state.nodes + node) * stream.size,
                    job.sources[place_of(state, node, rank)] + stream.at, stream.size,
                )
    elif place_of(state, state.node, state.rank) == job.root:
        memcpy(place, job.source + stream.at, stream.size)
    begin_round(memory)


cdef int has_been_shown(LaneState *state, Stream *stream, MemoryJob *job) noexcept nogil:
    cdef MemoryState *memory = &stream.memory
    cdef uint32_t rank
    if job.kind != SPREAD:
        return all_have_begun(memory, memory.round)
    for rank in range(state.ranks):
        if place_of(state, state.node, rank) == job.root:
            return rank == state.rank or has_begun(memory, rank, memory.round)
    return 1


cdef void reduce_piece(LaneState *state, Stream *stream, MemoryJob *job) noexcept nogil:
    """Reduce what the ranks of the node show, or take what the root does."""
    cdef MemoryState *memory = &stream.memory
    cdef size_t first = first_of(stream, state.rank)
    cdef uint32_t rank, node
    if job.kind == REDUCE_ALL:
        stream.slice = job.target + stream.at + first
        reduce(
            memory, job, stream.slice, job.source + stream.at + first, first,
            length_of(stream, state.rank),
        )
    elif job.kind == REDUCE_PARTS:
        for node in range(state.nodes):
            reduce(
                memory, job, stream.room + node * stream.size,
                job.sources[place_of(state, node, state.rank)] + stream.at,
                (state.rank * state.nodes + node) * stream.size, stream.size,
            )
    else:
        stream.slice = job.target + stream.at + first
        for rank in range(state.ranks):
            if place_of(state, state.node, rank) == job.root and rank != state.rank:
                memcpy(job.target + stream.at, half(memory, rank, memory.round), stream.size)


cdef int depart(LaneState *state, Stream *stream, size_t number, MemoryJob *job) noexcept nogil:
    """Send a piece to the other nodes; return an MPI error code."""
    cdef int size = <int>stream.size
    cdef int slice_ = <int>length_of(stream, state.rank)
    state.turn += 1
    stream.step = TRAVELS
    stream.request = mpi.request_null
    if job.kind == REDUCE_PARTS:
        state.transport.call = "MPI_Ialltoall"
        return mpi.ialltoall(
            stream.room, size, mpi.byte, stream.other_room, size, mpi.byte, state.moves,
            &stream.request,
        )
    if job.kind == GATHER_ALL:
        state.transport.call = "MPI_Iallgather"
        return mpi.iallgather(
            job.source + stream.at, size, mpi.byte, stream.room, size, mpi.byte, state.moves,
            &stream.request,
        )
    if slice_ == 0:             # on all nodes
        return MPI_SUCCESS
    if job.kind == SPREAD:
        if not is_at_root(state, job):
            stream.slice = stream.room
        state.transport.call = "MPI_Ibcast"
        return mpi.ibcast(
            stream.slice, slice_, mpi.byte, <int>node_of(state, job.root), state.moves,
            &stream.request,
        )
    stream.sum.element = <ElementType>job.element
    stream.sum.divisor = 1
    return start_chunk(
        state.wire, number, &stream.sum, &stream.slice, 1, 0,
        slice_ // element_bytes(stream.sum.element),
    )


cdef int has_arrived(
    LaneState *state, Stream *stream, size_t number, MemoryJob *job, ChunkProgress *progress
) noexcept nogil:
    """See how far a piece has come; return an MPI error code."""
    cdef int arrived = 0, code
    if job.kind == REDUCE_ALL and length_of(stream, state.rank):
        return test_chunk(state.wire, number, progress)
    progress[0] = CHUNK_WAITS
    state.transport.call = "MPI_Test"
    code = mpi.test(&stream.request, &arrived, NULL)
    if arrived:
        progress[0] = CHUNK_FINISHED
    return code


cdef int unpack(LaneState *state, Stream *stream, MemoryJob *job) noexcept nogil:
    """Use what has arrived; return whether the piece is complete, or the others need it, too."""
    cdef MemoryState *memory = &stream.memory
    cdef char *place = half(memory, memory.rank, memory.round + 1)
    cdef char *parts[MOST_RANKS]
    cdef uint32_t node
    if job.kind == REDUCE_PARTS:
        for node in range(state.nodes):
            parts[node] = stream.other_room + node * stream.size
        selected_kernels().mean_to(
            job.element, job.target + stream.at, parts, state.nodes, 0,
            stream.size // element_bytes(<ElementType>job.element), 1,
        )
        return 1
    if job.kind == SPREAD and is_at_root(state, job):
        return 1
    if job.kind == GATHER_ALL:
        memcpy(place, stream.room, state.nodes * stream.size)
    else:
        memcpy(place + first_of(stream, state.rank), stream.slice, length_of(stream, state.rank))
    begin_round(memory)
    return 0


cdef void take_home(LaneState *state, Stream *stream, MemoryJob *job) noexcept nogil:
    """Take what the others of the node have received."""
    cdef MemoryState *memory = &stream.memory
    cdef size_t first = first_of(stream, state.rank)
    cdef char *received
    cdef char *target
    cdef uint32_t rank, node
    if job.kind != GATHER_ALL:
        collect(memory, job.target + stream.at, stream.size)
        if job.kind == SPREAD:
            memcpy(job.target + stream.at + first, stream.slice, length_of(stream, state.rank))
        return
    for rank in range(state.ranks):
        received = stream.room if rank == state.rank else half(memory, rank, memory.round)
        for node in range(state.nodes):
            target = job.targets[place_of(state, node, rank)]
            if target != job.source:
                memcpy(target + stream.at, received + node * stream.size, stream.size)


cdef int move(LaneState *state, size_t number, MemoryJob *job) noexcept nogil:
    """Move a stream's piece one step on; return whether it moved, or -1 if MPI has failed."""
    cdef Stream *stream = &state.streams[number]
    cdef MemoryState *memory = &stream.memory
    cdef ChunkProgress progress
    if stream.step == BEGINS:
        stream.at = stream.piece * bytes_of_piece(state, job)
        if stream.at >= job.size or not all_have_begun(memory, memory.round):
            return 0
        stream.size = min(bytes_of_piece(state, job), job.size - stream.at)
        if job.kind == GATHER_ALL or (job.kind == SPREAD and not is_at_root(state, job)):
            stream.step = WAITS_FOR_TURN
        else:
            show_piece(state, stream, job)
            stream.step = IS_SHOWN
        return 1
    if stream.step == IS_SHOWN:
        if not has_been_shown(state, stream, job):
            return 0
        reduce_piece(state, stream, job)
        stream.step = WAITS_FOR_TURN
        return 1
    if stream.step == WAITS_FOR_TURN:
        if state.turn != stream.piece:
            return 0
        state.transport.code = depart(state, stream, number, job)
        return 1 if state.transport.code == MPI_SUCCESS else -1
    if stream.step == TRAVELS:
        state.transport.code = has_arrived(state, stream, number, job, &progress)
        if state.transport.code != MPI_SUCCESS:
            return -1
        if progress != CHUNK_FINISHED:
            return progress != CHUNK_WAITS
        if not unpack(state, stream, job):
            stream.step = COMES_HOME
            return 1
    elif not all_have_begun(memory, memory.round):
        return 0
    else:
        take_home(state, stream, job)
    job.at += stream.size
    stream.piece += STREAMS
    stream.step = BEGINS
    return 1


cdef Advance advance(Transport *transport, Job *job_, int helping) noexcept nogil:
    """Move a collective along as far as the other ranks let it; collectives go in their order."""
    cdef LaneState *state = <LaneState *>transport
    cdef MemoryJob *job = <MemoryJob *>job_
    cdef Advance status = ADVANCE_PENDING
    cdef size_t number
    cdef int moved = 1, result
    if state.given_up:
        return ADVANCE_DONE
    if state.current != NULL and state.current != job:
        return ADVANCE_BLOCKED
    if state.current == NULL:
        state.current = job
        state.turn = 0
        for number in range(STREAMS):
            state.streams[number].piece = number
    while moved:
        moved = 0
        for number in range(STREAMS):
            result = move(state, number, job)
            if result < 0:
                return ADVANCE_FAILED
            moved |= result
        if moved:
            status = ADVANCE_SOME
    if job.at == job.size:
        state.current = NULL
        # The caller may sleep while another thread of this rank has moved it.
        ring(state.streams[0].memory.bell)
        return ADVANCE_DONE
    return status
