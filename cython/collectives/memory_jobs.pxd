# One collective in memory that the ranks of a group share, as a job of the engine. No Python.

from libc.stdint cimport uint32_t

from mpiddp.engine.interface cimport Advance, Job, Transport
from mpiddp.transports.shared cimport Bell
from mpiddp.transports.shared_buckets cimport CACHE_LINE


cdef enum:
    HEAD_BYTES = 4096
    HALF_BYTES = 1 << 19
    # A rank's line, and room for what it shows in two rounds.
    STREAM_BYTES = HEAD_BYTES + 2 * HALF_BYTES
    # How many of these a rank of a group has: lanes work on several pieces at a time.
    STREAMS = 2
    REGION_BYTES = STREAMS * STREAM_BYTES
    MOST_RANKS = 1024


cdef enum Kind:
    MEET                    # nothing is handed on
    REDUCE_ALL              # all ranks get what is made of all ranks' `source`
    REDUCE_TO_ROOT          # the root does
    REDUCE_PARTS            # each rank gets what is made of all ranks' part for it
    GATHER_ALL              # all ranks get all ranks' `source`
    SPREAD                  # all ranks get the root's `source`
    EXCHANGE                # each rank gets each rank's part for it
    TRADE                   # the same, where parts have sizes of their own
    DEAL                    # each rank gets the root's part for it, of a size of its own


cdef enum Phase:
    FILL                    # show this rank's part of a round
    TAKE                    # take what the others show
    COLLECT                 # take the slices that each rank has reduced
    CLOSE                   # wait until nobody reads this rank's memory any more


cdef struct Line:
    # In shared memory, one for each rank.
    uint32_t round          # the last that the rank has begun; it has ended those before
    # The rest is for Note [Reading each other's memory].
    int left                # the rank has given up: its tensors may be gone
    int writes              # the rank may be writing into another's memory just now
    char padding[CACHE_LINE - 12]
    uint32_t claimed        # how many pieces of a broadcast the rank or the root has taken up, ...
    uint32_t pushed         # ... and how many of them the root has written
    char other_padding[CACHE_LINE - 8]


cdef struct MemoryState:
    Transport transport     # first: the engine's pointer is a pointer to this
    Bell *bell
    char *regions           # the first rank's; the others' follow
    uint32_t ranks
    uint32_t rank
    uint32_t round          # the last that this rank has begun
    uint32_t reached        # a round that all ranks have begun
    MemoryJob *current      # the one that is under way
    Transport *requests     # told when one that the engine moves has ended: futures wait there
    int given_up            # the group is broken or gone: touch nothing any more
    # From how many bytes on ranks read each other's memory to move them, and to reduce them; 0:
    # never.
    size_t moves_from
    size_t sums_from
    size_t all_reduces_from


cdef struct MemoryJob:
    Job job                 # first: what the engine sees of it; `count` is that of bytes
    Kind kind
    uint32_t root
    int element             # an ElementType, whose kernels reduce; ...
    int way                 # ... or what `combining` calls the reduction; 0: the kernels
    Phase phase
    char *source
    char *target
    char **sources          # for each rank its part, where there are parts
    char **targets
    size_t *sizes           # of a trade or a deal: bytes for each rank, and then from each
    size_t size             # bytes that each rank shows in all, or for each rank; of these, ...
    # ... the most that any rank has for another, from the first round on
    size_t at               # of these, how many are done
    uint32_t shown          # the round in which ranks said where their tensors are, ...
    uint32_t claims         # ... and how many pieces of a broadcast this one has read
    int failure             # an errno: some of another rank's memory could not be read


cdef Advance advance(Transport *transport, Job *job, int helping) noexcept nogil
cdef int has_own_sizes(MemoryJob *job) noexcept nogil
cdef bint has_shown_all(MemoryState *state, MemoryJob *job) noexcept nogil

# For direct_jobs.pyx, where ranks read each other's memory, and for lane_jobs.pyx, which goes on
# between nodes with what the ranks of a node have reduced.
cdef double SPIN
cdef Line *line(MemoryState *state, uint32_t rank) noexcept nogil
cdef char *half(MemoryState *state, uint32_t rank, uint32_t round) noexcept nogil
cdef int has_begun(MemoryState *state, uint32_t rank, uint32_t round) noexcept nogil
cdef int all_have_begun(MemoryState *state, uint32_t round) noexcept nogil
cdef void begin_round(MemoryState *state) noexcept nogil
cdef size_t slice_bytes(MemoryState *state, size_t size) noexcept nogil
cdef void show_slices(MemoryState *state, char *place, const char *data, size_t size) noexcept nogil
cdef void reduce(
    MemoryState *state, MemoryJob *job, char *out, const char *own, size_t offset, size_t size,
) noexcept nogil
cdef void reduce_parts(
    MemoryState *state, MemoryJob *job, char *out, char **parts, const char *own, size_t size,
) noexcept nogil
cdef void keep_own(MemoryState *state, MemoryJob *job) noexcept nogil
cdef void collect(MemoryState *state, char *target, size_t size) noexcept nogil
