"""The plain transport: MPI_Iallreduce of each chunk over the whole communicator.

Note [Out of place]
~~~~~~~~~~~~~~~~~~~
The sum lands in a scratch chunk and is divided on its way back to the bucket.
The division needs one pass over the data anyway, the scratch chunk stays in the
cache, and Open MPI's Iallreduce takes half the time out of place (in MPICH it makes
no difference).

Note [Sums of 16-bit gradients]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
float16 and bfloat16 are widened to float32, summed, divided, and rounded once.
MPI has no portable datatype for either (`MPI.BFLOAT16_T` is null in Open MPI's and
MPICH's wheels), and adding in 16 bits would round after each rank.

The steps of a chunk are in chunk_sums.pyx.
"""

from libc.stdlib cimport free
from libc.string cimport memset

from mpi4py.libmpi cimport MPI_Comm

from mpiddp.engine.interface cimport MAX_SLOTS, Job, Transport
from mpiddp.mpi.errors cimport check_errno
from mpiddp.transports.chunk_sums cimport CHUNK_NONE, set_up, start_sum, test_sum
from mpiddp.engine.memory import allocate_private


cdef extern from "<stdlib.h>" nogil:
    int posix_memalign(void **, size_t, size_t)


cdef enum:
    ALIGNMENT = 64


cdef int start(
    Transport *transport, size_t slot, Job *job, size_t offset, size_t count
) noexcept nogil:
    cdef IallreduceState *state = <IallreduceState *>transport
    return start_sum(&state.sums, slot, job, &job.data, 1, offset, count)


cdef int test(Transport *transport, size_t slot, int *finished) noexcept nogil:
    return test_sum(&(<IallreduceState *>transport).sums, slot, finished)


cdef class IallreduceTransport:
    """Chunked, windowed MPI_Iallreduce.

    Collective over `communicator`.

    Args:
        communicator: an mpi4py intracommunicator, used by nothing else.
        chunk_bytes: size of a chunk as sent, in bytes; a multiple of 64.
        window: chunks in flight at once, 1 to 16.

    Raises:
        ValueError: `chunk_bytes` or `window` is out of range.
        OSError: no memory for the scratch chunks.
    """

    def __cinit__(self, communicator, *, size_t chunk_bytes=1 << 19, size_t window=2):
        cdef void *memory = NULL
        if chunk_bytes == 0 or chunk_bytes % ALIGNMENT or chunk_bytes > 1 << 30:
            raise ValueError(
                f"chunk_bytes must be a multiple of {ALIGNMENT} of at most 2^30, not {chunk_bytes}"
            )
        if not 1 <= window <= MAX_SLOTS:
            raise ValueError(f"window must be 1 to {MAX_SLOTS}, not {window}")
        from mpi4py import MPI

        memset(&self.state, 0, sizeof(self.state))
        # Collective, so it comes before what may fail on one rank alone.
        self.again = communicator.Dup()
        self.again.Set_errhandler(MPI.ERRORS_RETURN)
        check_errno(posix_memalign(&memory, ALIGNMENT, 2 * window * chunk_bytes), "posix_memalign")
        self.memory = <char *>memory
        set_up(
            &self.state.sums, &self.state.transport, <MPI_Comm><size_t>communicator.handle,
            <MPI_Comm><size_t>self.again.handle, self.memory, window, chunk_bytes,
        )
        self.state.transport.slots = window
        self.state.transport.chunk_bytes = chunk_bytes
        self.state.transport.wants_thread = True
        self.state.transport.start = start
        self.state.transport.test = test

    def __dealloc__(self):
        cdef size_t slot
        for slot in range(self.state.transport.slots):
            if self.state.sums.slots[slot].phase != CHUNK_NONE:
                return      # MPI still writes there
        free(self.memory)

    def allocate(self, sizes):
        """Return a `BucketMemory` for each of `sizes` in bytes. Not collective."""
        return allocate_private(sizes)

    def free(self):
        """Free what was made from the communicator. Collective."""
        self.again.Free()

    @property
    def takes_any_memory(self):
        """Jobs need not lie in memory that `allocate` has returned."""
        return True

    @property
    def address(self):
        """Where the engine finds the C ``Transport``."""
        return <size_t>&self.state.transport
