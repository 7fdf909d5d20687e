"""The transport without shared memory: the chunks of all ranks go over the wire."""

from mpiddp.engine.interface cimport ChunkProgress, Job, Transport
from mpiddp.transports.wire cimport SIZES, WAY_IALLREDUCE, start_chunk, test_chunk
from mpiddp.engine.memory import allocate_private


cdef int start(
    Transport *transport, size_t slot, Job *job, size_t offset, size_t count
) noexcept nogil:
    cdef MessageState *state = <MessageState *>transport
    return start_chunk(state.wire, slot, job, &job.data, 1, offset, count)


cdef int test(Transport *transport, size_t slot, ChunkProgress *progress) noexcept nogil:
    return test_chunk((<MessageState *>transport).wire, slot, progress)


cdef class MessageTransport:
    """Chunks of buckets in private memory, a window of them on the wire.

    Not collective.

    Args:
        wire: between the ranks, used by nothing else.

    Raises:
        OSError: no memory for the chunks.
    """

    def __cinit__(self, Wire wire not None):
        self.wire = wire
        self.state.wire = &wire.state
        wire.connect(&self.state.transport)
        self.state.transport.slots = wire.window
        self.state.transport.chunk_bytes = wire.chunk_bytes
        # Where MPI adds, 16-bit elements travel as float32: half as many fill a chunk.
        if wire.state.ways[1][SIZES - 1] == WAY_IALLREDUCE:
            self.state.transport.least_bytes = sizeof(float)
        self.state.transport.wants_thread = True
        self.state.transport.start = start
        self.state.transport.test = test

    def allocate(self, sizes):
        """Return a `BucketMemory` for each of `sizes` in bytes. Not collective."""
        return allocate_private(sizes)

    def free(self):
        """Free what was made from the communicator. Collective."""
        self.wire.free()

    @property
    def takes_any_memory(self):
        """Jobs need not lie in memory that `allocate` has returned."""
        return True

    @property
    def address(self):
        """Where the engine finds the C ``Transport``."""
        return <size_t>&self.state.transport
