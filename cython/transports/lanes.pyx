"""The transport between nodes: shared memory within each, a wire between.

Each node has as many lanes as the smallest node has ranks, and rank l of a node drives lane
l: for every chunk of its lane it adds the chunks of the node's ranks, starts the all-reduce
with rank l of the other nodes, and writes the mean to all ranks of its node. So all ranks of
a node keep the network busy, each byte crosses it once per node, and the sum in the node, the
wire and the writing of different chunks overlap.

Note [Chunks and windows]
~~~~~~~~~~~~~~~~~~~~~~~~~
A whole bucket in one Iallreduce, or all chunks at once, use one direction of the link at a
time (measured: twice the wire's time on Open MPI over TCP). With a few chunks of 256 KB
to 1 MB in flight per lane, both directions stay full.
Chunks start in order of bucket and chunk on every rank of a lane, so that they match.
The first chunk of bucket k belongs to lane k modulo the number of lanes: many small buckets
are spread over all lanes, too.
"""

from libc.stdint cimport uint32_t

from mpiddp.engine.interface cimport (
    ADVANCE_BLOCKED, ADVANCE_DONE, ADVANCE_FAILED, ADVANCE_PENDING, ADVANCE_SOME, CHUNK_FINISHED,
    CHUNK_WAITS, Advance, ChunkProgress, Job, Transport, chunk_of, longest_chunk,
)
from mpiddp.mpi.calls cimport MPI_SUCCESS
from mpiddp.system.kernels cimport element_bytes
from mpiddp.transports cimport wire
from mpiddp.transports.shared cimport (
    all_arrived, all_finished, announce, finish_chunk, sleep, take_ticket,
)
from mpiddp.transports.shared_buckets cimport SharedBucket
from mpiddp.mpi.communicators import note
from mpiddp.transports.shared import make_bell
from mpiddp.transports.shared_buckets import SharedBuckets
from mpiddp.transports.wire import Wire


cdef size_t first_element(LaneState *state, Job *job, size_t chunk) noexcept nogil:
    return chunk * (state.shared.chunk_bytes // element_bytes(job.element))


cdef size_t elements_of(LaneState *state, Job *job, size_t chunk) noexcept nogil:
    cdef size_t first = first_element(state, job, chunk)
    return chunk_of(job.count - first, state.shared.chunk_bytes // element_bytes(job.element))


cdef void announce_to_lane(Transport *transport, Job *job) noexcept nogil:
    cdef LaneState *state = <LaneState *>transport
    cdef SharedBucket *bucket = <SharedBucket *>job.context
    cdef size_t lanes = state.lanes
    # This rank's chunks are every `lanes`-th from here on.
    bucket.next_own = bucket.chunks
    if state.shared.rank < lanes:
        bucket.next_own = <uint32_t>((state.shared.rank + lanes - bucket.index % lanes) % lanes)
    announce(transport, job)


cdef int start_chunk(LaneState *state, size_t slot, Job *job, size_t chunk) noexcept nogil:
    cdef SharedBucket *bucket = <SharedBucket *>job.context
    state.jobs[slot] = job
    state.in_flight += 1
    return wire.start_chunk(
        state.wire, slot, job, bucket.buffers, state.shared.ranks,
        first_element(state, job, chunk), elements_of(state, job, chunk),
    )


cdef int poll(Transport *transport, int *advanced) noexcept nogil:
    """Write the means of the chunks that have arrived."""
    cdef LaneState *state = <LaneState *>transport
    cdef Job *job
    cdef size_t slot
    cdef int code
    cdef ChunkProgress progress = CHUNK_WAITS
    if not state.in_flight:
        return MPI_SUCCESS
    for slot in range(state.window):
        job = state.jobs[slot]
        if job == NULL:
            continue
        code = wire.test_chunk(state.wire, slot, &progress)
        if code != MPI_SUCCESS:
            return code
        advanced[0] += progress != CHUNK_WAITS
        if progress == CHUNK_FINISHED:
            state.jobs[slot] = NULL
            state.in_flight -= 1
            finish_chunk(&state.shared, <SharedBucket *>job.context)
    return MPI_SUCCESS


cdef Advance advance(Transport *transport, Job *job, int helping) noexcept nogil:
    cdef LaneState *state = <LaneState *>transport
    cdef SharedBucket *bucket = <SharedBucket *>job.context
    cdef Advance status = ADVANCE_PENDING
    cdef size_t slot
    if not all_arrived(&state.shared, bucket):
        return ADVANCE_BLOCKED
    for slot in range(state.window):
        if bucket.next_own >= bucket.chunks:
            break
        if state.jobs[slot] != NULL:
            continue
        transport.code = start_chunk(state, slot, job, bucket.next_own)
        if transport.code != MPI_SUCCESS:
            return ADVANCE_FAILED
        bucket.next_own += <uint32_t>state.lanes
        status = ADVANCE_SOME
    # No slot is freed before the next poll, so no later bucket can overtake this one.
    if all_finished(bucket):
        return ADVANCE_DONE
    return status


cdef class LaneTransport:
    """Means of gradients over several nodes.

    Collective over `communicator`.

    Args:
        communicator: an mpi4py communicator of all ranks.
        node: its ranks that share memory with this one, used by nothing else.
        chunk_bytes: size of a chunk in bytes of the bucket, a multiple of 64; the last one of a
            bucket may be a quarter longer.
        window: chunks in flight at once in each lane, 1 to 16.
        ways: how chunks travel between nodes, as for `Wire`.
        group: as for `Wire`, in nodes.

    Raises:
        ValueError: `chunk_bytes`, `window` or `group` is out of range.
        OSError: no memory, or the ranks cannot share memory; raised on all ranks of the node.
    """

    def __init__(self, communicator, node, *, size_t chunk_bytes=1 << 19, size_t window=2,
                 ways=None, size_t group=1):
        from mpi4py import MPI

        self.node = node
        self.state.shared.ranks = node.Get_size()
        self.state.shared.rank = node.Get_rank()
        self.state.shared.chunk_bytes = chunk_bytes
        self.state.window = window
        sizes = communicator.allgather(node.Get_size())
        self.state.lanes = min(sizes)
        drives = self.state.shared.rank < self.state.lanes
        # All lanes have the nodes in the same order.
        lane = note(communicator.Split(
            self.state.shared.rank if drives else MPI.UNDEFINED,
            node.bcast(communicator.Get_rank()),
        ))
        if drives:
            self.wire = Wire(
                lane, chunk_bytes=chunk_bytes, window=window, ways=ways, group=group,
                sums=max(sizes) > 1,
            )
        self.lane = lane
        # Collective, so it comes before what may fail on one rank alone.
        self.bell = make_bell(node, <size_t>&self.state.shared)
        if drives:
            self.state.wire = &self.wire.state
            self.wire.connect(&self.state.shared.transport)
        self.state.shared.transport.announce = announce_to_lane
        self.state.shared.transport.poll = poll
        self.state.shared.transport.advance = advance
        self.state.shared.transport.take_ticket = take_ticket
        self.state.shared.transport.sleep = sleep
        self.state.shared.transport.wants_thread = True

    def allocate(self, sizes):
        """Return a `BucketMemory` for each of `sizes` in bytes.

        Collective.

        Raises:
            OSError: some rank has too little memory; raised on all ranks of its node.
        """
        chunk_bytes = self.state.shared.chunk_bytes
        buckets = SharedBuckets(
            self.node, sizes, chunk_bytes, longest_chunk(chunk_bytes) - chunk_bytes)
        return buckets.memories(sizes, self.state.shared.rank)

    def free(self):
        """Free the communicators. Collective."""
        if self.wire is not None:
            self.wire.free()
            self.lane.Free()
        self.node.Free()

    @property
    def address(self):
        """Where the engine finds the C ``Transport``."""
        return <size_t>&self.state.shared.transport
