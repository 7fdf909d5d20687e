from mpiddp.engine.interface cimport MAX_SLOTS, ChunkProgress, Job, Transport
from mpiddp.mpi.calls cimport MPI_Comm
from mpiddp.transports.chunk_exchange cimport ChunkExchange
from mpiddp.transports.chunk_sums cimport ChunkSums


cdef enum:
    SIZES = 32      # chunks of 2^(k - 1) to 2^k - 1 bytes are size k
    WIDTHS = 4      # elements of 2^k bytes


cdef enum Way:
    WAY_DIRECT
    WAY_TWO_LEVELS
    WAY_IALLREDUCE


cdef struct WireState:
    ChunkExchange exchanges[2]  # WAY_DIRECT and WAY_TWO_LEVELS
    ChunkSums sums
    Way ways[WIDTHS][SIZES]     # by width of an element and size of a chunk
    Way way[MAX_SLOTS]               # of the chunk in each slot


cdef class Wire:
    cdef WireState state
    cdef readonly size_t chunk_bytes
    cdef readonly size_t window
    cdef readonly object ways
    cdef char *memory
    cdef list communicators     # to free
    cdef object unused          # given, and not in use yet
    cdef connect(self, Transport *transport)
    cdef _add_level(self, Way way, communicator)
    cdef MPI_Comm _take(self, communicator) except *


# Start averaging what these buffers hold; return an MPI error code. Chunks must start in the same
# order on all ranks, and the buffers must not change until it is finished.
cdef int start_chunk(
    WireState *wire, size_t slot, Job *job, char **buffers, size_t ranks, size_t first,
    size_t count) noexcept nogil

# See whether the slot's chunk holds the mean in all buffers; return an MPI error code.
cdef int test_chunk(WireState *wire, size_t slot, ChunkProgress *progress) noexcept nogil
