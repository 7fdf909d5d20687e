"""The plain transport: MPI_Iallreduce of each chunk over the whole communicator.

Note [Out of place]
~~~~~~~~~~~~~~~~~~~
The sum lands in a scratch chunk and is divided on its way back to the bucket.
The division needs one pass over the data anyway, the scratch chunk stays in the
cache, and Open MPI's Iallreduce takes half the time out of place (MPICH does not
care).

Note [Sums of 16-bit gradients]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
float16 and bfloat16 are widened to float32, summed, divided, and rounded once.
MPI has no portable datatype for either (`MPI.BFLOAT16_T` is null in Open MPI's and
MPICH's wheels), and adding in 16 bits would round after each rank.
"""

from libc.stdlib cimport free
from libc.string cimport memset

from mpi4py.libmpi cimport (
    MPI_DOUBLE,
    MPI_FLOAT,
    MPI_REQUEST_NULL,
    MPI_STATUS_IGNORE,
    MPI_SUM,
    MPI_Comm,
    MPI_Iallreduce,
    MPI_Test,
)

from mpiddp.engine cimport MAX_SLOTS, Transport, Work, element_bytes
from mpiddp.errors cimport check_errno
from mpiddp.kernels cimport ELEMENT_FLOAT32, ELEMENT_FLOAT64, ElementType, selected_kernels
from mpiddp.memory import allocate_private


cdef extern from "<stdlib.h>" nogil:
    int posix_memalign(void **, size_t, size_t)


cdef enum:
    ALIGNMENT = 64


cdef int start(
    Transport *transport, size_t slot, Work *work, size_t offset, size_t count
) noexcept nogil:
    cdef IallreduceState *state = <IallreduceState *>transport
    cdef char *chunk = work.data + offset * element_bytes(work.element)
    state.works[slot] = work
    state.offsets[slot] = offset
    state.counts[slot] = count
    transport.call = "MPI_Iallreduce"
    if work.element == ELEMENT_FLOAT64:
        return MPI_Iallreduce(
            chunk, state.received[slot], <int>count, MPI_DOUBLE, MPI_SUM, state.comm,
            &state.requests[slot],
        )
    if work.element != ELEMENT_FLOAT32:
        selected_kernels().sum_to(work.element, state.widened[slot], &chunk, 1, 0, count)
        chunk = state.widened[slot]
    return MPI_Iallreduce(
        chunk, state.received[slot], <int>count, MPI_FLOAT, MPI_SUM, state.comm,
        &state.requests[slot],
    )


cdef int test(Transport *transport, size_t slot, int *finished) noexcept nogil:
    cdef IallreduceState *state = <IallreduceState *>transport
    cdef Work *work = state.works[slot]
    cdef ElementType element = work.element
    cdef size_t count = state.counts[slot]
    cdef char *received = state.received[slot]
    cdef char *chunk = work.data + state.offsets[slot] * element_bytes(element)
    cdef int code
    transport.call = "MPI_Test"
    code = MPI_Test(&state.requests[slot], finished, MPI_STATUS_IGNORE)
    if not finished[0]:
        return code
    selected_kernels().spread_mean(element, &chunk, 1, 0, count, received, work.divisor)
    return code


cdef class IallreduceTransport:
    """Chunked, windowed MPI_Iallreduce.

    Not collective (the communicator it is given was made collectively, and must be
    used by nothing else).

    Args:
        communicator: an mpi4py intracommunicator.
        chunk_bytes: size of a chunk as sent, in bytes; a multiple of 64.
        window: chunks in flight at once, 1 to 16.

    Raises:
        ValueError: `chunk_bytes` or `window` is out of range.
        OSError: no memory for the scratch chunks.
    """

    def __cinit__(self, communicator, *, size_t chunk_bytes=1 << 19, size_t window=2):
        cdef size_t slot
        cdef void *memory = NULL
        if chunk_bytes == 0 or chunk_bytes % ALIGNMENT or chunk_bytes > 1 << 30:
            raise ValueError(
                f"chunk_bytes must be a multiple of {ALIGNMENT} of at most 2^30, not {chunk_bytes}"
            )
        if not 1 <= window <= MAX_SLOTS:
            raise ValueError(f"window must be 1 to {MAX_SLOTS}, not {window}")
        memset(&self.state, 0, sizeof(self.state))
        check_errno(posix_memalign(&memory, ALIGNMENT, 2 * window * chunk_bytes), "posix_memalign")
        self.memory = <char *>memory
        for slot in range(window):
            self.state.received[slot] = self.memory + 2 * slot * chunk_bytes
            self.state.widened[slot] = self.memory + (2 * slot + 1) * chunk_bytes
            self.state.requests[slot] = MPI_REQUEST_NULL
        self.state.comm = <MPI_Comm><size_t>communicator.handle
        self.state.transport.slots = window
        self.state.transport.chunk_bytes = chunk_bytes
        self.state.transport.wants_thread = True
        self.state.transport.start = start
        self.state.transport.test = test

    def __dealloc__(self):
        cdef size_t slot
        for slot in range(self.state.transport.slots):
            if self.state.requests[slot] != MPI_REQUEST_NULL:
                return      # MPI still writes there
        free(self.memory)

    def allocate(self, sizes):
        """Return a `BucketMemory` for each of `sizes` in bytes. Not collective."""
        return allocate_private(sizes)

    def free(self):
        """Free what was made of the communicator: nothing. Not collective."""

    @property
    def takes_any_memory(self):
        """Works need not lie in memory that `allocate` has returned."""
        return True

    @property
    def address(self):
        """Where the engine finds the C ``Transport``."""
        return <size_t>&self.state.transport
