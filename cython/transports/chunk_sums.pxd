from mpiddp.engine.interface cimport MAX_SLOTS, ChunkProgress, Job, Transport
from mpiddp.mpi.calls cimport MPI_Comm, MPI_Request


cdef enum ChunkPhase:
    CHUNK_NONE          # the slot is free
    CHUNK_SUMS          # the all-reduce is under way
    CHUNK_OVERFLOWED    # it is done, and another one has to start
    CHUNK_SUMS_AGAIN    # that one is under way


cdef struct ChunkSum:
    # What a slot sums: `count` elements, from element `first` on, of each of `ranks` buffers.
    Job *job
    char **buffers
    size_t ranks
    size_t first
    size_t count
    char *sent              # room for the chunk in the type that is summed
    char *received          # the same
    MPI_Request request
    size_t number           # chunks that started before
    size_t written          # elements that hold the mean
    ChunkPhase phase


cdef struct ChunkSums:
    Transport *transport    # gets the name of the MPI call
    MPI_Comm comm
    MPI_Comm comm_again     # the same ranks
    size_t started
    ChunkSum slots[MAX_SLOTS]


# Give `window` slots their memory: each gets `2 * bytes_` of every `stride` bytes.
cdef void set_up(
    ChunkSums *sums, Transport *transport, char *memory, size_t window, size_t stride,
    size_t bytes_) noexcept

# Start the all-reduce of what these buffers hold; return an MPI error code. Chunks must start in
# the same order on all ranks, and the buffers must not change until it is finished.
cdef int start_sum(
    ChunkSums *sums, size_t slot, Job *job, char **buffers, size_t ranks, size_t first,
    size_t count) noexcept nogil

# See whether the slot's chunk holds the mean in all buffers; return an MPI error code.
cdef int test_sum(ChunkSums *sums, size_t slot, ChunkProgress *progress) noexcept nogil
