# One collective of a group whose ranks are on several nodes, as a job of the engine. No Python.

from libc.stdint cimport uint32_t

from mpiddp.collectives.memory_jobs cimport STREAMS, MemoryJob, MemoryState
from mpiddp.engine.interface cimport Advance, Job, Transport
from mpiddp.mpi.calls cimport MPI_Comm, MPI_Request
from mpiddp.transports.wire cimport WireState


cdef enum Step:
    BEGINS                  # no piece is under way
    IS_SHOWN                # wait for the others of the node, and reduce what they show
    WAITS_FOR_TURN          # to travel: pieces do so in their order
    TRAVELS
    COMES_HOME              # wait for the others of the node, and take what they have received


cdef struct Stream:
    # What works on every STREAMS-th piece, in memory of its own.
    MemoryState memory      # of this rank's node
    Step step
    size_t piece            # which of the collective's pieces comes next, or is under way
    size_t at               # where it begins
    size_t size
    Job sum                 # what the wire knows of it
    char *slice             # this rank's, of a piece that is cut into slices
    MPI_Request request
    char *room              # for what other nodes send, and what they get
    char *other_room


cdef struct LaneState:
    Transport transport     # first: the engine's pointer is a pointer to this
    Stream streams[STREAMS]
    WireState *wire         # sums slices over the nodes
    MPI_Comm moves          # of the ranks of this lane, for everything else
    uint32_t nodes
    uint32_t node           # this one
    uint32_t ranks          # of each node
    uint32_t rank           # this one, in its node: its lane
    uint32_t *places        # of each node the ranks, by lane: their numbers in the group
    MemoryJob *current      # the one that is under way
    size_t turn             # the piece that travels next
    Transport *requests     # told when one has ended: futures wait there
    int given_up            # the group is broken or gone: touch nothing any more


cdef size_t bytes_of_piece(LaneState *state, MemoryJob *job) noexcept nogil
cdef Advance advance(Transport *transport, Job *job, int helping) noexcept nogil
