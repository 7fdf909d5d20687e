from mpiddp.engine.interface cimport MAX_SLOTS, ChunkProgress, Job, Transport
from mpiddp.mpi.calls cimport MPI_Comm, MPI_Request


cdef enum:
    MAX_LEVELS = 2


cdef enum ExchangePhase:
    EXCHANGE_NONE       # the slot is free
    EXCHANGE_TRAVELS    # the collective of this step is under way
    EXCHANGE_WAITS      # that of this step may start when all earlier chunks have begun theirs


cdef struct Level:
    # Ranks among which a chunk is cut into slices, one each.
    MPI_Comm exchange[2]    # for Ialltoallv, in the first pass and in the second
    MPI_Comm gather[2]      # for Iallgather and Iallgatherv
    size_t members
    size_t member           # this rank


cdef struct ExchangedChunk:
    # What a slot averages: `count` elements, from element `first` on, of each of `ranks` buffers.
    Job *job
    char **buffers
    size_t ranks
    size_t first
    size_t count
    size_t number           # chunks that started before
    size_t step             # collectives that have ended, of this pass
    size_t again            # 0 in the first pass, 1 in the second
    ExchangePhase phase
    MPI_Request request
    char *room              # for a chunk, and some more if it is no multiple of the members
    char *other_room        # the same
    char *inner_room        # the same for a slice, with two levels
    char *other_inner_room
    char *sent              # what the first collective sends
    char *received          # where it arrives
    char *means             # what the last collective gathers
    char **slices           # addresses of what is added
    int *sizes              # bytes that go to each member, none to itself, or that it has added
    int *own_sizes          # bytes that come from each member, none from itself
    int *places             # where they lie, in bytes


cdef struct ChunkExchange:
    Transport *transport    # gets the name of the MPI call
    Level levels[MAX_LEVELS]
    size_t level_count
    size_t started
    int repeats             # whether a sum may be rounded to infinity before all are added
    ExchangedChunk slots[MAX_SLOTS]


# The bytes that a slot needs, for chunks of up to `bytes_`.
cdef size_t room_needed(ChunkExchange *exchange, size_t bytes_) noexcept

# Give `window` slots their memory: each gets `room_needed` bytes of every `stride` bytes.
# Return 0, or -1 if there is no memory for the addresses.
cdef int set_up(
    ChunkExchange *exchange, Transport *transport, char *memory, size_t window, size_t stride,
    size_t bytes_) noexcept
cdef void clear(ChunkExchange *exchange) noexcept

# As start_sum and test_sum of chunk_sums.pxd.
cdef int start_exchange(
    ChunkExchange *exchange, size_t slot, Job *job, char **buffers, size_t ranks, size_t first,
    size_t count) noexcept nogil
cdef int test_exchange(
    ChunkExchange *exchange, size_t slot, ChunkProgress *progress) noexcept nogil
