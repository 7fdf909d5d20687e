"""How chunks travel between nodes, or between ranks: which collectives of MPI average one.

There are three ways: a direct exchange, one in two levels (chunk_exchange.pyx), and
MPI_Iallreduce (chunk_sums.pyx). Each has communicators of its own. Which one a chunk takes
depends only on its size and the width of its elements, so it is the same on all ranks;
mpiddp/transports/wire_choice.py decides.
"""

from libc.stdlib cimport free

from mpiddp.engine.interface cimport MAX_SLOTS, longest_chunk
from mpiddp.mpi.calls cimport MPI_Comm
from mpiddp.mpi.errors cimport check_errno
from mpiddp.system.kernels cimport element_bytes
from mpiddp.transports cimport chunk_exchange, chunk_sums
from mpiddp.mpi.communicators import note
from mpiddp.transports.wire_choice import DIRECT, IALLREDUCE, TWO_LEVEL


cdef extern from "<stdlib.h>" nogil:
    int posix_memalign(void **, size_t, size_t)


cdef enum:
    ALIGNMENT = 64

_WAYS = {IALLREDUCE: WAY_IALLREDUCE, DIRECT: WAY_DIRECT, TWO_LEVEL: WAY_TWO_LEVELS}


cdef size_t bits_of(size_t number) noexcept nogil:
    cdef size_t bits = 0
    while number:
        number >>= 1
        bits += 1
    return min(bits, SIZES - 1)


cdef Way *way_of(WireState *wire, size_t bytes_of_element, size_t count) noexcept nogil:
    return &wire.ways[bits_of(bytes_of_element) - 1][bits_of(count * bytes_of_element)]


cdef int start_chunk(
    WireState *wire, size_t slot, Job *job, char **buffers, size_t ranks, size_t first,
    size_t count,
) noexcept nogil:
    cdef Way way = way_of(wire, element_bytes(job.element), count)[0]
    wire.way[slot] = way
    if way == WAY_IALLREDUCE:
        return chunk_sums.start_sum(&wire.sums, slot, job, buffers, ranks, first, count)
    return chunk_exchange.start_exchange(
        &wire.exchanges[<int>way], slot, job, buffers, ranks, first, count)


cdef int test_chunk(WireState *wire, size_t slot, ChunkProgress *progress) noexcept nogil:
    cdef int way = wire.way[slot]
    if way == WAY_IALLREDUCE:
        return chunk_sums.test_sum(&wire.sums, slot, progress)
    return chunk_exchange.test_exchange(&wire.exchanges[way], slot, progress)


cdef class Wire:
    """The ways in which the chunks of a transport travel.

    Collective over `communicator`.

    Args:
        communicator: an mpi4py intracommunicator, used by nothing else.
        chunk_bytes: size of a chunk in bytes of the bucket, a multiple of 64; one may be a quarter
            longer.
        window: chunks in flight at once, 1 to 16.
        ways: for elements of 2, 4 and 8 bytes, which chunks take which way: pairs of a smallest
            size in bytes, 0 or a power of two, and one of `wire_choice.WAYS`, the smallest first.
            None is MPI_Iallreduce for all.
        group: ranks of a group in two levels, a divisor of their number.
        sums: whether some rank sends sums of several buffers.

    Raises:
        ValueError: `chunk_bytes`, `window` or `group` is out of range.
        OSError: no memory for the chunks.
    """

    def __init__(self, communicator, *, size_t chunk_bytes=1 << 19, size_t window=2, ways=None,
                 size_t group=1, bint sums=False):
        cdef size_t k, width, ranks = communicator.Get_size()
        if chunk_bytes == 0 or chunk_bytes % ALIGNMENT or chunk_bytes > 1 << 29:
            raise ValueError(
                f"chunk_bytes must be a multiple of {ALIGNMENT} of at most 2^29, not {chunk_bytes}"
            )
        if not 1 <= window <= MAX_SLOTS:
            raise ValueError(f"window must be 1 to {MAX_SLOTS}, not {window}")
        if group == 0 or ranks % group:
            raise ValueError(f"group must be a divisor of {ranks}, not {group}")
        self.chunk_bytes = chunk_bytes
        self.window = window
        self.ways = ways or dict.fromkeys((2, 4, 8), ((0, IALLREDUCE),))
        self.communicators = []
        self.unused = communicator
        for bytes_of_element, sizes in self.ways.items():
            width = bits_of(bytes_of_element) - 1
            for k in range(SIZES):
                for smallest, name in sizes:
                    if smallest <= 1 << k >> 1:
                        self.state.ways[width][k] = _WAYS[name]
        # Collective, so it comes before what may fail on one rank alone.
        used = {name for sizes in self.ways.values() for _, name in sizes}
        if IALLREDUCE in used:
            self.state.sums.comm = self._take(communicator)
            self.state.sums.comm_again = self._take(communicator)
        if DIRECT in used:
            self.state.exchanges[<int>WAY_DIRECT].repeats = sums
            self._add_level(WAY_DIRECT, communicator)
        if TWO_LEVEL in used:
            self.state.exchanges[<int>WAY_TWO_LEVELS].repeats = True
            rank = communicator.Get_rank()
            for colour in (rank // group, ranks + rank % group):
                level = note(communicator.Split(colour, rank))
                self.communicators.append(level)
                self.unused = level
                self._add_level(WAY_TWO_LEVELS, level)

    cdef _add_level(self, Way way, communicator):
        cdef ChunkExchange *exchange = &self.state.exchanges[<int>way]
        cdef chunk_exchange.Level *level = &exchange.levels[exchange.level_count]
        cdef size_t again
        exchange.level_count += 1
        level.members = communicator.Get_size()
        level.member = communicator.Get_rank()
        for again in range(2 if exchange.repeats else 1):
            level.exchange[again] = self._take(communicator)
            level.gather[again] = self._take(communicator)

    cdef MPI_Comm _take(self, communicator) except *:
        """Return a communicator of the same ranks: at first this one, then duplicates."""
        from mpi4py import MPI

        taken = communicator
        if self.unused is not communicator:
            taken = note(communicator.Dup())
            self.communicators.append(taken)
        self.unused = None
        taken.Set_errhandler(MPI.ERRORS_RETURN)
        return <MPI_Comm><size_t>taken.handle

    cdef connect(self, Transport *transport):
        """Get the memory for chunks; errors of MPI will be left in `transport`."""
        cdef void *memory = NULL
        # Where MPI adds, 16-bit elements become float32.
        cdef size_t longest = (longest_chunk(self.chunk_bytes) + ALIGNMENT - 1) & -ALIGNMENT
        cdef size_t bytes_ = 2 * longest
        cdef size_t room = 2 * bytes_
        cdef ChunkExchange *exchange
        cdef size_t way
        for way in range(2):
            exchange = &self.state.exchanges[way]
            if exchange.level_count:
                room = max(room, chunk_exchange.room_needed(exchange, longest))
        check_errno(posix_memalign(&memory, ALIGNMENT, self.window * room), "posix_memalign")
        self.memory = <char *>memory
        chunk_sums.set_up(&self.state.sums, transport, self.memory, self.window, room, bytes_)
        for way in range(2):
            exchange = &self.state.exchanges[way]
            if exchange.level_count and chunk_exchange.set_up(
                exchange, transport, self.memory, self.window, room, longest
            ):
                raise MemoryError

    def free(self):
        """Free what was made of the communicator. Collective."""
        for communicator in self.communicators:
            communicator.Free()

    def __dealloc__(self):
        cdef size_t slot, way
        for slot in range(MAX_SLOTS):
            if self.state.sums.slots[slot].phase != chunk_sums.CHUNK_NONE:
                return      # MPI still writes there
            for way in range(2):
                if (
                    self.state.exchanges[way].slots[slot].phase
                    != chunk_exchange.EXCHANGE_NONE
                ):
                    return
        for way in range(2):
            chunk_exchange.clear(&self.state.exchanges[way])
        free(self.memory)
